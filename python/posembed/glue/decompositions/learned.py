"""Learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.glue.decompositions.shared import consecutive


def learned_add(
    x: Tensor, weight: Tensor, positions: Tensor | None, offset: Any, first_row: int
) -> Tensor:
    if positions is None:
        positions = consecutive(x.shape[1], offset, x.device)
    return x + learned_encode(weight, positions, first_row)


def learned_encode(weight: Tensor, positions: Tensor, first_row: int) -> Tensor:
    return torch.nn.functional.embedding(positions + first_row, weight)
