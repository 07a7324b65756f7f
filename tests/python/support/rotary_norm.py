"""Cases of QK-norm with rotary."""

import json
from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order
from support.case import case as case_of
from support.rotary import PARTIAL, PLAIN, SECTIONS, random_positions, shape_of


def sample(
    positions: bool = False,
    axes: int | None = None,
    weighted: bool = True,
    biased: bool = False,
    width: int | None = None,
    **options: Any,
) -> Any:
    """Samples with three heads of the query and two of the key; ``width``: that of tables."""
    layout, dim = options.get("layout", "bshd"), json.loads(options["spec"])["head_dim"]
    all_heads = options.get("all_heads", False)

    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        def parameters(given: bool) -> tuple[Tensor | None, Tensor | None]:
            if not given:
                return None, None
            return random(3 * dim if all_heads else dim), random(2 * dim if all_heads else dim)

        places = (seq,) if layout == "thd" else (batch, seq)
        places = places if axes is None else (axes, *places)
        tables = None, None
        if width is not None:
            tables = tuple(random(*places[-2:], width) for _ in "cs")
        return Sample(
            (
                random(*shape_of(layout, batch, seq, 3, dim)),
                random(*shape_of(layout, batch, seq, 2, dim)),
                *parameters(weighted),
                random_positions(places, device, axes is not None) if positions else None,
                *parameters(biased),
                *tables,
            ),
            options,
        )

    return make


def case(name: str, **options: Any) -> OperatorCase:
    return case_of(f"norm_rotary{name}", sample(**options))


CASES = in_schema_order(
    [
        case("", spec=PLAIN, eps=1e-3),
        case("-partial", spec=PARTIAL, positions=True, layout="bhsd", weight_offset=1.0),
        case("-sbhd", spec=PLAIN, positions=True, layout="sbhd"),
        case("-sections", spec=SECTIONS, positions=True, axes=3, layout="thd"),
        case("-unweighted", spec=PARTIAL, layout="bhsd", weighted=False),
        case("-layer", spec=PARTIAL, centred=True, biased=True, layout="sbhd", eps=1e-3),
        case("-all-heads", spec=PLAIN, all_heads=True, positions=True, layout="bhsd"),
        case("-all-layer", spec=PARTIAL, all_heads=True, centred=True, biased=True, layout="thd"),
        case("-tables", spec=PLAIN, width=8, numerics="float32_product", layout="bhsd"),
        case("-half-tables", spec=PARTIAL, width=5, numerics="float32_product", all_heads=True),
        case_of("norm_rotary_", sample(spec=PARTIAL, layout="sbhd", offset=5, weight_offset=0.5), mutates=True),
        case_of("norm_rotary_-all-heads", sample(spec=PARTIAL, layout="sbhd", all_heads=True, centred=True), mutates=True),
    ],
    "query",
    "key",
    "query_weight",
    "key_weight",
    "positions",
    "query_bias",
    "key_bias",
    "cos",
    "sin",
)  # fmt: skip
