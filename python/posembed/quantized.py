"""QuantizedTable: a frozen table of 8- or 4-bit codes with scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from posembed import functional
from posembed._leaf import Leaf
from posembed._validation import whole
from posembed.functional import CodeFormat


class QuantizedTable(Leaf, nn.Module):
    """Rows of codes, which are widened as they are looked up.

    ``codes``, ``scales`` and ``biases`` are buffers, which a checkpoint has. Converting the module
    to another dtype changes that of its results, never a bit of the codes and scales.

    Args:
        codes, scales, biases, block_rows, block_columns: See
            :func:`posembed.functional.embedding_quantized`.
        dtype: Dtype of the results; default: torch's default dtype.

    Raises:
        ValueError: Shapes are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> table = pe.QuantizedTable.quantize(torch.randn(1000, 256), "float8", block=128)
        >>> table(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 256])
        >>> table.memory()
        264000
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        biases: Tensor | None = None,
        *,
        block_rows: int = 1,
        block_columns: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("biases", biases)
        self.block_rows = whole("block_rows", block_rows)
        self.block_columns = block_columns
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        nothing = torch.zeros(0, dtype=torch.int64, device=codes.device)
        self.embedding_dim: int = self(nothing).shape[1]  # checks the arguments
        self.num_embeddings: int = codes.shape[0]

    @classmethod
    def quantize(
        cls, weight: Tensor, format: CodeFormat = "float8", block: int | None = None
    ) -> QuantizedTable:
        """The table of a floating one; see :func:`posembed.functional.quantize_rows`.

        Args:
            weight: [num_embeddings, embedding_dim]; results have its dtype.
            format: "float8", "int8" or "int4".
            block: Columns that share a scale; default: all.
        """
        codes, scales, biases = functional.quantize_rows(weight, format, block)
        return cls(codes, scales, biases, block_columns=block, dtype=weight.dtype)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Looks up ids: int32 or int64 [...] -> [..., embedding_dim].

        Args:
            ids: Each from 0 to num_embeddings - 1.
            scale: Multiplies the result.

        Raises:
            IndexError: An id is outside the table.
        """
        return self.rows(ids, scale, self.dtype)

    def rows(self, ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """:meth:`forward` with results in ``dtype``."""
        return functional.embedding_quantized(
            ids,
            self.codes,
            self.scales,
            self.biases,
            block_rows=self.block_rows,
            block_columns=self.block_columns,
            scale=scale,
            dtype=dtype,
        )

    def pooled(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        padding: int,
        include_last_offset: bool,
        mode: Any,
        weights: Tensor | None,
    ) -> Tensor:
        """One vector for each bag of ids, as :func:`posembed.functional.token_bag`.

        Rows are summed in float32 and rounded once.
        """
        # The rows of all ids become a table of their own, with one more row for padding.
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        flat = ids.reshape(-1)
        rows = self.rows(torch.cat([flat, flat.new_zeros(1)]), 1.0, wide)
        places = torch.arange(flat.shape[0], device=ids.device)
        places = torch.where(flat == padding, flat.shape[0], places).view(ids.shape)
        found: Tensor = functional.token_bag(
            places,
            rows,
            offsets,
            None if weights is None else weights.to(wide),
            mode=mode,
            padding_idx=flat.shape[0],
            include_last_offset=include_last_offset,
        )
        return found.to(self.dtype)

    def dequantize(self) -> Tensor:
        """The whole table [num_embeddings, embedding_dim] as numbers."""
        ids = torch.arange(self.num_embeddings, device=self.codes.device)
        return self.rows(ids, 1.0, self.dtype)

    def memory(self) -> int:
        """The bytes of the codes and their scales."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedTable:
        """Moves the buffers as integers, because conversions to a dtype would change their bits."""
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers()}
        for name, dtype in dtypes.items():
            self._buffers[name] = getattr(self, name).view(_INTEGERS[dtype.itemsize])
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            self._buffers[name] = getattr(self, name).view(dtype)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        return self

    def extra_repr(self) -> str:
        """Sizes and the formats of codes and scales."""
        code = "4 bits" if self.codes.dtype == torch.uint8 else str(self.codes.dtype)[6:]
        return f"{self.num_embeddings}, {self.embedding_dim}, {code}, dtype={self.dtype}"


_INTEGERS = {1: torch.uint8, 4: torch.int32}


class Quantizable(nn.Module):
    """A module whose table ``weight`` can become a :class:`QuantizedTable`, ``quantized``."""

    def quantize(self, format: CodeFormat = "float8", block: int | None = None) -> None:
        """Replaces ``weight`` by codes in place: afterwards the table is frozen, and smaller.

        ``weight`` becomes None, and ``quantized`` a :class:`posembed.QuantizedTable`.

        Args:
            format: "float8", "int8" or "int4"; see :func:`posembed.functional.quantize_rows`.
            block: Columns that share a scale; default: all.

        Raises:
            ValueError: An unknown format, ``block`` does not divide a row, or the table is
                quantised.
        """
        weight = self._parameters.get("weight")
        if weight is None:
            raise ValueError("weight: expected a table of numbers, got one of codes")
        if (max_norm := getattr(self, "max_norm", None)) is not None:
            raise ValueError(f"max_norm: expected none for a table of codes, got {max_norm:g}")
        self.use_codes(QuantizedTable.quantize(weight, format, block))

    def use_codes(self, table: QuantizedTable) -> None:
        """Replaces ``weight`` by ``table``."""
        self.register_parameter("weight", None)
        self.quantized = table

    def memory(self) -> dict[str, int]:
        """The bytes of the table on each device: ``{"cpu": 1024}``."""
        found: dict[str, int] = {}
        for tensor in (*self.parameters(), *self.buffers()):
            device = str(tensor.device)
            found[device] = found.get(device, 0) + tensor.nbytes
        return found
