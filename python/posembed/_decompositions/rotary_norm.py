"""Norms and rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed._decompositions.rotary import rotate
from posembed._decompositions.rotary_tables import rotary_tables
from posembed._decompositions.shared import fields, wide


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
        rows = x.to(dtype)
        if all_heads:
            rows = rows.movedim(heads, -2).flatten(-2)
        if centred:
            rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        if cos is not None and numerics == "float32" and round_before_weight:
            rows = rows.to(x.dtype).to(dtype)
        if weight is not None:
            rows = rows * (weight.to(dtype) + weight_offset)
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
