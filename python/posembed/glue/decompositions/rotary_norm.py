"""Norms and rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.glue.decompositions.rotary import rotate
from posembed.glue.decompositions.rotary_tables import rotary_tables
from posembed.glue.decompositions.shared import fields, rms, wide


def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    eps: float,
    weight_offset: float,
    centred: bool = False,
    all_heads: bool = False,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    numerics: str = "float32",
    round_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        dtype, heads = wide(x.dtype), 1 if layout in ("bhsd", "thd") else 2
        rounded = cos is not None and numerics == "float32" and round_before_weight
        rows = x.to(dtype)
        if all_heads:
            rows = rows.movedim(heads, -2).flatten(-2)
        if weight is not None:
            weight = weight.to(dtype)
            weight = weight + weight_offset if weight_offset else weight
        scale = None if rounded else weight
        if centred:
            rows = torch.nn.functional.layer_norm(rows, rows.shape[-1:], scale, None, eps)
        else:
            rows = rms(rows, eps, scale)
        if rounded:
            rows = rows.to(x.dtype).to(dtype)
            rows = rows if weight is None else rows * weight
        if bias is not None:
            rows = rows + bias.to(dtype)
        if all_heads:
            rows = torch.unflatten(rows, -1, (x.shape[heads], x.shape[-1])).movedim(-2, heads)
        return rows

    def rotated(rows: Tensor, is_key: bool) -> Tensor:
        if cos is None:
            where = (spec, positions, layout, offset, False, None, None, False)
            return rotate(rows, is_key, *where)
        known = fields(torch.ops.posembed.rotary_specification.default, spec)
        half = cos.shape[-1] == known["rotary_dim"] // 2
        options = (known["interleaved"], half, known["rotary_start"], numerics, False)
        return rotary_tables(rows, cos, sin, layout, *options)

    return (
        rotated(normed(query, query_weight, query_bias), False).to(query.dtype),
        rotated(normed(key, key_weight, key_bias), True).to(key.dtype),
    )
