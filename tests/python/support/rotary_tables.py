"""Cases of rotation by given tables."""

from typing import Any

import torch
from torch import Tensor

from support.case import Sample, case
from support.rotary import shape_of

WIDE = (torch.float32, torch.float64)


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
            torch.randn(shape_of(layout, batch, seq, count, dim), device=device, dtype=dtype) for count in heads
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


PRODUCT = "float32_product"
CASES = [
    case("rotary_tables-float32", sample((3,), by_batch=True), dtypes=WIDE),
    case("rotary_tables-apart", sample((3,), by_batch=True, apart=True, start=1, numerics=PRODUCT)),
    case("rotary_tables_pair-apart", sample((3, 2), apart=True, interleaved=True, layout="bshd"), dtypes=WIDE),
    case("rotary_tables_pair-apart-transposed", sample((3, 2), apart=True, transpose=True, layout="sbhd", numerics=PRODUCT)),
    case("rotary_tables_pair-apart-heads-shared", sample((3, 3), apart=True, table_heads=3, layout="bshd", numerics=PRODUCT)),
    case("rotary_tables-apart-heads", sample((3,), by_batch=True, apart=True, table_heads=3, interleaved=True, numerics=PRODUCT)),
    case("rotary_tables-half_width", sample((3,), start=1, half_width=True, numerics=PRODUCT, layout="bshd")),
    case("rotary_tables-interleaved", sample((2,), by_batch=None, layout="thd", interleaved=True, numerics=PRODUCT)),
    case("rotary_tables-complex", sample((2,), by_batch=None, complex_table=True, interleaved=True, layout="bshd")),
    case("rotary_tables_pair", sample((3, 2), pairs=5, by_batch=True, half_width=True, numerics=PRODUCT)),
    case("rotary_tables_pair-sbhd", sample((3, 2), half_width=True, interleaved=True, transpose=True, layout="sbhd"), dtypes=WIDE),
    case("rotary_tables_pair-heads", sample((3, 3), by_batch=True, table_heads=3, half_width=True, layout="sbhd"), dtypes=WIDE),
    case("rotary_tables-heads-thd", sample((2,), table_heads=2, layout="thd", interleaved=True, numerics=PRODUCT)),
    case("rotary_tables_pair-one-head", sample((3, 2), by_batch=True, table_heads=1, complex_table=True, interleaved=True)),
    case("rotary_tables_", sample((3,), start=2, numerics=PRODUCT), mutates=True),
    case("rotary_tables_pair_", sample((3, 2), layout="bshd", numerics=PRODUCT), mutates=True),
    case("rotary_tables_out", sample((3, 3), numerics=PRODUCT, interleaved=True), mutates=True),
    case("rotary_tables_pair_out", sample((3, 2, 3, 2), by_batch=None, layout="thd", numerics=PRODUCT), mutates=True),
]  # fmt: skip
