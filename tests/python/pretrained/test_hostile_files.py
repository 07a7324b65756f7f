"""Paths that are no files, files without end, and files that are shortened while they are read."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import posembed as pe
import pytest
import torch
from posembed.pretrained import open_vectors

TEBIBYTE = 1 << 40
REFUSED = (ValueError, OSError)  # FileFormatError is a ValueError


def read_all(path: Path | str) -> None:
    """Everything that a caller may ask of a file."""
    file = open_vectors(path)
    file.table()
    file.words()


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """In less than a second of this process, however busy the machine is."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < 1


def refuses_soon(path: Path | str, message: str) -> None:
    with soon(), pytest.raises(REFUSED, match=message):
        read_all(path)


# ----------------------------------------------------------------------------- paths that are no files


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_devices(path: str) -> None:
    refuses_soon(path, "expected the path of a regular file")


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors", "pipe.json"])
def test_pipes(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refuses_soon(tmp_path / name, "expected the path of a regular file")


def test_folders(tmp_path: Path) -> None:
    refuses_soon(tmp_path, "Is a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.touch(mode=0)
    refuses_soon(path, "Permission denied")


# --------------------------------------------------------------------------------- files of a tebibyte

BEGINNINGS = {
    "zeros.vec": (b"", "the first line is no word with numbers"),
    "word.txt": (b"a 1 2", "the first line is no word with numbers|bytes without the end"),
    "rows.txt": (b"a 1 2\nb 1 2\nc", "bytes without the end of a word or a line"),
    "text.vec": (b"9 2\na 1 2\nb", "bytes without the end of a word or a line"),
    "binary.bin": (b"9 2\n", "bytes without the end of a word or a line"),
    "zeros.safetensors": (b"", "expected a header that begins with"),
    "header.safetensors": (struct.pack("<Q", TEBIBYTE - 8) + b"{", "at most 100000000 are allowed"),
    "hole.safetensors": (struct.pack("<Q", 2) + b"{}", "bytes after the last tensor"),
    "model.safetensors.index.json": (b"{}", "at most 100000000 are allowed"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_sparse_files(name: str, tmp_path: Path) -> None:
    beginning, message = BEGINNINGS[name]
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(TEBIBYTE)
    refuses_soon(path, message)


def test_a_header_of_no_rows_promises_no_width(tmp_path: Path) -> None:
    """Skipping bad rows takes memory for one of this width."""
    path = tmp_path / "words.vec"
    path.write_bytes(b"0 4611686018427387904\n")
    for on_bad_row in ("raise", "skip"):
        with pytest.raises(pe.FileFormatError, match="the header says 0 rows of 46116860184273879"):
            open_vectors(path, on_bad_row=on_bad_row)


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "tebibyte"])
def test_configurations(kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "tebibyte":
        with path.open("wb") as file:
            file.truncate(TEBIBYTE)
    with soon(), pytest.raises(REFUSED, match="expected"):
        pe.RotarySpec.from_huggingface(path)


# -------------------------------------------------------------------------- what the fuzzers began with

CORPUS = Path(__file__).resolve().parents[2] / "fuzz" / "readers" / "corpus"
NAMES = {"safetensors": "m.safetensors", "index": "m.safetensors.index.json", "words": "v.vec"}


@pytest.mark.parametrize("case", [f"{f}/{p.name}" for f in NAMES for p in (CORPUS / f).iterdir()])
def test_inputs_of_the_fuzzers_are_read_or_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / NAMES[case.partition("/")[0]]
    path.write_bytes((CORPUS / case).read_bytes())
    for on_bad_row in ("raise", "skip") if path.suffix == ".vec" else ("raise",):
        try:
            file = open_vectors(path, on_bad_row=on_bad_row)
            for name in file.names:
                file.table(name)
        except ValueError as error:  # FileFormatError, and that a tensor is no table
            assert str(tmp_path) in str(error) or str(error).startswith("tensor: ")  # noqa: PT017


@pytest.mark.parametrize("name", [path.name for path in (CORPUS / "specification").iterdir()])
def test_specifications_of_the_fuzzers_are_read_or_refused(name: str) -> None:
    text = (CORPUS / "specification" / name).read_text()
    try:
        spec = torch.ops.posembed.rotary_specification.default(text)
    except ValueError as error:
        assert ":" in str(error)  # noqa: PT017
    else:
        assert torch.ops.posembed.rotary_specification.default(spec) == spec


# ------------------------------------------------------------------------------ files that are shortened


def tensors(path: Path, rows: int) -> Path:
    data = rows * 4096 * 4
    entry = {"dtype": "F32", "shape": [rows, 4096], "data_offsets": [0, data]}
    header = json.dumps({"t": entry}).encode()
    header += b" " * (-len(header) % 8)  # aligned: tensor() is a view
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data)
    return path


def words(path: Path) -> Path:
    path.write_bytes(b"".join(b"word%d 1 2\n" % i for i in range(500_000)))
    return path


def test_words_of_a_file_that_is_shortened(tmp_path: Path) -> None:
    path = words(tmp_path / "vectors.txt")
    file = open_vectors(path)
    os.truncate(path, 5_000_000)
    for read in (file.table, file.words, lambda: file.coverage(["word1"])):
        with pytest.raises(pe.FileFormatError, match="byte 5000000: the file was shortened"):
            read()


def test_words_of_a_file_that_is_emptied(tmp_path: Path) -> None:
    path = words(tmp_path / "vectors.txt")
    file = open_vectors(path, on_bad_row="skip")
    path.write_bytes(b"")
    with pytest.raises(pe.FileFormatError, match="byte 0: the file was shortened"):
        file.table()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_of_a_file_that_is_shortened(dtype: torch.dtype | None, tmp_path: Path) -> None:
    path = tensors(tmp_path / "m.safetensors", rows=600)
    file = open_vectors(path, words=["a"])
    os.truncate(path, 8192)
    for read in (lambda: file.table("t", dtype), lambda: file.tensor("t", dtype)):
        with pytest.raises(pe.FileFormatError, match="byte 8192: the file was shortened"):
            read()


def test_rows_of_many_parts_are_those_of_the_file(tmp_path: Path) -> None:
    """Rows lie across the parts in which a file is loaded, and parts that are released."""
    path = tmp_path / "vectors.txt"
    path.write_text("".join(f"w{i} {i} {i / 2} {-i}\n" for i in range(1_000_000)))
    assert path.stat().st_size > 5 * (1 << 22)
    table = open_vectors(path).table()
    numbers = torch.arange(1_000_000, dtype=torch.float32)
    assert torch.equal(table, torch.stack([numbers, numbers / 2, -numbers], dim=1))
