"""Pooled rows of bags."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posembed.glue.decompositions.shared import wide


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
    counts = (ids != padding_idx).unsqueeze(-1)
    rows = torch.nn.functional.embedding(ids, weight).to(wide(weight.dtype))
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    rows = torch.where(counts, rows, -math.inf if mode == "max" else 0.0)
    # ids: [bags, tokens] without offsets, else [tokens]
    if offsets is None:
        sizes = counts.sum(1)
        if mode == "max":  # of a bag without tokens, too
            pooled = torch.nn.functional.pad(rows, (0, 0, 0, 1), value=-math.inf).amax(1)
        else:
            pooled = rows.sum(1)
    else:
        bags = offsets.shape[0] - int(include_last_offset)
        places = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
        bag = (places >= offsets[:bags]).sum(-1)  # from 1 on; without bags, 0
        index = bag.unsqueeze(-1).expand_as(rows)
        if mode == "max":
            lowest = rows.new_full((bags + 1, rows.shape[1]), -math.inf)
            pooled = lowest.scatter_reduce(0, index, rows, "amax")[1:]
        else:
            pooled = rows.new_zeros(bags + 1, rows.shape[1]).scatter_add(0, index, rows)[1:]
        sizes = bag.new_zeros(bags + 1).scatter_add(0, bag, counts.squeeze(-1).long())[1:]
        sizes = sizes.unsqueeze(-1)
    if mode == "mean":
        pooled = pooled / sizes.clamp_min(1)
    elif mode == "max":
        pooled = torch.where(sizes > 0, pooled, 0.0)
    return pooled.to(weight.dtype)
