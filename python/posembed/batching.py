"""torch.func.vmap rules: how each operator takes one more dimension.

A rule moves the mapped dimension into one that the operator has anyway: vmap costs one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def front(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """The mapped dimension in front; None: ``size`` views of one tensor."""
    if mapped is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(mapped, 0)


def sinusoidal_add_rule(
    info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Into the batch, or instead of it where x is [seq, embedding_dim]."""
    size = info.batch_size
    x = front(args[0], in_dims[0], size)
    shape = x.shape
    positions = args[1] if len(args) > 1 else None
    if positions is not None:
        positions = front(positions, in_dims[1], size)
        if positions.dim() < x.dim() - 1:  # [size, seq] beside [size, batch, seq, embedding_dim]
            positions = positions.unsqueeze(1)
        positions = positions.expand(shape[:-1]).reshape(-1, shape[-2])
    result = torch.ops.posembed.sinusoidal_add(x.reshape(-1, *shape[-2:]), positions, **options)
    return result.reshape(shape), 0


def sinusoidal_encode_rule(
    info: Any, in_dims: tuple[int | None, ...], positions: Tensor, **options: Any
) -> Any:
    """Positions may have any shape."""
    return torch.ops.posembed.sinusoidal_encode(positions, **options), in_dims[0]


def alibi_bias_rule(
    info: Any, in_dims: tuple[int | None, ...], slopes: Tensor, *args: Any, **options: Any
) -> Any:
    """Into heads: those of each copy side by side."""
    sides = slopes.dim() - 2  # where heads are: [heads] or [2, heads]
    folded = fold(slopes, in_dims[0], sides, info.batch_size)
    bias = torch.ops.posembed.alibi_bias(folded, *args, **options)
    return unfold(bias, 0, info.batch_size)


def alibi_bias_backward_rule(
    info: Any, in_dims: tuple[int | None, ...], grad: Tensor, **options: Any
) -> Any:
    """Into heads: those of each copy side by side."""
    folded = fold(grad, in_dims[0], grad.dim() - 4, info.batch_size)
    result = torch.ops.posembed.alibi_bias_backward(folded, **options)
    return unfold(result, result.dim() - 1, info.batch_size)


def alibi_add_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    scores: Tensor,
    slopes: Tensor,
    **options: Any,
) -> Any:
    """Into heads: those of each copy side by side."""
    size = info.batch_size
    heads = scores.dim() - (3 if in_dims[0] is None else 4)
    sides = slopes.dim() - (1 if in_dims[1] is None else 2)
    folded = (fold(scores, in_dims[0], heads, size), fold(slopes, in_dims[1], sides, size))
    return unfold(torch.ops.posembed.alibi_add(*folded, **options), heads, size)


def register() -> None:
    """Tells torch.func about every rule."""
    rules: dict[str, Callable[..., Any]] = {
        "rotary": functools.partial(rotary_rule, 1),
        "rotary_pair": functools.partial(rotary_rule, 2),
        "sinusoidal_add": sinusoidal_add_rule,
        "sinusoidal_encode": sinusoidal_encode_rule,
        "alibi_bias": alibi_bias_rule,
        "alibi_bias_backward": alibi_bias_backward_rule,
        "alibi_add": alibi_add_rule,
    }
    for name in ("alibi_add_", "rotary_", "rotary_pair_"):
        rules[name] = functools.partial(in_place_rule, name)
    for name, rule in rules.items():
        torch.library.register_vmap(f"posembed::{name}", rule)
