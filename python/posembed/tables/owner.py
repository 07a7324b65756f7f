"""Modules whose table may be kept elsewhere or otherwise than as their parameter ``weight``.

``weight`` is then None, and ``table`` looks up the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.functional import CodeFormat
from posembed.glue.gate import check_tensors
from posembed.glue.memory import prefer_huge_pages
from posembed.glue.sharding import zero_row
from posembed.tables.ahead import Ahead
from posembed.tables.quantized import QuantizedTable
from posembed.tables.table import Hosted, Table, bytes_of


class TableOwner(Hosted):
    """A module whose table ``weight`` can become a :class:`Table`, ``table``."""

    table: Table

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 1) and zeroes the row of ``padding_idx``, if there is one."""
        weight = self._parameters.get("weight")
        if weight is None:
            raise ValueError("weight: expected a table of numbers, got none")
        prefer_huge_pages(weight)
        torch.nn.init.normal_(weight)
        if (padding := getattr(self, "padding_idx", None)) is not None:
            zero_row(weight, padding)

    def use_table(self, table: Table) -> None:
        """Replaces ``weight`` by ``table``.

        Raises:
            ValueError: The module has ``max_norm``, which writes to a table.
        """
        if (max_norm := getattr(self, "max_norm", None)) is not None:
            raise ValueError(f"max_norm: expected none for a frozen table, got {max_norm:g}")
        self.register_parameter("weight", None)
        self.table = table

    def quantize(self, format: CodeFormat = "float8", block: int | None = None) -> None:
        """Replaces ``weight`` by codes in place: afterwards the table is frozen, and smaller.

        ``weight`` becomes None, and ``table`` a :class:`posembed.QuantizedTable`.

        Args:
            format: "float8", "int8" or "int4"; see :func:`posembed.functional.quantize_rows`.
            block: Columns that share a scale; default: all.

        Raises:
            ValueError: An unknown format, ``block`` does not divide a row, or there is no
                ``weight``.
        """
        weight = self._parameters.get("weight")
        if weight is None:
            raise ValueError("weight: expected a table of numbers, got none")
        self.use_table(QuantizedTable.quantize(weight, format, block))

    def keep_on_host(
        self, device: torch.device | str | int | None = None, *, trainable: bool | None = None
    ) -> None:
        """As :meth:`posembed.QuantizedTable.keep_on_host`, for numbers and codes.

        Raises:
            ValueError: The table is in a file or cannot learn, or its memory cannot be pinned.
        """
        if "table" not in self._modules:
            super().keep_on_host(device, trainable=trainable)
        elif isinstance(self.table, Hosted):
            self.table.keep_on_host(device, trainable=trainable)
        else:
            raise ValueError("table: expected one in memory, got one in a file")

    def memory(self) -> dict[str, int]:
        """The bytes of the table in each place: ``{"cpu": 1024}``, or "file" for a file."""
        if "table" in self._modules:
            return self.table.memory()
        return bytes_of((*self.parameters(), *self.buffers()))


class Prefetching(TableOwner):
    """A module whose rows can be asked for before they are needed."""

    def row_ids(self, ids: Tensor) -> Tensor:
        """The rows that a call looks up."""
        return ids

    def rows_at(self, rows: Tensor) -> Tensor:
        """The result of a call that looks up these rows."""
        return self(rows)  # type: ignore[no-any-return]

    def prefetch(self, *args: Any, **kwargs: Any) -> Ahead:
        """Asks for the result of ``self(*args, **kwargs)``, which the handle's ``take()`` returns.

        On a CUDA device the rows are gathered on a stream of their own, beside the kernels of the
        layers before; nothing waits on the host, and a CUDA graph may capture both calls. From a
        file, they are read ahead in the background. Elsewhere, ``take`` looks them up.
        """
        rows = self.row_ids(*args, **kwargs)
        check_tensors(ids=rows)
        if "table" in self._modules:
            self.table.read_ahead(rows)
        return Ahead(rows, self.rows_at)
