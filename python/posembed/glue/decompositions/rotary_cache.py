"""Rotation for latent attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posembed.glue.decompositions.rotary import rotate


def mla_rotary(
    query: Tensor,
    key_rope: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    given = (spec, positions, layout, offset, inverse, None, None, False)
    heads = {"bhsd": 1}.get(layout, -2)
    lacks_heads = key_rope.dim() < query.dim()
    key = key_rope.unsqueeze(heads) if lacks_heads else key_rope
    key = rotate(key, True, *given)
    return rotate(query, False, *given), key.squeeze(heads) if lacks_heads else key
