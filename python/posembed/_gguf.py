"""GGUF files: what their metadata says, and their token table.

The gguf package of llama.cpp's authors reads the format, whose description is docs/gguf.md of
ggml-org/ggml. Tables of other types than those below are not turned into numbers here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from posembed._file_format import FileFormatError, in_dtype
from posembed._validation import shown

MAGIC = b"GGUF"
TABLE = "token_embd.weight"
READ = ("F32", "F16", "BF16", "Q8_0")

# Tensors that change the rotation, which are keys of a configuration.
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(path: str | bytes | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, by its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GgufFile:
    """An open GGUF file.

    Args:
        path: The file.

    Raises:
        ImportError: The gguf package is not installed.
        FileFormatError: The file is malformed.
    """

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError(
                "GGUF files need the gguf package: python -m pip install gguf"
            ) from error
        self.path = os.fsdecode(path)
        try:
            self._reader = GGUFReader(self.path)
        except Exception as error:  # whatever parsing a broken file runs into
            raise FileFormatError(self.path, 0, f"expected a GGUF file: {error!r:.120}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def metadata(self) -> dict[str, Any]:
        """The keys about the model, with the tensors that change its rotation."""
        fields = self._reader.fields.items()
        found = {name: field.contents() for name, field in fields if "." in name}
        kept = {name: value for name, value in found.items() if not name.startswith("tokenizer.")}
        frequencies = [name for name in FREQUENCIES if name in self._tensors]
        return {**kept, **{name: self._numbers(name).tolist() for name in frequencies}}

    def table(self, name: str | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The token table, or another one by name: [rows, dim].

        Args:
            name: Name of the table.
            dtype: Dtype of the result; default: the file's, float32 for Q8_0.

        Raises:
            ValueError: The file has no such table.
            TypeError: The table's type is none that is read.
            FileFormatError: A finite number is not finite in ``dtype``.
        """
        name = self._named(name)
        numbers = self._numbers(name)
        if numbers.dim() != 2:
            raise ValueError(f"tensor: expected a table, got {name!r} of {list(numbers.shape)}")
        return in_dtype(self.path, name, numbers, dtype)

    def codes(self, name: str | None = None) -> tuple[Tensor, Tensor]:
        """The codes of a table in Q8_0, int8 [rows, dim], and float32 scales [rows, dim / 32].

        Args:
            name: As in :meth:`table`.

        Raises:
            ValueError: The file has no such table.
            TypeError: The table's type is another.
        """
        name = self._named(name)
        tensor = self._tensors[name]
        if tensor.tensor_type.name != "Q8_0" or len(tensor.shape) != 2:
            kind = tensor.tensor_type.name
            raise TypeError(f"{self.path}: {name}: expected a table in Q8_0, got {kind}")
        # A block of 32 numbers is a float16 scale and the codes.
        columns, rows = (int(size) for size in tensor.shape)
        blocks = torch.from_numpy(tensor.data.copy()).view(rows, columns // 32, 34)
        scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
        return blocks[..., 2:].contiguous().view(torch.int8).view(rows, columns), scales

    def _named(self, name: str | None) -> str:
        name = TABLE if name is None else name
        if name not in self._tensors:
            known = shown(sorted(self._tensors))
            raise ValueError(f"tensor: expected one of {known}, got {name!r}")
        return name

    def _numbers(self, name: str) -> Tensor:
        """A tensor as a copy, in its own dtype or float32."""
        from gguf import dequantize

        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in READ:
            expected = "expected F32, F16, BF16 or Q8_0"
            raise TypeError(f"{self.path}: {name}: {expected}, got {kind}, which is not read")
        if kind == "BF16":  # numpy has no such type: the bytes
            shape = [int(size) for size in reversed(tensor.shape)]
            return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
        data = dequantize(tensor.data, tensor.tensor_type) if kind == "Q8_0" else tensor.data
        return torch.from_numpy(data.copy())
