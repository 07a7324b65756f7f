"""Token tables: mapped ids become more ids; mapped tables are joined by columns or rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.batching.copies import loop_rule
from posembed.batching.dimensions import front


def copies_of(ids: Tensor, mapped: int | None, rows: int, size: int) -> Tensor:
    """Ids [size, ...] for ``size`` tables of ``rows`` rows, concatenated by rows.

    An id outside its table becomes -1; otherwise it would select a row of another table.
    """
    ids = front(ids, mapped, size)
    starts = torch.arange(size, device=ids.device) * rows
    places = ids + starts.view(-1, *[1] * (ids.dim() - 1))
    return torch.where((ids < 0) | (ids >= rows), -1, places)


def embedding_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    weight: Tensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    vocabulary_start: int = -1,
    gradient: str = "dense",
) -> tuple[Tensor, int]:
    """embedding: mapped ids become more ids; mapped tables are joined by columns or rows."""
    operator = torch.ops.posembed.embedding
    options = (padding_idx, scale, scale_grad_by_freq, vocabulary_start, gradient)
    weight_dim, ids_dim = in_dims[:2]
    if weight_dim is None and not scale_grad_by_freq:
        return operator(weight, ids.movedim(ids_dim or 0, 0), *options), 0
    if weight_dim is None:  # counts are per copy
        weight, weight_dim = weight.expand(info.batch_size, *weight.shape), 0
    if ids_dim is None:
        columns = weight.movedim(weight_dim, 1).flatten(1)
        result = operator(columns, ids, *options)
        return result.unflatten(-1, (info.batch_size, -1)), ids.dim()
    if vocabulary_start >= 0:  # ids outside one table would fall into the next
        result, _ = loop_rule(operator, info, (weight_dim, ids_dim), weight, ids, *options)
        return result, 0
    tables = weight.movedim(weight_dim, 0)
    operator(tables[0, :, :1].detach(), ids)  # raises for bad ids, with their values
    places = copies_of(ids, ids_dim, tables.shape[1], info.batch_size)
    result = operator(tables.flatten(0, 1), places, -1, *options[1:])
    if padding_idx >= 0:  # each table now has its own padding row, so stop their gradients here
        padding = (ids if ids_dim is None else ids.movedim(ids_dim, 0)) == padding_idx
        result = torch.where(padding.unsqueeze(-1), result.detach(), result)
    return result, 0


def embedding_backward_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    gradient: Tensor,
    num_embeddings: int,
    ids: Tensor,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    vocabulary_start: int = -1,
) -> tuple[Tensor, int]:
    """embedding_backward: mapped gradients become columns; mapped ids index more tables."""
    operator = torch.ops.posembed.embedding_backward
    options = (scale, scale_grad_by_freq, vocabulary_start)
    gradient_dim, _, ids_dim = in_dims[:3]
    size = info.batch_size
    if ids_dim is None and gradient_dim is not None:
        columns = gradient.movedim(gradient_dim, -2).flatten(-2)
        result = operator(columns, num_embeddings, ids, padding_idx, *options)
        return result.unflatten(-1, (size, -1)), 1
    if vocabulary_start >= 0:  # ids outside one table would fall into the next
        given = (gradient, num_embeddings, ids, padding_idx, *options)
        result, _ = loop_rule(operator, info, in_dims, *given)
        return result, 0
    places = copies_of(ids, ids_dim, num_embeddings, size)
    rows = front(gradient, gradient_dim, size)
    if padding_idx >= 0:
        padding = ids.movedim(ids_dim or 0, 0) == padding_idx
        rows = rows.masked_fill(padding.unsqueeze(-1), 0)
    result = operator(rows, size * num_embeddings, places, -1, *options)
    return result.unflatten(0, (size, -1)), 0
