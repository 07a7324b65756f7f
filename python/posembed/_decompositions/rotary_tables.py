"""Rotation by given tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed._decompositions.rotary import of_tokens, turn
from posembed._decompositions.shared import wide


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
    pairs = cos.shape[-1] if half_width else cos.shape[-1] // 2
    if not half_width:
        halves = slice(0, None, 2) if interleaved else slice(0, pairs)
        cos, sin = cos[..., halves], sin[..., halves]
    dtype = wide(query.dtype)
    by_head = cos.dim() == 4
    cosines, sines = (of_tokens(table.to(dtype), layout, by_head) for table in (cos, sin))
    sines = -sines if transpose else sines
    return turn(query, cosines, sines, start, 2 * pairs, interleaved)


def rotary_tables_pair(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return rotary_tables(query, *given), rotary_tables(key, *given)
