"""Learned positions: mapped inputs become a larger batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.batching.copies import loop_rule
from posembed.batching.dimensions import fold, size_of, unfold


def learned_add_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    *options: int,
) -> Any:
    """learned_add: mapped x becomes a larger batch; other mapped arguments need a call per copy."""
    operator = torch.ops.posembed.learned_add
    x_dim, *other_dims = in_dims
    if x_dim is None or any(dim is not None for dim in other_dims):
        return loop_rule(operator, info, in_dims, x, weight, positions, *options)
    size = info.batch_size
    if positions is not None and positions.dim() == 2:
        positions = positions.repeat(size, 1) if positions.shape[0] > 1 else positions
    result = operator(fold(x, x_dim, 0, size), weight, positions, *options)
    return unfold(result, 0, size, size_of(x, x_dim, 0))
