"""RMSNorm and rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from posembed._decompositions.rotary import rotate
from posembed._decompositions.shared import rms, wide


def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    eps: float,
    weight_offset: float,
) -> tuple[Tensor, Tensor]:
    def normed(x: Tensor, weight: Tensor) -> Tensor:
        dtype = wide(x.dtype)
        return rms(x.to(dtype), eps) * (weight.to(dtype) + weight_offset)

    where = (spec, positions, layout, offset, False, None, None, False)
    return (
        rotate(normed(query, query_weight), False, *where).to(query.dtype),
        rotate(normed(key, key_weight), True, *where).to(key.dtype),
    )
