"""Token tables: beside merged ids or columns, mapped tables with mapped ids are joined by rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.glue.vmap.copies import loop_rule
from posembed.glue.vmap.merging import front, merged_rule


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
    *options: Any,
) -> tuple[Tensor, int]:
    """embedding: mapped ids become more ids; mapped tables are joined by columns or rows."""
    operator = torch.ops.posembed.embedding.default
    weight_dim, ids_dim = in_dims[:2]
    given = (padding_idx, scale, scale_grad_by_freq, *options)
    if weight_dim is None and scale_grad_by_freq:  # counts are per copy
        weight, weight_dim = weight.expand(info.batch_size, *weight.shape), 0
    in_dims = (weight_dim, ids_dim)
    if weight_dim is None or ids_dim is None:
        return merged_rule("embedding", operator, info, in_dims, weight, ids, *given)  # type: ignore[no-any-return]
    if options and options[0] >= 0:  # ids outside one shard of a vocabulary would be in the next
        return loop_rule(operator, info, in_dims, weight, ids, *given)
    tables = weight.movedim(weight_dim, 0)
    operator(tables[0, :, :1].detach(), ids)  # raises for bad ids, with their values
    places = copies_of(ids, ids_dim, tables.shape[1], info.batch_size)
    result = operator(tables.flatten(0, 1), places, -1, *given[1:])
    if padding_idx >= 0:  # each table now has its own padding row, so stop their gradients here
        padding = ids.movedim(ids_dim, 0) == padding_idx
        result = torch.where(padding.unsqueeze(-1), result.detach(), result)
    return result, 0


def embedding_backward_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    gradient: Tensor,
    num_embeddings: int,
    ids: Tensor,
    padding_idx: int = -1,
    *options: Any,
) -> tuple[Tensor, int]:
    """embedding_backward: mapped gradients become columns; mapped ids index more tables."""
    operator = torch.ops.posembed.embedding_backward.default
    gradient_dim, _, ids_dim = in_dims[:3]
    given = (gradient, num_embeddings, ids, padding_idx, *options)
    if ids_dim is None:
        return merged_rule("embedding_backward", operator, info, in_dims, *given)  # type: ignore[no-any-return]
    if len(options) > 2 and options[2] >= 0:  # ids of other shards would be in the next table
        return loop_rule(operator, info, in_dims, *given)
    places = copies_of(ids, ids_dim, num_embeddings, info.batch_size)
    rows = front(gradient, gradient_dim, info.batch_size)
    if padding_idx >= 0:
        padding = ids.movedim(ids_dim, 0) == padding_idx
        rows = rows.masked_fill(padding.unsqueeze(-1), 0)
    tables = operator(rows, info.batch_size * num_embeddings, places, -1, *options)
    return tables.unflatten(0, (info.batch_size, -1)), 0
