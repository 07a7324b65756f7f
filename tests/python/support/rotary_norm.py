"""Slow, obvious references for QK-norm with rotary, and the cases of its operators."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order
from support.rotary import PARTIAL, PLAIN, SECTIONS, random_positions, rotate
from support.rotary_cache import shape_of
from support.rotary_tables import rotate as rotate_by_tables

HEADS = {"bshd": 2, "bhsd": 1, "sbhd": 2, "thd": 1}  # the index of the dimension


def normed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    centred: bool = False,
    all_heads: bool = False,
    layout: str = "bshd",
) -> Tensor:
    dims = [HEADS[layout], x.dim() - 1] if all_heads else [x.dim() - 1]

    def of_columns(parameter: Tensor) -> Tensor:
        if not all_heads:
            return parameter
        sizes = [1] * x.dim()
        for dim in dims:
            sizes[dim] = x.shape[dim]
        return parameter.reshape(sizes)

    if centred:
        x = x - x.mean(dims, keepdim=True)
    rows = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    if weight is not None:
        rows = rows * (of_columns(weight) + weight_offset)
    return rows if bias is None else rows + of_columns(bias)


def reference(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    spec: str,
    numerics: str = "float32",
    round_before_weight: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    norm = {
        name: options.pop(name)
        for name in ("eps", "weight_offset", "centred", "all_heads")
        if name in options
    }
    layout = options.get("layout", "bshd")
    pair = (
        normed(query, query_weight, query_bias, **norm, layout=layout),
        normed(key, key_weight, key_bias, **norm, layout=layout),
    )
    if cos is None:
        first, second = (rotate(x, positions, spec=spec, **options) for x in pair)
        return first, second
    known = json.loads(spec)
    given = {
        "layout": layout,
        "interleaved": known.get("interleaved", False),
        "start": known.get("rotary_start", 0),
        "half_width": cos.shape[-1] == known.get("rotary_dim", known["head_dim"]) // 2,
    }
    first, second = (rotate_by_tables(x, cos, sin, **given) for x in pair)
    return first, second


def reference_in_place(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    """The contents of every floating-point tensor after the call."""
    others = [x for x in tensors[2:] if x is not None and x.is_floating_point()]
    return *reference(*tensors, **options), *others


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
    operator = torch.ops.posembed.norm_rotary.default
    return OperatorCase(f"norm_rotary{name}", operator, sample(**options), reference)


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
        OperatorCase(
            "norm_rotary_",
            torch.ops.posembed.norm_rotary_.default,
            sample(spec=PARTIAL, layout="sbhd", offset=5, weight_offset=0.5),
            reference_in_place,
            mutates=True,
        ),
        OperatorCase(
            "norm_rotary_-all-heads",
            torch.ops.posembed.norm_rotary_.default,
            sample(spec=PARTIAL, layout="sbhd", all_heads=True, centred=True),
            reference_in_place,
            mutates=True,
        ),
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
)
