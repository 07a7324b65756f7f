"""Slow, obvious references for QK-norm with rotary, and the cases of its operators."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order
from support.rotary import PARTIAL, PLAIN, SECTIONS, random_positions, rotate
from support.rotary_cache import shape_of


def normed(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    rstd = 1 / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x * rstd * (weight + weight_offset)


def reference(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    query = normed(query, query_weight, eps, weight_offset)
    key = normed(key, key_weight, eps, weight_offset)
    return rotate(query, positions, **options), rotate(key, positions, **options)


def reference_in_place(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    positions: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The contents of every tensor after the call."""
    results = reference(query, key, query_weight, key_weight, positions, **options)
    return *results, query_weight, key_weight


def sample(positions: bool = False, axes: int | None = None, **options: Any) -> Any:
    """Samples with three heads of the query and two of the key."""
    layout, dim = options.get("layout", "bshd"), json.loads(options["spec"])["head_dim"]

    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        places = (seq,) if layout == "thd" else (batch, seq)
        places = places if axes is None else (axes, *places)
        return Sample(
            (
                random(*shape_of(layout, batch, seq, 3, dim)),
                random(*shape_of(layout, batch, seq, 2, dim)),
                random(dim),
                random(dim),
                random_positions(places, device, axes is not None) if positions else None,
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
        OperatorCase(
            "norm_rotary_",
            torch.ops.posembed.norm_rotary_.default,
            sample(spec=PARTIAL, layout="sbhd", offset=5, weight_offset=0.5),
            reference_in_place,
            mutates=True,
        ),
    ],
    "query",
    "key",
    "query_weight",
    "key_weight",
    "positions",
)
