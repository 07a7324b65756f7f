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


def embedding_with_features(
    weight: Tensor,
    features: Tensor,
    ids: Tensor,
    places: Tensor,
    padding_idx: int,
    scale: float,
    gradient: str,
) -> Tensor:
    if places.dtype == torch.bool:
        order = places.flatten().cumsum(0).view(places.shape) - 1
        places = torch.where(places, order, -1)
    own = (places < 0).unsqueeze(-1)
    rows = torch.nn.functional.embedding(ids * (places < 0), weight)
    some = torch.nn.functional.pad(features, (0, 0, 0, 1))  # there may be none
    others = torch.nn.functional.embedding(places.clamp(min=0), some)
    return torch.where(own, rows if scale == 1.0 else rows * scale, others)


def embedding_quantized(
    codes: Tensor,
    scales: Tensor,
    ids: Tensor,
    biases: Tensor | None,
    block_rows: int,
    block_columns: int,
    scale: float,
    dtype: torch.dtype | None,
) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if codes.dtype.itemsize == 1 and codes.is_floating_point():  # runtimes lack rows of float8
        numbers = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype)
        rows = numbers.to(wide)[codes.view(torch.uint8)[ids].long()]
    else:
        rows = codes[ids].to(wide)  # [..., columns]
    if codes.dtype == torch.uint8:  # two codes in a byte; runtimes lack the operators of bits
        high = (rows / 16).floor()
        rows = torch.stack([rows - 16 * high, high], -1).flatten(-2)
    dim = rows.shape[-1]
    block = block_columns or dim // scales.shape[1]

    def of_columns(values: Tensor) -> Tensor:
        found = values.to(wide)[ids // block_rows]
        return found.repeat_interleave(block, -1)[..., :dim]

    numbers = rows * of_columns(scales)
    if biases is not None:
        numbers = numbers + of_columns(biases)
    return (numbers * scale).to(dtype or torch.float32)
