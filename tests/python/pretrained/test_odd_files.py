"""Files as they are found: words that end in numbers, odd rows, missing shards, other formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import posembed as pe
import pytest
import torch
from posembed.pretrained import open_vectors

# ---------------------------------------------------------------------------------------- separators


@pytest.mark.parametrize("header", ["", "3 2\n"])
@pytest.mark.parametrize("between", [" ", "\t"])
def test_a_tab_ends_a_word_that_ends_in_a_number(header: str, between: str, tmp_path: Path) -> None:
    """As wikipedia2vec writes them."""
    path = tmp_path / "vectors.txt"
    rows = {"ENTITY/Apollo 11": (0.5, 1.0), "7": (2.0, 3.0), "new york": (4.0, 5.0)}
    lines = [f"{word}\t{a}{between}{b}\n" for word, (a, b) in rows.items()]
    path.write_text(header + "".join(lines))
    file = open_vectors(path)
    assert file.words() == list(rows)
    assert file.table().tolist() == [list(row) for row in rows.values()]


def test_a_row_without_the_files_separator(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("a\t1 2\nb 1 2\n")
    with pytest.raises(pe.FileFormatError, match="byte 6: expected a TAB after the word"):
        open_vectors(path).table()
    path.write_text("a\t1 2\nb\t1 2 3\n")
    with pytest.raises(pe.FileFormatError, match="expected a row of 2 numbers, got 3"):
        open_vectors(path).table()


# ------------------------------------------------------------------------------------------ odd rows

GOOD = {"the": [1.0, 2.0], "cat": [3.0, 4.0], "sat": [5.0, 6.0]}
ODD = {
    "narrow": (b"x 1\n", "expected a row of 2 numbers, got 1"),
    "wide": (b"x 1 2 3\n", "expected a row of 2 numbers, got 3"),
    "no number": (b"x 1 b\n", "expected a finite number, got 'b'"),
    "nan": (b"x 1 nan\n", "expected a finite number, got 'nan'"),
    "infinite": (b"x -inf 1\n", "expected a finite number, got '-inf'"),
    "blank": (b"\n", "a line without a word"),
    "no word": (b" 1 2\n", "a row without a word"),
    "not UTF-8": (b"x\xff 1 2\n", "a word that is not UTF-8"),
}


def with_odd_row(path: Path, odd: bytes, header: bytes = b"") -> Path:
    rows = [f"{word} {a} {b}\n".encode() for word, (a, b) in GOOD.items()]
    path.write_bytes(header + rows[0] + odd + b"".join(rows[1:]))
    return path


@pytest.mark.parametrize("header", [b"", b"4 2\n"])
@pytest.mark.parametrize("case", ODD)
def test_one_odd_row_does_not_lose_the_file(case: str, header: bytes, tmp_path: Path) -> None:
    odd, reason = ODD[case]
    path = with_odd_row(tmp_path / "vectors.txt", odd, header)
    with pytest.raises(pe.FileFormatError) as raised:
        open_vectors(path).table()
    assert raised.value.reason == f"{reason} (on_bad_row 'skip' leaves such rows out)"
    file = open_vectors(path, on_bad_row="skip")
    assert file.skipped().count == 1
    (skipped,) = file.skipped().rows
    assert (skipped.row, skipped.reason) == (2, reason)
    assert skipped.offset == raised.value.offset
    assert file.shape() == (3, 2)
    assert file.words() == list(GOOD)
    assert file.table().tolist() == list(GOOD.values())
    vectors, coverage = file.rows(["sat", "x"], missing="zero")
    assert vectors.tolist() == [GOOD["sat"], [0.0, 0.0]]
    assert coverage == file.coverage(["sat", "x"])
    assert coverage.missing == ["x"]


def binary(rows: list[tuple[bytes, list[float]]]) -> bytes:
    body = b"".join(word + b" " + np.float32(numbers).tobytes() for word, numbers in rows)
    return f"{len(rows)} 2\n".encode() + body


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_have_one_rule(number: float, tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    path.write_bytes(binary([(b"the", [1, 2]), (b"x", [3, number]), (b"cat", [5, 6])]))
    message = f"byte 22: expected a finite number, got '{number}' .on_bad_row 'skip'"
    with pytest.raises(pe.FileFormatError, match=message):
        open_vectors(path).table()
    file = open_vectors(path, on_bad_row="skip")
    assert file.format == "word2vec-binary"
    assert file.words() == ["the", "cat"]
    assert file.table().tolist() == [[1, 2], [5, 6]]
    assert file.skipped().rows[0].word == "x"


def test_a_binary_file_that_is_cut_off_is_not_an_odd_row(tmp_path: Path) -> None:
    path = tmp_path / "vectors.bin"
    path.write_bytes(binary([(b"the", [1, 2]), (b"x", [3, 4])])[:-1])
    file = open_vectors(path, on_bad_row="skip")
    with pytest.raises(pe.FileFormatError, match=r"ends inside row 2 of 2$"):
        file.table()


def test_many_odd_rows_are_counted_and_some_named(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2\n" + "odd 1\n" * 250 + "cat 3 4\n")
    file = open_vectors(path, on_bad_row="skip")
    skipped = file.skipped()
    assert (skipped.count, len(skipped.rows), skipped.rows[99].row) == (250, 100, 101)
    assert file.words() == ["the", "cat"]


def test_token_embedding_tells_what_it_skipped(tmp_path: Path) -> None:
    path = with_odd_row(tmp_path / "vectors.txt", b"x 1\n")
    with pytest.warns(UserWarning, match=r"skipped 1 rows .*: row 2 'x': expected a row of 2 num"):
        token = pe.TokenEmbedding.from_file(path, on_bad_row="skip")
    assert token.weight.tolist() == list(GOOD.values())
    theirs = pe.cpp.TokenEmbedding.from_file(path, on_bad_row="skip")
    assert torch.equal(theirs.weight, token.weight)


def test_on_bad_row_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = with_odd_row(tmp_path / "vectors.txt", b"")
    with pytest.raises(ValueError, match="on_bad_row: expected 'raise' or 'skip', got 'ignore'"):
        open_vectors(path, on_bad_row="ignore")  # type: ignore[arg-type]
    tensors = write(tmp_path / "m.safetensors", "t", "F32", [1, 1], bytes(4))
    with pytest.raises(ValueError, match="on_bad_row: expected 'raise' for safetensors"):
        open_vectors(tensors, on_bad_row="skip")


# ------------------------------------------------------------------------------------------- tensors


def write(path: Path, name: str, dtype: str, shape: list[int], data: bytes) -> Path:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_one_tensor_needs_one_shard(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    write(tmp_path / "a.safetensors", "wte", "F32", [1, 2], np.float32([1, 2]).tobytes())
    places = {"wte": "a.safetensors", "wpe": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    token = pe.TokenEmbedding.from_file(index, tensor="wte")
    assert token.weight.tolist() == [[1.0, 2.0]]
    assert torch.equal(pe.cpp.TokenEmbedding.from_file(index, tensor="wte").weight, token.weight)
    assert open_vectors(index).names == ["wpe", "wte"]
    with pytest.raises(pe.FileFormatError, match=r"'wpe': shard 'b.safetensors': No such file"):
        open_vectors(index).tensor("wpe")
    with pytest.raises(pe.FileFormatError, match=r"'wpe': shard 'b.safetensors': No such file"):
        open_vectors(index).table()  # which one is the only table, none but all shards can tell


@pytest.mark.parametrize(
    ("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)]
)
def test_eight_bits_are_converted_or_refused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    table = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    data = table.to(dtype).view(torch.uint8).numpy().tobytes()
    path = write(tmp_path / "m.safetensors", "t", name, [2, 2], data)
    for kind in (pe.TokenEmbedding, pe.cpp.TokenEmbedding):
        with pytest.raises(TypeError, match="expected float32, float64, bfloat16 or float16, got"):
            kind.from_file(path)
        token = kind.from_file(path, dtype=torch.bfloat16)
        assert token(torch.tensor([1])).tolist() == [[0.5, 4.0]]
    with pytest.raises(TypeError, match=r"embeddings: expected float32, .* got torch.float8"):
        pe.TokenEmbedding.from_pretrained(table.to(dtype))


def test_four_bits_as_far_as_torch_has_them(tmp_path: Path) -> None:
    data = bytes(range(4))
    path = write(tmp_path / "m.safetensors", "t", "F4", [2, 4], data)
    file = open_vectors(path, words=["a", "b"])
    assert file.dtype("t") == torch.float4_e2m1fn_x2
    assert file.shape("t") == (2, 2)  # two numbers in each
    for tensor in (file.tensor("t"), file.table("t")):
        assert tensor.dtype == torch.float4_e2m1fn_x2
        assert tensor.view(torch.uint8).tolist() == [[0, 1], [2, 3]]
    rows = file.rows(["b"], missing="error").vectors
    assert rows.view(torch.uint8).tolist() == [[2, 3]]
    with pytest.raises(TypeError, match="dtype: tensor 't': torch does not convert F4 to Float"):
        file.table("t", torch.float32)
    with pytest.raises(TypeError, match="embeddings: expected float32"):
        pe.TokenEmbedding.from_file(path)
    odd = write(tmp_path / "odd.safetensors", "t", "F4", [2, 1], bytes(1))
    with pytest.raises(TypeError, match="tensor 't': torch has F4 in pairs only"):
        open_vectors(odd).shape("t")


# ------------------------------------------------------------------------------------- other formats

FOREIGN = {
    "xz": (b"\xfd7zXZ\x00\x00\x04", "an xz archive: unpack it first"),
    "bzip2": (b"BZh91AY&SY", "a bzip2 archive"),
    "Zstandard": (b"\x28\xb5\x2f\xfd\x04\x00", "a Zstandard archive"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "a gzip archive"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "a zip archive"),
    "page": (b"\n <!DOCTYPE html>\n<html><body>404</body>", "a web page and not the file"),
    "page without type": (b"<HTML><head>", "a web page and not the file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
}


@pytest.mark.parametrize("name", ["v.txt", "m.safetensors", "m.safetensors.index.json"])
@pytest.mark.parametrize("case", FOREIGN)
def test_says_what_a_file_is(case: str, name: str, tmp_path: Path) -> None:
    content, message = FOREIGN[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(pe.FileFormatError, match=f"byte 0: {message}"):
        open_vectors(path)
