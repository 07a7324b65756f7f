"""Sinusoids: mapped inputs are a larger batch, and positions may have any shape."""

from __future__ import annotations

from typing import Any

import torch

from posembed.batching.copies import loop_rule
from posembed.batching.dimensions import front


def sinusoidal_add_rule(
    info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Into the batch, or as the batch if x is [seq, embedding_dim]."""
    size = info.batch_size
    x = front(args[0], in_dims[0], size)
    shape = x.shape
    positions = args[1] if len(args) > 1 else None
    scale = args[2] if len(args) > 2 else None
    if scale is not None and in_dims[2] is not None:
        return loop_rule(torch.ops.posembed.sinusoidal_add, info, in_dims, *args, **options)
    if positions is not None:
        positions = front(positions, in_dims[1], size)
        if positions.dim() < x.dim() - 1:  # [size, seq] beside [size, batch, seq, embedding_dim]
            positions = positions.unsqueeze(1)
        positions = positions.expand(shape[:-1]).reshape(-1, shape[-2])
    rows = x.reshape(-1, *shape[-2:])
    result = torch.ops.posembed.sinusoidal_add(rows, positions, scale, **options)
    return result.reshape(shape), 0


def sinusoidal_encode_rule(
    info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Positions may have any shape."""
    if len(args) > 1 and in_dims[1] is not None:
        return loop_rule(torch.ops.posembed.sinusoidal_encode, info, in_dims, *args, **options)
    return torch.ops.posembed.sinusoidal_encode(*args, **options), in_dims[0]
