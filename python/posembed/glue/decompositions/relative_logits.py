"""Relative logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posembed.glue.decompositions.shared import wide


def relative_logits(
    query: Tensor, table: Tensor, rows: Tensor, scale: float, by_key: bool, scores: Tensor | None
) -> Tensor:
    batch, heads = query.shape[:2]
    dtype = wide(query.dtype)
    products = (query @ table.mT).to(dtype)  # [batch, heads, queries or keys, rows]
    if by_key:
        rows = rows.mT
    while rows.dim() < 4:
        rows = rows.unsqueeze(0)
    sizes = (batch, heads, *rows.shape[2:])
    result = products.new_zeros(())
    if scores is not None:  # a hidden key's score may be NaN
        hidden = rows.eq(-2).any(0).unsqueeze(1)
        result = scores.to(dtype).masked_fill(hidden.mT if by_key else hidden, 0)
    for axis in rows.long():
        row = axis.unsqueeze(1).expand(sizes)
        logits = torch.where(row >= 0, products.gather(3, row.clamp_min(0)) * scale, 0.0)
        logits = torch.where(row == -2, -math.inf, logits)
        result = result + (logits.mT if by_key else logits)
    return result.to(query.dtype)
