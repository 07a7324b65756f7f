"""A slow, obvious reference for rotation by given tables, and the cases of its operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample
from support.rotary_cache import shape_of

WIDE = (torch.float32, torch.float64)
HEADS_DIM = {"bshd": 2, "bhsd": 1, "thd": 1}


def halves_of(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    first, second = halves_of(x, interleaved)
    parts = -second, first
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    layout: str = "bhsd",
    interleaved: bool = False,
    half_width: bool = False,
    start: int = 0,
    transpose: bool = False,
    **_: Any,
) -> Tensor:
    if sin is None:
        cos, sin, half_width = cos.real.to(x.dtype), cos.imag.to(x.dtype), True
    if half_width:
        cos, sin = repeated(cos, interleaved), repeated(sin, interleaved)
    if cos.dim() == 4:  # [batch or 1, seq, heads or 1, width]
        order = {"bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}.get(layout, (0, 1, 2, 3))
        cos, sin = (t.permute(order) for t in (cos, sin))
        if layout == "thd":
            cos, sin = cos.squeeze(0), sin.squeeze(0)
    elif layout == "sbhd":
        cos, sin = (t if t.dim() == 2 else t.transpose(0, 1) for t in (cos, sin))
        cos, sin = (t.unsqueeze(1) if t.dim() == 2 else t for t in (cos, sin))
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    else:
        if layout == "thd":
            cos, sin = (t.reshape(t.shape[-2:]) for t in (cos, sin))
        dim = HEADS_DIM[layout] - x.dim()
        cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    width = cos.shape[-1]
    before, window, after = x.split([start, width, x.shape[-1] - start - width], -1)
    if transpose:
        rotated = window * cos - rotate_half(window * sin, interleaved)
    else:
        rotated = window * cos + rotate_half(window, interleaved) * sin
    return torch.cat((before, rotated, after), -1)


def reference(query: Tensor, *tables: Tensor, **options: Any) -> Tensor:
    return rotate(query, *tables, **options)


def reference_pair(
    query: Tensor, key: Tensor, *tables: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    return rotate(query, *tables, **options), rotate(key, *tables, **options)


def reference_in_place(query: Tensor, *tables: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return rotate(query, *tables, **options), *tables


def reference_pair_in_place(
    query: Tensor, key: Tensor, *tables: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    return *reference_pair(query, key, *tables, **options), *tables


def reference_out(_: Tensor, query: Tensor, *tables: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return rotate(query, *tables, **options), query, *tables


def reference_pair_out(
    query_out: Tensor,
    key_out: Tensor,
    query: Tensor,
    key: Tensor,
    *tables: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    return *reference_pair(query, key, *tables, **options), query, key, *tables


def repeated(half: Tensor, interleaved: bool) -> Tensor:
    """A table of whole width."""
    return half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)


def sample(
    heads: tuple[int, ...],
    pairs: int = 4,
    dim: int = 10,
    by_batch: bool | None = False,
    complex_table: bool = False,
    table_heads: int | None = None,
    apart: bool = False,
    **options: Any,
) -> Any:
    """Samples whose tables are [seq, width], or [batch or 1, seq, width] by ``by_batch``.

    With ``table_heads``: [batch or 1, seq, heads, width]. ``apart`` tables have a value of its own
    for each component of a pair.
    """

    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        layout = options.get("layout", "bhsd")
        rows = () if by_batch is None else (batch if by_batch else 1,)
        by_head = () if table_heads is None else (table_heads,)
        angles = torch.randn(*rows, seq, *by_head, pairs, device=device)
        tensors = tuple(
            torch.randn(shape_of(layout, batch, seq, count, dim), device=device, dtype=dtype)
            for count in heads
        )
        if complex_table:
            return Sample((*tensors, torch.polar(torch.ones_like(angles), angles)), options)
        tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        if apart:
            angles = torch.randn(*rows, seq, *by_head, 2 * pairs, device=device)
            tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        elif not options.get("half_width"):
            tables = tuple(repeated(table, bool(options.get("interleaved"))) for table in tables)
        return Sample((*tensors, *tables), options)

    return make


OPERATORS = torch.ops.posembed
PRODUCT = "float32_product"
CASES = [
    OperatorCase(
        "rotary_tables-float32",
        OPERATORS.rotary_tables.default,
        sample((3,), by_batch=True),
        reference,
        dtypes=WIDE,
    ),
    OperatorCase(
        "rotary_tables-apart",
        OPERATORS.rotary_tables.default,
        sample((3,), by_batch=True, apart=True, start=1, numerics=PRODUCT),
        reference,
    ),
    OperatorCase(
        "rotary_tables_pair-apart",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 2), apart=True, interleaved=True, layout="bshd"),
        reference_pair,
        dtypes=WIDE,
    ),
    OperatorCase(
        "rotary_tables_pair-apart-transposed",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 2), apart=True, transpose=True, layout="sbhd", numerics=PRODUCT),
        reference_pair,
    ),
    OperatorCase(
        "rotary_tables_pair-apart-heads-shared",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 3), apart=True, table_heads=3, layout="bshd", numerics=PRODUCT),
        reference_pair,
    ),
    OperatorCase(
        "rotary_tables-apart-heads",
        OPERATORS.rotary_tables.default,
        sample((3,), by_batch=True, apart=True, table_heads=3, interleaved=True, numerics=PRODUCT),
        reference,
    ),
    OperatorCase(
        "rotary_tables-half_width",
        OPERATORS.rotary_tables.default,
        sample((3,), start=1, half_width=True, numerics=PRODUCT, layout="bshd"),
        reference,
    ),
    OperatorCase(
        "rotary_tables-interleaved",
        OPERATORS.rotary_tables.default,
        sample((2,), by_batch=None, layout="thd", interleaved=True, numerics=PRODUCT),
        reference,
    ),
    OperatorCase(
        "rotary_tables-complex",
        OPERATORS.rotary_tables.default,
        sample((2,), by_batch=None, complex_table=True, interleaved=True, layout="bshd"),
        reference,
    ),
    OperatorCase(
        "rotary_tables_pair",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 2), pairs=5, by_batch=True, half_width=True, numerics=PRODUCT),
        reference_pair,
    ),
    OperatorCase(
        "rotary_tables_pair-sbhd",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 2), half_width=True, interleaved=True, transpose=True, layout="sbhd"),
        reference_pair,
        dtypes=WIDE,
    ),
    OperatorCase(
        "rotary_tables_pair-heads",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 3), by_batch=True, table_heads=3, half_width=True, layout="sbhd"),
        reference_pair,
        dtypes=WIDE,
    ),
    OperatorCase(
        "rotary_tables-heads-thd",
        OPERATORS.rotary_tables.default,
        sample((2,), table_heads=2, layout="thd", interleaved=True, numerics=PRODUCT),
        reference,
    ),
    OperatorCase(
        "rotary_tables_pair-one-head",
        OPERATORS.rotary_tables_pair.default,
        sample((3, 2), by_batch=True, table_heads=1, complex_table=True, interleaved=True),
        reference_pair,
    ),
    OperatorCase(
        "rotary_tables_",
        OPERATORS.rotary_tables_.default,
        sample((3,), start=2, numerics=PRODUCT),
        reference_in_place,
        mutates=True,
    ),
    OperatorCase(
        "rotary_tables_pair_",
        OPERATORS.rotary_tables_pair_.default,
        sample((3, 2), layout="bshd", numerics=PRODUCT),
        reference_pair_in_place,
        mutates=True,
    ),
    OperatorCase(
        "rotary_tables_out",
        OPERATORS.rotary_tables_out.default,
        sample((3, 3), numerics=PRODUCT, interleaved=True),
        reference_out,
        mutates=True,
    ),
    OperatorCase(
        "rotary_tables_pair_out",
        OPERATORS.rotary_tables_pair_out.default,
        sample((3, 2, 3, 2), by_batch=None, layout="thd", numerics=PRODUCT),
        reference_pair_out,
        mutates=True,
    ),
]
