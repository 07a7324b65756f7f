"""ALiBi: slopes, and the bias alone or in scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from posembed.glue.decompositions.shared import consecutive, wide


def distances(
    query_length: Any,
    key_length: Any,
    device: torch.device,
    causal: bool,
    query_offset: Any,
    attention_mask: Tensor | None,
    positions_from_mask: bool,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    cu_seqlens: Tensor | None,
    query_offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Query position minus key position, and which keys are hidden: [(batch, 1,) query, key]."""
    offset = key_length - query_length if query_offset is None else query_offset
    places = consecutive(query_length, offset, device)
    placed = query_positions is not None or key_positions is not None
    if query_offsets is not None:
        places = query_offsets.long().unsqueeze(-1) + consecutive(query_length, 0, device)
        query_positions = places
    if positions_from_mask and attention_mask is not None and not placed and key_length > 0:
        visible = (attention_mask != 0).long()
        key_positions = (visible.cumsum(-1) - 1) * visible
        # A query has the position of its key; one that is not among the keys keeps its place.
        leading = places.shape[:-1], key_positions.shape[:-1]
        batch = torch.broadcast_shapes(*leading)  # type: ignore[no-untyped-call]
        near = places.clamp(0, key_length - 1).expand(*batch, -1)
        numbers = key_positions.expand(*batch, -1).gather(-1, near)
        query_positions = torch.where(near.eq(places), numbers, places)
    queries = places if query_positions is None else query_positions.long()
    keys = consecutive(key_length, 0, device) if key_positions is None else key_positions.long()
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if cu_seqlens is not None:
        documents = [
            (rows.unsqueeze(-1) >= cu_seqlens[1:]).sum(-1)
            for rows in (places, consecutive(key_length, 0, device))
        ]
        hidden = hidden | (documents[0].unsqueeze(-1) != documents[1])
        hidden = hidden | ((places < 0) | (places >= key_length)).unsqueeze(-1)
    if attention_mask is not None:
        hidden = hidden | (attention_mask == 0).unsqueeze(-2)
    if distance.dim() == 3:
        distance = distance.unsqueeze(1)
    return distance, hidden.unsqueeze(1) if hidden.dim() == 3 else hidden


def alibi_line(slopes: Tensor, query_length: Any, key_length: Any, *options: Any) -> Tensor:
    """The bias [(batch,) heads, query, key], in the dtype that slopes are computed in."""
    *places, apply_mask, query_offsets = options
    places.append(query_offsets)
    distance, hidden = distances(query_length, key_length, slopes.device, *places)
    dtype = wide(slopes.dtype)
    distance, slopes = distance.to(dtype), slopes.to(dtype)
    left, right = (
        (slopes, slopes) if slopes.dim() == 1 else (slopes.select(-2, 0), slopes.select(-2, -1))
    )
    slope = torch.where(distance >= 0, -left[..., None, None], right[..., None, None])
    return torch.where(hidden, -math.inf if apply_mask else 0.0, slope * distance)


def alibi_scaled_slopes(slopes: Tensor, key_length: Any, train_length: int) -> Tensor:
    length = torch.full((), key_length, dtype=torch.int64, device=slopes.device)
    return slopes / (length.to(slopes.dtype) / train_length).clamp_min(1)


def alibi_bias(
    slopes: Tensor, query_length: Any, key_length: Any, dtype: torch.dtype | None, *options: Any
) -> Tensor:
    line = alibi_line(slopes, query_length, key_length, *options)
    return line.to(slopes.dtype if dtype is None else dtype)


def biased(scores: Tensor, slopes: Tensor, scale: float, options: tuple[Any, ...]) -> Tensor:
    dtype = wide(scores.dtype)
    line = alibi_line(slopes.to(dtype), *scores.shape[-2:], *options)
    return torch.where(line == -math.inf, line, scores.to(dtype) * scale + line)


def alibi_add(scores: Tensor, slopes: Tensor, scale: float, *options: Any) -> Tensor:
    return biased(scores, slopes, scale, options).to(scores.dtype)


def alibi_softmax(scores: Tensor, slopes: Tensor, scale: float, *options: Any) -> Tensor:
    values = biased(scores, slopes, scale, options)
    sees = (values != -math.inf).any(-1, keepdim=True)  # if all keys are masked, weights are 0
    weights = torch.where(sees, values, 0.0).softmax(-1)
    return torch.where(sees, weights, 0.0).to(scores.dtype)


def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    scale: float | None,
    dropout: float,
    *options: Any,
) -> Tensor:
    # query: [batch, heads, queries, head_dim]; keys of fewer heads serve groups of queries
    groups = key.shape[1]
    grouped = query.reshape(query.shape[0], groups, -1, query.shape[3])
    scores = (grouped @ key.transpose(-2, -1)).reshape(*query.shape[:3], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.dropout(alibi_softmax(scores, slopes, scale, *options), dropout, dropout > 0)
    weighted = weights.reshape(query.shape[0], groups, -1, key.shape[2]) @ value
    return weighted.reshape(*query.shape[:3], value.shape[-1])
