"""Positions of sequences with different offsets, as with caches of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)


def positions_from(
    offset: Tensor, positions: Tensor | None, x: Tensor, batch: int | None = -3, seq: int = -2
) -> Tensor:
    """Positions [batch, seq] of the tokens of ``x``, starting at ``offset`` [batch].

    ``batch`` and ``seq`` are dimensions of ``x``; ``batch`` is None if there is none.

    Raises:
        ValueError: Positions are passed too, or the offsets are not [batch].
        TypeError: The offsets are not int32 or int64.
    """
    shape = list(offset.shape)
    if positions is not None:
        raise ValueError(f"offset: expected 0 where positions are given, got {shape}")
    if offset.dtype not in INTEGERS:
        raise TypeError(f"offset: expected int32 or int64, got {offset.dtype}")
    if batch is None or x.dim() + batch < 0:
        raise ValueError(f"offset: expected a number where there is no batch, got {shape}")
    if offset.dim() != 1 or offset.shape[0] != x.shape[batch]:
        raise ValueError(
            f"offset: expected a number or [batch] with batch {x.shape[batch]}, got {shape}"
        )
    tokens = torch.arange(x.shape[seq], dtype=offset.dtype, device=offset.device)
    return offset.unsqueeze(-1) + tokens
