"""Functional look-ups in tables of codes."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._options import CodeFormat
from posembed.glue.gate import gated
from posembed.glue.sharding import refuse_sharded
from posembed.glue.validation import positive

_EMBEDDING = gated(torch.ops.posembed.embedding_quantized.default)
_QUANTIZE_ROWS = gated(torch.ops.posembed.quantize_rows.default)


def embedding_quantized(
    ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    biases: Tensor | None = None,
    *,
    block_rows: int = 1,
    block_columns: int | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``scale * (codes * scales + biases)`` of the rows of ``ids``; the table is frozen.

    Rows are read as codes and widened in float32 (float64 for float64), then rounded once.

    Args:
        ids: int32 or int64 of any shape, each from 0 to num_embeddings - 1.
        codes: float8_e4m3fn or int8 [num_embeddings, embedding_dim], or uint8
            [num_embeddings, embedding_dim / 2] with two numbers of 4 bits, 0 to 15, the first in
            the lower half.
        scales: float32, or float8_e8m0fnu, whose numbers are powers of two:
            [num_embeddings / block_rows, embedding_dim / block_columns], rounded up.
        biases: float32, as ``scales``; default: 0.
        block_rows: Rows that share a scale.
        block_columns: Columns that share a scale; default: ``scales`` divides a row evenly.
        scale: Multiplies the result.
        dtype: Dtype of the result: float32, float64, bfloat16 or float16.

    Returns:
        [..., embedding_dim] in ``dtype``.

    Raises:
        ValueError: Shapes are incompatible, or a tensor needs a gradient.
        TypeError: A dtype is not supported.
        IndexError: An id is outside the table.

    Examples:
        >>> import torch, posembed as pe
        >>> codes, scales, biases = pe.functional.quantize_rows(torch.randn(100, 64), "int8")
        >>> pe.functional.embedding_quantized(torch.tensor([[1, 99]]), codes, scales).shape
        torch.Size([1, 2, 64])
    """
    refuse_sharded(ids=ids, codes=codes)
    return _EMBEDDING(codes, scales, ids, biases, block_rows, block_columns or 0, scale, dtype)


def quantize_rows(
    weight: Tensor, format: CodeFormat, block: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and their scales for a table, as :func:`embedding_quantized` takes them.

    Args:
        weight: float32, float64, bfloat16 or float16 [num_embeddings, embedding_dim].
        format: "float8" (e4m3fn) or "int8", whose largest code is the largest number of a block;
            "int4", whose codes lie evenly between its least and its largest.
        block: Columns that share a scale, a divisor of embedding_dim; default: all.

    Returns:
        Codes, float32 scales and, for "int4", float32 biases.

    Raises:
        ValueError: An unknown format, or ``block`` does not divide a row.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.quantize_rows(torch.tensor([[-1.0, 0.5, 0.25, 0.0]]), "int8")[0].tolist()
        [[-127, 64, 32, 0]]
    """
    codes, scales, biases = _QUANTIZE_ROWS(
        weight, format, 0 if block is None else positive("block", block)
    )
    return codes, scales, biases if format == "int4" else None
