"""Rules for any operator: copy by copy, in place, and for no copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def loop_rule(
    operator: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> tuple[Any, Any]:
    """Calls any operator once per copy, for mappings too rare for a specific rule."""
    results = []
    for i in range(info.batch_size):
        single = [
            arg.select(dim, i) if isinstance(dim, int) else arg  # lists have lists of dimensions
            for arg, dim in itertools.zip_longest(args, in_dims)
        ]
        results.append(operator(*single, **options))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def in_place_rule(
    operator: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> tuple[None, None]:
    """Calls an in-place operator copy by copy, because merged dimensions would not be a view."""
    for argument, arg, dim in zip(operator._schema.arguments, args, in_dims, strict=False):
        alias = argument.alias_info
        if alias is not None and alias.is_write and arg is not None and dim is None:
            raise ValueError(
                f"{argument.name}: expected a mapped tensor, because each copy writes to it"
            )
    for copy in range(info.batch_size):
        single = [
            arg if dim is None else arg.select(dim, copy)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        operator(*single, **options)
    return None, None


def no_copies(operator: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> Any:
    """The results for a mapped dimension of size 0, with shapes from Meta kernels."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    single = [
        torch.empty(
            [size for i, size in enumerate(arg.shape) if i != dim], dtype=arg.dtype, device="meta"
        )
        if isinstance(arg, Tensor)
        else arg
        for arg, dim in itertools.zip_longest(args, in_dims)
    ]
    results = operator(*single, **options)
    # Adding these to empty results gives every argument a zero gradient instead of None.
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]

    def none_of(result: Tensor) -> Tensor:
        empty = torch.empty((0, *result.shape), dtype=result.dtype, device=tensors[0].device)
        return sum((total.to(empty.dtype) for total in sums), empty)

    if isinstance(results, Tensor):
        return none_of(results), 0
    return tuple(none_of(result) for result in results), (0,) * len(results)


def some_or_no_copies(
    operator: Any,
    rule: Callable[..., Any],
    info: Any,
    in_dims: tuple[int | None, ...],
    *args: Any,
    **options: Any,
) -> Any:
    """Applies a rule, or no_copies if there are no copies."""
    if info.batch_size == 0:
        return no_copies(operator, in_dims, *args, **options)
    return rule(info, in_dims, *args, **options)
