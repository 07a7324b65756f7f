"""Pooled rows of bags."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posembed._decompositions.shared import wide


def token_bag(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    padding_idx: int,
    include_last_offset: bool,
    mode: str,
    weights: Tensor | None,
    gradient: str,
) -> Tensor:
    counts_id = (ids != padding_idx).unsqueeze(-1)
    rows = torch.nn.functional.embedding(ids, weight).to(wide(weight.dtype))
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    # ids: [bags, tokens] without offsets, else [tokens]
    if offsets is None:
        pooled = (rows * counts_id).sum(1)
        sizes = counts_id.sum(1)
        largest = torch.where(counts_id, rows, -math.inf).amax(1)
    else:
        bags = offsets.shape[0] - int(include_last_offset)
        places = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
        bag = (places >= offsets[:bags]).sum(-1) - 1
        index = bag.unsqueeze(-1).expand_as(rows)
        pooled = rows.new_zeros(bags, rows.shape[1]).scatter_add(0, index, rows * counts_id)
        sizes = bag.new_zeros(bags).scatter_add(0, bag, counts_id.squeeze(-1).long()).unsqueeze(-1)
        lowest = rows.new_full((bags, rows.shape[1]), -math.inf)
        seen = torch.where(counts_id, rows, -math.inf)
        largest = lowest.scatter_reduce(0, index, seen, "amax")
    if mode == "mean":
        pooled = pooled / sizes.clamp_min(1)
    elif mode == "max":
        pooled = torch.where(sizes > 0, largest, 0.0)
    return pooled.to(weight.dtype)
