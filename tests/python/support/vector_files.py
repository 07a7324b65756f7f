"""Writes small files of vectors in every format, byte by byte."""

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

WORDS = ["the", "cat", "König", "new_york", "日本語", "##ing"]


def table(rows: int = len(WORDS), columns: int = 5, seed: int = 0) -> Tensor:
    """Numbers that survive six digits of text and float32."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return torch.tensor([[float(f"{x:.6g}") for x in row] for row in drawn.tolist()])


def text(words: list[str], vectors: Tensor, *, header: bool, end: str = "\n") -> bytes:
    """GloVe without a header, word2vec text with one; fastText's lines end with a space."""
    lines = [f"{len(words)} {vectors.shape[1]}\n"] if header else []
    for word, row in zip(words, vectors.tolist(), strict=True):
        lines.append(f"{word} {' '.join(f'{x:.6g}' for x in row)}{end}")
    return "".join(lines).encode()


def binary(words: list[str], vectors: Tensor, end: bytes = b"\n") -> bytes:
    """word2vec's binary format."""
    rows = [
        word.encode() + b" " + struct.pack(f"<{len(row)}f", *row) + end
        for word, row in zip(words, vectors.tolist(), strict=True)
    ]
    return f"{len(words)} {vectors.shape[1]}\n".encode() + b"".join(rows)


def safetensors(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header, valid or not."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(shape: list[object], begin: object, end: object, dtype: str = "F32") -> dict[str, object]:
    """A tensor in such a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_all(folder: Path, words: list[str], vectors: Tensor) -> dict[str, Path]:
    """The same words and vectors in every format, by its name."""
    files = {
        "word2vec-binary": ("words.bin", binary(words, vectors)),
        "word2vec-text": ("words.w2v", text(words, vectors, header=True)),
        "fasttext": ("words.vec", text(words, vectors, header=True, end=" \n")),
        "glove": ("words.txt", text(words, vectors, header=False)),
    }
    paths = {}
    for name, (file, content) in files.items():
        paths[name] = folder / file
        paths[name].write_bytes(content)
    return paths
