"""torch.func.vmap rules: how each operator takes one more dimension.

A rule moves the mapped dimension into one that the operator has anyway: vmap costs one call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# Where a layout keeps batch (None: nowhere) and heads.
DIMENSIONS = {"bshd": (0, 2), "bhsd": (0, 1), "sbhd": (1, 2), "thd": (None, 1)}


def fold(tensor: Tensor, mapped: int | None, into: int, size: int) -> Tensor:
    """Joins dimension ``mapped`` with ``into`` of the rest; None: repeats ``size`` times."""
    if mapped is None:
        tensor, mapped = tensor.unsqueeze(0).expand(size, *tensor.shape), 0
    return tensor.movedim(mapped, into).flatten(into, into + 1)


def unfold(tensor: Tensor, into: int, size: int) -> tuple[Tensor, int]:
    """The inverse of :func:`fold`, and where the mapped dimension is then."""
    shape = (*tensor.shape[:into], size, -1, *tensor.shape[into + 1 :])
    return tensor.reshape(shape), into


def rotary_positions(
    positions: Tensor, mapped: int, query: Tensor, query_mapped: int | None, layout: str
) -> Tensor:
    """Mapped positions as [size * batch, seq]: each row of the batch folded with its copy."""
    positions = positions.movedim(mapped, 0)
    if positions.dim() == 2:  # [size, seq]
        positions = positions.unsqueeze(1)
    batch_dim, _ = DIMENSIONS[layout]
    batch = 1
    if batch_dim is not None:
        example = query if query_mapped is None else query.select(query_mapped, 0)
        batch = example.shape[batch_dim]
    return positions.expand(-1, batch, -1).flatten(0, 1)


def rotary_rule(
    count: int, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Rotary and rotary_pair: into heads, or into batch where every copy has its own positions."""
    tensors, tensor_dims = list(args[:count]), list(in_dims[:count])
    positions = args[count] if len(args) > count else None
    positions_dim = in_dims[count] if len(args) > count else None
    layout, size = options.get("layout", "bshd"), info.batch_size
    batch_dim, into = DIMENSIONS[layout]
    if positions is not None and positions_dim is not None:
        positions = rotary_positions(positions, positions_dim, tensors[0], tensor_dims[0], layout)
        if batch_dim is None:  # [tokens, heads, head_dim] has no batch: make one
            tensors = [
                tensor.unsqueeze(0 if dim is None else int(dim == 0))
                for tensor, dim in zip(tensors, tensor_dims, strict=True)
            ]
            tensor_dims = [dim if not dim else dim + 1 for dim in tensor_dims]
            options["layout"] = "bshd"
        into = batch_dim or 0
    folded = [
        fold(tensor, dim, into, size) for tensor, dim in zip(tensors, tensor_dims, strict=True)
    ]
    single = count == 1
    operator = torch.ops.posembed.rotary if single else torch.ops.posembed.rotary_pair
    results = operator(*folded, positions, **options)
    unfolded = [unfold(result, into, size)[0] for result in ([results] if single else results)]
    if options.get("layout", "bshd") != layout:
        unfolded, into = [result.squeeze(1) for result in unfolded], 0
    return (unfolded[0], into) if single else (tuple(unfolded), (into, into))


def in_place_rule(
    operator: str, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> tuple[None, None]:
    """Operators that mutate: copy by copy, because joining dimensions would not be a view."""
    for copy in range(info.batch_size):
        single = [
            arg if dim is None else arg.select(dim, copy)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        getattr(torch.ops.posembed, operator)(*single, **options)
    return None, None


def register() -> None:
    """Tells torch.func about every rule."""
    for name in ("rotary_", "rotary_pair_"):
        rule = functools.partial(in_place_rule, name)
        torch.library.register_vmap(f"posembed::{name}", rule)
    for count, name in ((1, "rotary"), (2, "rotary_pair")):
        torch.library.register_vmap(f"posembed::{name}", functools.partial(rotary_rule, count))
