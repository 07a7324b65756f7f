"""What the readers of all file formats share: an error, limits, JSON, numbers in a dtype."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import ParamSpec

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Bytes of a header or of a JSON file beside one, as in csrc/pretrained/file.h.
MOST_HEADER_BYTES = 100_000_000

# Lists within lists.
MOST_LEVELS = 16

# Numbers that are converted at a time.
PART = 1 << 20


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


def on_cpu(read: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``read`` on the CPU, even if the default device is another one, or meta."""

    @functools.wraps(read)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.device("cpu"):
            return read(*args, **kwargs)

    return call


def in_dtype(path: str, name: str, numbers: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Numbers of a file in another dtype.

    A finite number that is not finite in it is a FileFormatError.
    """
    result = numbers if dtype is None else numbers.to(dtype)
    if result is not numbers and not bool(result.isfinite().eq(numbers.isfinite()).all()):
        raise FileFormatError(path, 0, f"{name} has numbers too large for {dtype}")
    return result


def read_at(file: int, path: str, offset: int, count: int) -> bytearray:
    """Bytes of an open file, by system calls; a FileFormatError if it is too short."""
    data, done = bytearray(count), 0
    while done < count:
        got = os.preadv(file, [memoryview(data)[done:]], offset + done)
        if got == 0:
            reason = "the file was shortened while it was read"
            raise FileFormatError(path, offset + done, reason)
        done += got
    return data


def json_object(path: str, text: str | bytes, what: str) -> dict[str, Any]:
    """The object that a text of a file is; ``what`` is the part of the file, for messages."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise FileFormatError(path, 0, f"{what}: expected JSON of fewer levels") from None
    except ValueError as error:  # not UTF-8, not JSON, a number of too many digits
        raise FileFormatError(path, 0, f"{what}: expected JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise FileFormatError(path, 0, f"{what}: expected an object, got {value!s:.60}")
    return value


def json_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a FileFormatError if it has none, or is too large."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device might never end
        raise FileFormatError(os.fspath(path), 0, "expected a regular file")
    if found.st_size > MOST_HEADER_BYTES:
        reason = f"expected at most {MOST_HEADER_BYTES} bytes, got {found.st_size}"
        raise FileFormatError(os.fspath(path), 0, reason)
    return json_object(os.fspath(path), path.read_bytes(), "the file")
