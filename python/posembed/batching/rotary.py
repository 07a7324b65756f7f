"""Rotary: copies become additional heads, or a larger batch if each has its own positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.batching.copies import loop_rule
from posembed.batching.dimensions import fold, size_of, unfold

# The batch (None: absent) and head dimensions in each layout.
DIMENSIONS = {"bshd": (0, 2), "bhsd": (0, 1), "sbhd": (1, 2), "thd": (None, 1)}
# Defaults of spec (none), positions, layout, offset, inverse, cu_seqlens, frequencies, transpose.
DEFAULTS: tuple[Any, ...] = (None, None, "bshd", 0, False, None, None, False)


def rotary_positions(
    positions: Tensor, mapped: int, query: Tensor, query_mapped: int | None, layout: str
) -> Tensor:
    """Mapped positions as [size * batch, seq]: merges each row of the batch with its copy.

    An axis of sections stays in front: [axes, size * batch, seq].
    """
    positions = positions.movedim(mapped, 0)
    if positions.dim() == (3 if DIMENSIONS[layout][0] is None else 4):
        rows = [
            rotary_positions(axis, 0, query, query_mapped, layout) for axis in positions.unbind(1)
        ]
        return torch.stack(rows)
    if positions.dim() == 2:  # [size, seq]
        positions = positions.unsqueeze(1)
    batch_dim, _ = DIMENSIONS[layout]
    batch = 1
    if batch_dim is not None:
        example = query if query_mapped is None else query.select(query_mapped, 0)
        batch = example.shape[batch_dim]
    return positions.expand(-1, batch, -1).flatten(0, 1)


def rotary_rule(count: int, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    """Rotary and rotary_pair: merges copies into heads, or into batch if positions differ."""
    operator = torch.ops.posembed.rotary if count == 1 else torch.ops.posembed.rotary_pair
    tensors, tensor_dims = list(args[:count]), list(in_dims[:count])
    spec, positions, layout, *options = (*args[count:], *DEFAULTS[len(args) - count :])
    positions_dim = in_dims[count + 1] if len(in_dims) > count + 1 else None
    if any(dim is not None for dim in in_dims[count + 2 :]):  # frequencies or documents per copy
        return loop_rule(operator, info, in_dims, *args)
    size, own_layout = info.batch_size, layout
    batch_dim, into = DIMENSIONS[layout]
    if positions is not None and positions_dim is not None:
        positions = rotary_positions(positions, positions_dim, tensors[0], tensor_dims[0], layout)
        if batch_dim is None:  # [tokens, heads, head_dim] has no batch: add one
            tensors = [
                tensor.unsqueeze(0 if dim is None else int(dim == 0))
                for tensor, dim in zip(tensors, tensor_dims, strict=True)
            ]
            tensor_dims = [dim if not dim else dim + 1 for dim in tensor_dims]
            layout = "bshd"
        into = batch_dim or 0
    mapped = list(zip(tensors, tensor_dims, strict=True))
    folded = [fold(tensor, dim, into, size) for tensor, dim in mapped]
    single = count == 1
    results = operator(*folded, spec, positions, layout, *options)
    unfolded = [
        unfold(result, into, size, size_of(*given, into))[0]
        for result, given in zip([results] if single else results, mapped, strict=True)
    ]
    if layout != own_layout:
        unfolded, into = [result.squeeze(1) for result in unfolded], 0
    return (unfolded[0], into) if single else (tuple(unfolded), (into, into))
