"""FileTable: a table that stays in its file, and may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posembed.functional._stored import file_rows
from posembed.tables.files import FileRows
from posembed.tables.table import Table


class FileTable(Table):
    """A frozen table in safetensors, of which a look-up reads the rows that it needs.

    Rows are read by system calls on torch's threads, without Python's lock. What was read stays in
    the system's page cache while there is memory to spare. A file that is shortened raises; it
    never ends the process. Codes in float8 or int8 are multiplied by the scales beside them.

    Args:
        path: safetensors, or the index (.json) of several.
        tensor: The table's name, or the names of its parts in order; default: the only table.
        dtype: Dtype of the results; default: the table's, float32 for codes.

    Raises:
        FileFormatError: The file is malformed.
        ValueError: It has no such table, or parts do not fit together.
        TypeError: The table has neither numbers nor codes.

    Examples:
        >>> import pathlib, tempfile, posembed as pe, torch
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "table.safetensors")
        >>> save_file({"weight": torch.arange(12.0).view(6, 2)}, path)
        >>> table = pe.FileTable(path)
        >>> ahead = table.prefetch(torch.tensor([5, 1]))
        >>> ahead.take()
        tensor([[10., 11.],
                [ 2.,  3.]])
        >>> table.memory()
        {'file': 48}
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensor: str | Sequence[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.tensors = [tensor] if isinstance(tensor, str) else [*(tensor or ())]
        self._open()
        self.dtype = self._file.dtype if dtype is None else dtype
        self(torch.zeros(0, dtype=torch.int64, device="cpu"))  # checks the dtype

    def _open(self) -> None:
        self._file = FileRows(self.path, self.tensors)
        self._shorter: dict[int, FileRows | None] = {}  # by the parts of a row
        self.handle = self._file.handle
        self.num_embeddings = self._file.num_embeddings
        self.embedding_dim = self._file.embedding_dim

    @property
    def device(self) -> torch.device:
        """Where results are: on the CPU."""
        return torch.device("cpu")

    @property
    def misses(self) -> int:
        """The rows so far that a look-up had to wait for.

        The others were in the page cache. Every row is a miss on file systems that cannot tell.
        """
        return self._file.misses()

    def read_ahead(self, ids: Tensor) -> None:
        """Asks for rows in the background, and returns at once.

        Args:
            ids: int32 or int64 [...], those of a look-up to come.

        Raises:
            IndexError: An id is outside the table.
        """
        self._file.prefetch(ids)

    def rows(self, ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """:meth:`forward` with results in ``dtype``."""
        return file_rows(ids, self.handle, scale, dtype)

    def part(self, ids: Tensor, index: int, parts: int, scale: float) -> Tensor:
        """See :meth:`posembed.tables.table.Table.part`."""
        if parts not in self._shorter:
            self._shorter[parts] = self._file.split(parts)
        shorter = self._shorter[parts]
        if shorter is None:  # a scale is that of several parts
            return super().part(ids, index, parts, scale)
        return file_rows(ids.long() * parts + index, shorter.handle, scale, self.dtype)

    def memory(self) -> dict[str, int]:
        """The bytes in files, ``{"file": 1024}``, and in memory those of scales of blocks."""
        in_files, in_memory = self._file.bytes()
        places = {"file": in_files, "cpu": in_memory}
        return {place: size for place, size in places.items() if size}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FileTable:
        """Converts the results; the table stays where it is."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle opens the file by."""
        opened = ("_file", "_shorter")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Opens the file again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._open()

    def extra_repr(self) -> str:
        """Sizes and the dtype of results, in the C++ module's format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.dtype}"
