"""Rotation by given tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.glue.decompositions.rotary import components, joined, of_tokens, placed, turn
from posembed.glue.decompositions.shared import wide


def rotary_tables(
    query: Tensor,
    cos: Tensor,
    sin: Tensor | None,
    layout: str,
    interleaved: bool,
    half_width: bool,
    start: int,
    numerics: str,
    transpose: bool,
) -> Tensor:
    if sin is None:  # complex
        cos, sin = torch.view_as_real(cos).unbind(-1)
        half_width = True
    dtype = wide(query.dtype)
    by_head = cos.dim() == 4
    cosines, sines = (of_tokens(table.to(dtype), layout, by_head) for table in (cos, sin))
    if half_width:
        sines = -sines if transpose else sines
        return turn(query, cosines, sines, start, 2 * cos.shape[-1], interleaved)
    window = query[..., start : start + cos.shape[-1]].to(dtype)
    (x, y), (cos_x, cos_y), (sin_x, sin_y) = (
        components(whole, interleaved) for whole in (window, cosines, sines)
    )
    if transpose:
        sin_x, sin_y = -sin_y, -sin_x
    rotated = joined(x * cos_x - y * sin_x, y * cos_y + x * sin_y, interleaved)
    return placed(rotated.to(query.dtype), query, start)


def rotary_tables_pair(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return rotary_tables(query, *given), rotary_tables(key, *given)
