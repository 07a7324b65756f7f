"""What the readers of all file formats share: their error, and numbers in another dtype."""

from __future__ import annotations

import torch
from torch import Tensor


class FileFormatError(ValueError):
    """A malformed file: truncated, inconsistent, or with text that is not a number.

    Args:
        path: The file.
        offset: Byte offset of the error.
        reason: What is wrong.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(path, offset, reason)
        self.path = path
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: byte {self.offset}: {self.reason}"


def in_dtype(path: str, name: str, numbers: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Numbers of a file in another dtype.

    Raises:
        FileFormatError: A finite number is not finite in ``dtype``.
    """
    result = numbers if dtype is None else numbers.to(dtype)
    if result is not numbers and not bool(result.isfinite().eq(numbers.isfinite()).all()):
        raise FileFormatError(path, 0, f"{name} has numbers too large for {dtype}")
    return result
