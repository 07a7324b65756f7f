"""Lookups in token tables."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(
    weight: Tensor,
    ids: Tensor,
    padding_idx: int,
    scale: float,
    scale_grad_by_freq: bool,
    vocabulary_start: int,
    gradient: str,
) -> Tensor:
    if vocabulary_start < 0:
        rows = torch.nn.functional.embedding(ids, weight)
    else:  # ids outside a vocabulary shard give rows of zeros
        local = ids - vocabulary_start
        known = (local >= 0) & (local < weight.shape[0])
        rows = torch.nn.functional.embedding(local * known, weight) * known.unsqueeze(-1)
    return rows if scale == 1.0 else rows * scale
