"""Tests files of vectors: listing, matching with a vocabulary, and writing in every format."""

from __future__ import annotations

import json
from pathlib import Path

import posembed as pe
import pytest
import torch
from posembed.commands import main
from posembed.commands.vectors import read_vocabulary

safetensors = pytest.importorskip("safetensors.torch")

WORDS = ["the", "cat", "café", "sat"]
ENDINGS = {
    "safetensors": "safetensors",
    "bin": "word2vec-binary",
    "vec": "word2vec-text",
    "txt": "glove",
}


def vectors() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1, 1e-8, 1e8]
    )


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    path = tmp_path / "glove.txt"
    rows = zip(WORDS, vectors().tolist(), strict=True)
    path.write_text("".join(f"{word} {' '.join(map(str, row))}\n" for word, row in rows))
    return path


def run(*argv: object, code: int = 0) -> None:
    assert main(["vectors", *map(str, argv)]) == code


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> dict:
    run(*argv, "--json")
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    run(*argv, code=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_listing(glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = printed(capsys, glove)
    assert known["format"] == "glove"
    assert known["tables"] == [{"name": "vectors", "shape": [4, 3], "dtype": "float32"}]
    model = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(2, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}
    safetensors.save_file(tensors, model)
    run(model)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{model}: safetensors"
    assert sorted(line.split() for line in lines[2:]) == [
        ["a", "(2,", "5)", "bfloat16"],
        ["b", "(7,)", "float32"],
    ]


VOCABULARIES = {
    "words.txt": "cat\ndog\nthe\n",
    "vocab.json": json.dumps({"cat": 0, "dog": 1, "the": 2}),
    "tokenizer.json": json.dumps(
        {"model": {"type": "BPE", "vocab": {"cat": 0, "dog": 1, "the": 2}}}
    ),
    "unigram.json": json.dumps({"model": {"vocab": [["cat", 0.0], ["dog", -1.0], ["the", -2.0]]}}),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_coverage(
    name: str, glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(VOCABULARIES[name])
    known = printed(capsys, glove, "--coverage", path)
    assert known["coverage"] == {"found": 2, "missing": ["dog"], "duplicate": []}
    run(glove, "--coverage", path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["2 of 3 words have a row; 0 have several", "without: dog"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_byte_order_mark_is_no_part_of_the_first_word(
    name: str, glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(VOCABULARIES[name], encoding="utf-8-sig")
    known = printed(capsys, glove, "--coverage", path)
    assert known["coverage"] == {"found": 2, "missing": ["dog"], "duplicate": []}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", []),
        (b"cat\r\nthe\r\n", ["cat", "the"]),
        ("cat\n\u2028\nthe".encode(), ["cat", "\u2028", "the"]),
        (b"cat\n\n", ["cat", ""]),
    ],
)
def test_lines_of_a_vocabulary(content: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    assert read_vocabulary(str(path)) == words


@pytest.mark.parametrize("name", ["words.txt", "vocab.json"])
def test_a_vocabulary_that_is_not_utf_8(
    name: str, glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(b"caf\xe9\n")
    assert f"{path}: expected UTF-8" in refusal(capsys, glove, "--coverage", path)


@pytest.mark.parametrize(
    "option", [("--vocabulary", "x"), ("--format", "glove"), ("--tensor", "x"), ("--force",)]
)
def test_options_of_the_output_are_refused_without_one(
    option: tuple[str, ...], glove: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"posembed vectors: {option[0]}: expected with --output only\n"
    assert refusal(capsys, glove, *option) == message


@pytest.mark.parametrize("kind", ["glove", "word2vec-text", "word2vec-binary"])
@pytest.mark.parametrize(("word", "number"), [("5", 1.0), ("-5", 0.0), ("5", 0.5), ("a", 1.0)])
def test_rows_of_one_number(
    kind: str, word: str, number: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output can be read back, or is refused: "5 1" looks like word2vec's header."""
    source, words, output = (tmp_path / name for name in ("a.safetensors", "words.txt", "output"))
    safetensors.save_file({"t": torch.tensor([[number], [2.0]])}, source)
    words.write_text(f"{word}\ncat\n")
    argv = (source, "--words", words, "--output", output, "--format", kind)
    if kind == "glove" and word != "a" and number.is_integer():
        message = refusal(capsys, *argv)
        assert f"its first row, {word!r} and one number, would be read as one" in message
        assert list(tmp_path.glob("output*")) == []
        return
    run(*argv)
    found = pe.pretrained.open_vectors(output)
    assert found.words() == [word, "cat"]
    assert found.table().tolist() == [[number], [2.0]]


@pytest.mark.parametrize("first", ENDINGS)
@pytest.mark.parametrize("second", ENDINGS)
def test_formats_there_and_back(first: str, second: str, glove: Path, tmp_path: Path) -> None:
    """The same numbers, bit for bit, and the same words."""
    one, two = tmp_path / f"one.{first}", tmp_path / f"two.{second}"
    run(glove, "--output", one, "--format", ENDINGS[first])
    words = ("--words", one.with_suffix(".words.txt")) if first == "safetensors" else ()
    run(one, "--output", two, *words)
    found = pe.pretrained.open_vectors(two, words=WORDS if second == "safetensors" else None)
    assert found.format == ENDINGS[second]
    assert torch.equal(found.table(), vectors())
    if second == "safetensors":
        assert two.with_suffix(".words.txt").read_text(encoding="utf-8").split() == WORDS
    else:
        assert found.words() == WORDS


def test_rows_of_a_vocabulary(
    glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"sat": 1, "the": 0, "dog": 2}))
    output = tmp_path / "some.vec"
    known = printed(capsys, glove, "--vocabulary", vocabulary, "--output", output)
    assert known["written"] == {"output": str(output), "format": "word2vec-text", "shape": [3, 3]}
    found = pe.pretrained.open_vectors(output)
    assert found.words() == ["the", "sat", "dog"]
    assert torch.equal(found.table()[:2], vectors()[[0, 3]])


def test_nothing_is_overwritten(
    glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the input nor an existing file of words."""
    before, beside = glove.read_bytes(), tmp_path / "glove.words.txt"
    assert "another file than the one that is read" in refusal(
        capsys, glove, "--output", glove, "--force"
    )
    run(glove, "--output", tmp_path / "glove.safetensors")
    assert "glove.words.txt: its words, for --words" in capsys.readouterr().out
    assert beside.read_text(encoding="utf-8").split() == WORDS
    (tmp_path / "glove.safetensors").unlink()
    assert f"{beside}: exists" in refusal(capsys, glove, "--output", tmp_path / "glove.safetensors")
    assert not (tmp_path / "glove.safetensors").exists()
    assert glove.read_bytes() == before


def test_tables_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        safetensors.save_file({name: torch.ones(2, 3)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    files = {name: f"{name}.safetensors" for name in ("a", "b")}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert {table["name"] for table in printed(capsys, index)["tables"]} == {"a", "b"}


def test_refusals(glove: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.txt" in refusal(capsys, tmp_path / "none.txt")
    assert "expected an ending of" in refusal(capsys, glove, "--output", tmp_path / "x.doc")
    assert "exists; --force" in refusal(capsys, glove, "--output", glove)
    bare = tmp_path / "bare.safetensors"
    safetensors.save_file({"w": torch.zeros(2, 3)}, bare)
    assert "pass --words" in refusal(capsys, bare, "--output", tmp_path / "x.vec")
    two = tmp_path / "two.txt"
    two.write_text("New York\nParis\n")
    argv = (bare, "--words", two, "--output", tmp_path / "x.vec")
    assert "cannot hold words with blanks, such as 'New York'" in refusal(capsys, *argv)
    assert not list(tmp_path.glob("x.vec*"))
    broken = tmp_path / "broken.json"
    broken.write_text('["a"]')
    assert "expected words and their rows" in refusal(capsys, glove, "--coverage", broken)
