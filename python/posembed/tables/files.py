"""Open files of vectors and tables: classes of torch, which libposembed.so registers.

The library links no Python, so that one serves every version. Paths pass as text with a character
for each byte, words as one text with their lengths; progress and errors of files come back through
two operators that are implemented here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from posembed.glue.gate import wrong_type
from posembed.tables.file_format import FileFormatError

Path = str | bytes | os.PathLike[str]
Progress = Callable[[int, int], None] | None

# Words that are joined at a time.
PART = 1 << 16

_bars: dict[int, Callable[[int, int], None]] = {}


def _progress(bar: int, done: int, total: int) -> None:
    """Called by readers from time to time. What is raised here, as by Ctrl-C, stops the reading."""
    if bar:
        _bars[bar](done, total)


def _file_error(path: str, offset: int, reason: str, code: int) -> None:
    name = os.fsdecode(path.encode("latin-1"))
    raise OSError(code, reason, name) if code else FileFormatError(name, offset, reason)


def _implement(schema: str, function: Callable[..., None]) -> None:
    name = f"posembed_python::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", function)


_implement("progress(int bar, int done, int total) -> ()", _progress)
_implement("file_error(str path, int offset, str reason, int code) -> ()", _file_error)


def _text(path: Path) -> str:
    return os.fsencode(path).decode("latin-1")


def _packed(words: Sequence[str]) -> tuple[str, list[int]]:
    text = "".join(words)
    text.encode()  # raises what str.encode() raises for characters that UTF-8 lacks
    return text, [*map(len, words)]


def _unpacked(text: str, lengths: list[int]) -> list[str]:
    ends = itertools.accumulate(lengths)
    return [text[end - length : end] for length, end in zip(lengths, ends, strict=True)]


@functools.cache
def _class(name: str) -> Any:
    return getattr(torch.classes.posembed, name)


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of such a class, whose complaint of an argument's type is a RuntimeError."""
    try:
        return method(*arguments)
    except RuntimeError as error:
        if "Expected a value of type" not in str(error):
            raise
        dtype = re.search(r"type 'Optional\[int\]' .* found type '(\w+)'", str(error))
        if dtype is not None:
            raise wrong_type("dtype", "a torch.dtype", dtype[1]) from None
        raise TypeError(str(error).partition("\n")[0]) from None


class _Held:
    """What neither copies nor processes can share."""

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__}: an open file cannot be copied or pickled")


class Words(_Held):
    """Words whose rows are wanted, marked when they are met in a file."""

    def __init__(self, words: Sequence[str]) -> None:
        most_bytes = 4 * sum(map(len, words))
        self.held = _class("Words")(len(words), most_bytes)
        for begin in range(0, len(words), PART):
            self.held.add(*_packed(words[begin : begin + PART]))

    def coverage(self) -> tuple[int, list[str], list[str]]:
        """The number of words that were met, those that were not, and those met repeatedly."""
        return self.held.count_met(), _unpacked(*self.held.met(0)), _unpacked(*self.held.met(2))


class OpenFile(_Held):
    """A file of vectors."""

    def __init__(self, path: Path, words: Sequence[str], check_utf8: bool, on_bad_row: str) -> None:
        given = (_text(path), *_packed(words), check_utf8, on_bad_row)
        self._file = _call(_class("VectorFile"), *given)

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of the class."""
        return _call(getattr(self._file, method), *arguments)

    def words(self) -> list[str]:
        """The word of each row."""
        return _unpacked(*self._file.words())

    def codes(self, tensor: str) -> tuple[str, str, str, dict[str, str], str] | None:
        """Format, reader, table, parts and metadata of a table of codes."""
        found = self.call("codes", tensor)
        return tuple(json.loads(found)) if found else None

    def read(self, method: str, progress: Progress, *arguments: Any) -> Any:
        """The same of a reader, whose last argument is the number of a bar; 0: none."""
        if progress is None:
            return self.call(method, *arguments, 0)
        bar = id(progress)
        _bars[bar] = progress
        try:
            return self.call(method, *arguments, bar)
        finally:
            del _bars[bar]


class FileRows(_Held):
    """A table in a file. Its handle names it in calls of ``file_rows`` while this object lives."""

    def __init__(self, path: Path, tensors: list[str], *, opened: Any = None) -> None:
        if opened is None:
            opened = _call(_class("FileRows"), _text(path), tensors)
        self._rows = opened
        self.handle, self.num_embeddings, self.embedding_dim, dtype = self._rows.facts()
        self.dtype: torch.dtype = getattr(torch, dtype)

    def bytes(self) -> tuple[int, int]:
        """The bytes in files and in memory."""
        return cast(tuple[int, int], self._rows.bytes())

    def codes(self) -> tuple[Tensor, Tensor, int, int]:
        """The whole table: codes, scales, and the rows and columns of a scale's block."""
        return cast(tuple[Tensor, Tensor, int, int], self._rows.codes())

    def split(self, parts: int) -> FileRows | None:
        """The same table as shorter rows; None where a scale is that of several parts."""
        opened = self._rows.split(parts)
        return None if opened is None else FileRows("", [], opened=opened)

    def prefetch(self, ids: Tensor) -> None:
        """Asks for rows in the background."""
        _call(self._rows.prefetch, ids)

    def misses(self) -> int:
        """The rows so far that a look-up had to wait for."""
        return cast(int, self._rows.misses())


def table_formats() -> dict[str, Any]:
    """What csrc/pretrained/table_formats.json says."""
    return cast(dict[str, Any], json.loads(_class("VectorFile").table_formats()))


def rowwise_codes(packed: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and biases of FBGEMM's row-wise tables."""
    found = _class("FileRows").rowwise_codes(packed, bits)
    return cast(tuple[Tensor, Tensor, Tensor], found)
