"""Sinusoids: mapped inputs become a larger batch; positions may have any shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.batching.copies import loop_rule
from posembed.batching.dimensions import front


def sinusoidal_add_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    spec: str,
    positions: Tensor | None = None,
    offset: int = 0,
    scale: Tensor | None = None,
) -> Any:
    """Merges copies into the batch, or makes them the batch if x is [seq, embedding_dim]."""
    operator = torch.ops.posembed.sinusoidal_add
    x_dim, _, positions_dim, _, scale_dim = (*in_dims, None, None, None)[:5]
    if scale_dim is not None:
        return loop_rule(operator, info, in_dims, x, spec, positions, offset, scale)
    size = info.batch_size
    x = front(x, x_dim, size)
    shape = x.shape
    if positions is not None:
        positions = front(positions, positions_dim, size)
        if positions.dim() < x.dim() - 1:  # [size, seq] beside [size, batch, seq, embedding_dim]
            positions = positions.unsqueeze(1)
        positions = positions.expand(shape[:-1]).reshape(-1, shape[-2])
    rows = x.reshape(-1, *shape[-2:])
    return operator(rows, spec, positions, offset, scale).reshape(shape), 0


def sinusoidal_encode_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    positions: Tensor,
    spec: str,
    scale: Tensor | None = None,
    *options: Any,
) -> Any:
    """Positions may have any shape."""
    operator = torch.ops.posembed.sinusoidal_encode
    if any(dim is not None for dim in in_dims[1:]):
        return loop_rule(operator, info, in_dims, positions, spec, scale, *options)
    return operator(positions, spec, scale, *options), in_dims[0]
