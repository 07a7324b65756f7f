"""QuantizedTable: a frozen table of 8- or 4-bit codes with scales."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from posembed import functional, pretrained
from posembed.functional import CodeFormat
from posembed.glue.gate import check_tensors
from posembed.glue.memory import prefer_huge_pages
from posembed.glue.validation import one_of, positive, whole
from posembed.tables import code_formats, gguf
from posembed.tables.files import FileRows, rowwise_codes
from posembed.tables.table import Hosted, Table


class QuantizedTable(Hosted, Table):
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
        {'cpu': 264000}
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
        self.block_columns = (
            None if block_columns is None else positive("block_columns", block_columns)
        )
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
        made, scales, biases = functional.quantize_rows(weight, format, block)
        codes = torch.empty_like(made)
        prefer_huge_pages(codes)  # before its first value is written
        codes.copy_(made)
        return cls(codes, scales, biases, block_columns=block, dtype=weight.dtype)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        tensor: str | Sequence[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTable:
        """The codes of a file, which are not widened.

        Reads the formats with codes of 4 and 8 bits that the page on token tables lists, and Q8_0,
        Q4_0 and Q4_1 in GGUF. For MLX, the config.json beside the file says how codes are packed.

        Args:
            path: safetensors, or the index (.json) of several, or GGUF.
            tensor: The table's name, or the names of its parts in order; default: the only table,
                for GGUF "token_embd.weight".
            dtype: Dtype of the results; default: torch's default dtype.

        Raises:
            FileFormatError: The file is malformed.
            ValueError: It has no such table.
            TypeError: The table has no codes, or codes that only become numbers.
        """
        if gguf.is_gguf(path):
            if not (tensor is None or isinstance(tensor, str)):
                raise TypeError(f"tensor: expected one name for a GGUF file, got {tensor!r}")
            return cls(*gguf.GgufFile(path).codes(tensor), dtype=dtype)
        names = [tensor] if isinstance(tensor, str) else [*(tensor or ())]
        if len(names) < 2:
            found = code_formats.find(pretrained.open_vectors(path), "".join(names))
            if found is not None:
                return cls(*found.kept(), dtype=dtype)
        codes, scales, block_rows, block_columns = FileRows(path, names).codes()
        return cls(codes, scales, block_rows=block_rows, block_columns=block_columns, dtype=dtype)

    @classmethod
    def from_rowwise(
        cls,
        packed: Tensor,
        bits: int = 8,
        *,
        layout: Literal["rowwise", "table-batched"] = "rowwise",
        dtype: torch.dtype | None = None,
    ) -> QuantizedTable:
        """The codes of FBGEMM's row-wise tables.

        ``torch.ops.quantized.embedding_bag_byte_prepack`` and ``embedding_bag_4bit_prepack`` make
        them too. Biases of 8 bits are rounded to float32, because codes are stored from -128.

        Args:
            packed: uint8 [num_embeddings, bytes]: codes from 0, scale and bias of each row.
            bits: 8 or 4.
            layout: "rowwise": scale and bias follow the codes, in float32 for 8 bits, in float16
                for 4. "table-batched": they stand before the codes, in float16, as in FBGEMM's
                table-batched embeddings for inference; cut padding off:
                ``packed[:, : 4 + embedding_dim * bits // 8]``.
            dtype: Dtype of the results; default: torch's default dtype.

        Raises:
            ValueError: ``bits``, ``layout`` or a shape that does not fit; scales that are negative
                or not finite, as those of the other layout would be.
            TypeError: ``packed`` is not uint8.

        Examples:
            >>> import torch, posembed as pe
            >>> weight = torch.tensor([[0.0, 1.0, 0.5]])
            >>> packed = torch.ops.quantized.embedding_bag_byte_prepack(weight)
            >>> pe.QuantizedTable.from_rowwise(packed).dequantize().round(decimals=2)
            tensor([[0.0000, 1.0000, 0.5000]])
        """
        check_tensors(packed=packed)
        one_of("layout", layout, "rowwise", "table-batched")
        if layout == "table-batched":
            packed = _as_rowwise(packed, bits)
        return cls(*rowwise_codes(packed, whole("bits", bits)), dtype=dtype)

    def rows(self, ids: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """:meth:`forward` with results in ``dtype``."""
        return functional.embedding_quantized(
            ids,
            *(self.near(name, ids) for name in ("codes", "scales", "biases")),
            block_rows=self.block_rows,
            block_columns=self.block_columns,
            scale=scale,
            dtype=dtype,
        )

    def part(self, ids: Tensor, index: int, parts: int, scale: float) -> Tensor:
        """See :meth:`posembed.tables.table.Table.part`."""
        columns = self.block_columns or self.embedding_dim // self.scales.shape[1]
        width = self.embedding_dim // parts
        if self.codes.shape[1] % parts:  # two codes of 4 bits are a byte
            return super().part(ids, index, parts, scale)
        if columns >= self.embedding_dim:  # the scale of a row is that of its parts
            block_rows, block_columns = self.block_rows * parts, width
        elif self.block_rows == 1 and width % columns == 0:
            block_rows, block_columns = 1, columns
        else:
            return super().part(ids, index, parts, scale)
        blocks = -(-width // block_columns)

        def shorter(name: str, columns: int) -> Any:
            tensor = self.near(name, ids)
            return None if tensor is None else tensor.reshape(-1, columns)

        return functional.embedding_quantized(
            ids.long() * parts + index,
            shorter("codes", self.codes.shape[1] // parts),
            shorter("scales", blocks),
            shorter("biases", blocks),
            block_rows=block_rows,
            block_columns=block_columns,
            scale=scale,
            dtype=self.dtype,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedTable:
        """Moves the buffers as integers, because conversions to a dtype would change their bits."""
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers()}
        for name, dtype in dtypes.items():
            self._buffers[name] = getattr(self, name).view(_INTEGERS[dtype.itemsize])
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            self._buffers[name] = getattr(self, name).view(dtype)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Buffers of one byte as integers: pickle writes float8, but cannot read it."""
        bytes_ = {k: v for k, v in self._buffers.items() if v is not None and v.itemsize == 1}
        integers = {name: buffer.view(torch.uint8) for name, buffer in bytes_.items()}
        dtypes = {name: buffer.dtype for name, buffer in bytes_.items()}
        buffers = {**self._buffers, **integers}
        return {**super().__getstate__(), "_buffers": buffers, "_dtypes": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives buffers their dtypes again."""
        state = {**state}
        dtypes = state.pop("_dtypes", {})  # absent where an earlier version wrote it
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            self._buffers[name] = getattr(self, name).view(dtype)

    def extra_repr(self) -> str:
        """Sizes and the formats of codes and scales."""
        code = "4 bits" if self.codes.dtype == torch.uint8 else str(self.codes.dtype)[6:]
        return f"{self.num_embeddings}, {self.embedding_dim}, {code}, dtype={self.dtype}"


def _as_rowwise(packed: Tensor, bits: int) -> Tensor:
    """Table-batched rows with scale and bias behind the codes, as row-wise tables have them."""
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] <= 4:
        return packed  # which is refused
    pair, codes = packed[:, :4].contiguous(), packed[:, 4:]
    if bits == 8:
        pair = pair.view(torch.float16).float().view(torch.uint8)
    return torch.cat([codes, pair], 1)


_INTEGERS = {1: torch.uint8, 4: torch.int32}
