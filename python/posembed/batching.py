"""torch.func.vmap rules: how each operator takes one more dimension.

A rule merges the mapped dimension with one that the operator has, so that vmap is one call.
"""

from __future__ import annotations

import functools
import itertools
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


def unfold(tensor: Tensor, into: int, size: int, rest: int) -> tuple[Tensor, int]:
    """The inverse of :func:`fold`, and where the mapped dimension is then.

    ``rest`` is what :func:`size_of` says of the folded tensor, which no size tells if one is 0.
    """
    return torch.unflatten(tensor, into, (size, rest)), into


def size_of(tensor: Tensor, mapped: int | None, dim: int) -> int:
    """The size of ``dim``, counted without the mapped dimension."""
    return tensor.shape[dim + (mapped is not None and mapped <= dim)]


def rotary_positions(
    positions: Tensor, mapped: int, query: Tensor, query_mapped: int | None, layout: str
) -> Tensor:
    """Mapped positions as [size * batch, seq]: each row of the batch folded with its copy.

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


def rotary_rule(
    count: int, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Rotary and rotary_pair: into heads, or into batch where every copy has its own positions."""
    operator = torch.ops.posembed.rotary if count == 1 else torch.ops.posembed.rotary_pair
    tensors, tensor_dims = list(args[:count]), list(in_dims[:count])
    positions, *shared = itertools.islice(itertools.chain(args[count:], (None,) * 3), 3)
    positions_dim, *shared_dims = itertools.islice(itertools.chain(in_dims[count:], (None,) * 3), 3)
    if any(dim is not None for dim in shared_dims):  # frequencies or documents of each copy
        return loop_rule(operator, info, in_dims, *args, **options)
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
    mapped = list(zip(tensors, tensor_dims, strict=True))
    folded = [fold(tensor, dim, into, size) for tensor, dim in mapped]
    single = count == 1
    results = operator(*folded, positions, *shared, **options)
    unfolded = [
        unfold(result, into, size, size_of(*given, into))[0]
        for result, given in zip([results] if single else results, mapped, strict=True)
    ]
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


def copies_of(ids: Tensor, mapped: int | None, rows: int, size: int) -> Tensor:
    """Ids [size, ...] into a table of ``size`` tables of ``rows`` rows, one below the other.

    An id outside its own table becomes -1, or it would be one of the next.
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
    *,
    padding_idx: int = -1,
    **options: Any,
) -> tuple[Tensor, int]:
    """embedding: mapped ids are more ids; mapped tables stand side by side, or in a column."""
    operator = torch.ops.posembed.embedding
    weight_dim, ids_dim = in_dims
    if weight_dim is None and not options.get("scale_grad_by_freq", False):
        return operator(weight, ids.movedim(ids_dim or 0, 0), padding_idx=padding_idx, **options), 0
    if weight_dim is None:  # counted in each copy by itself
        weight, weight_dim = weight.expand(info.batch_size, *weight.shape), 0
    if ids_dim is None:
        columns = weight.movedim(weight_dim, 1).flatten(1)
        result = operator(columns, ids, padding_idx=padding_idx, **options)
        return result.unflatten(-1, (info.batch_size, -1)), ids.dim()
    if options.get("vocabulary_start", -1) >= 0:  # ids outside one table would be inside the next
        options["padding_idx"] = padding_idx
        result, _ = loop_rule(operator, info, (weight_dim, ids_dim), weight, ids, **options)
        return result, 0
    tables = weight.movedim(weight_dim, 0)
    operator(tables[0, :, :1].detach(), ids)  # refuses bad ids, with their values
    places = copies_of(ids, ids_dim, tables.shape[1], info.batch_size)
    result = operator(tables.flatten(0, 1), places, **options)
    if padding_idx >= 0:  # each table has its own padding row now: cut their gradients off here
        padding = (ids if ids_dim is None else ids.movedim(ids_dim, 0)) == padding_idx
        result = torch.where(padding.unsqueeze(-1), result.detach(), result)
    return result, 0


def embedding_backward_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    gradient: Tensor,
    ids: Tensor,
    *,
    num_embeddings: int,
    padding_idx: int = -1,
    **options: Any,
) -> tuple[Tensor, int]:
    """embedding_backward: mapped gradients are more columns; mapped ids are ids of more tables."""
    operator = torch.ops.posembed.embedding_backward
    gradient_dim, ids_dim = in_dims
    size = info.batch_size
    if ids_dim is None and gradient_dim is not None:
        columns = gradient.movedim(gradient_dim, -2).flatten(-2)
        result = operator(
            columns, ids, num_embeddings=num_embeddings, padding_idx=padding_idx, **options
        )
        return result.unflatten(-1, (size, -1)), 1
    if options.get("vocabulary_start", -1) >= 0:  # ids outside one table would be inside the next
        options |= {"num_embeddings": num_embeddings, "padding_idx": padding_idx}
        result, _ = loop_rule(operator, info, in_dims, gradient, ids, **options)
        return result, 0
    places = copies_of(ids, ids_dim, num_embeddings, size)
    rows = front(gradient, gradient_dim, size)
    if padding_idx >= 0:
        padding = ids.movedim(ids_dim or 0, 0) == padding_idx
        rows = rows.masked_fill(padding.unsqueeze(-1), 0)
    result = operator(rows, places, num_embeddings=size * num_embeddings, **options)
    return result.unflatten(0, (size, -1)), 0


def learned_add_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    **options: Any,
) -> Any:
    """learned_add: mapped x is a larger batch; mapped tables or positions are looked up apart."""
    x_dim, weight_dim, *positions_dim = in_dims
    if x_dim is None or weight_dim is not None or any(dim is not None for dim in positions_dim):
        return loop_rule(
            torch.ops.posembed.learned_add, info, in_dims, x, weight, positions, **options
        )
    size = info.batch_size
    if positions is not None and positions.dim() == 2:
        positions = positions.repeat(size, 1) if positions.shape[0] > 1 else positions
    result = torch.ops.posembed.learned_add(fold(x, x_dim, 0, size), weight, positions, **options)
    return unfold(result, 0, size, size_of(x, x_dim, 0))


def no_copies(operator: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any) -> Any:
    """The results of a mapped dimension of size 0: a copy's shapes, which Meta kernels know."""
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
    # Nothing is added to no element, but gradients of every argument are zeros and not missing.
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
    """A rule where there is something to merge or to call for."""
    if info.batch_size == 0:
        return no_copies(operator, in_dims, *args, **options)
    return rule(info, in_dims, *args, **options)


def loop_rule(
    operator: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Any operator: one call for each copy. For mappings too rare for a rule of their own."""
    results = []
    for i in range(info.batch_size):
        single = [
            arg if dim is None else arg.select(dim, i)
            for arg, dim in itertools.zip_longest(args, in_dims)
        ]
        results.append(operator(*single, **options))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def sinusoidal_add_rule(
    info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Into the batch, or instead of it where x is [seq, embedding_dim]."""
    size = info.batch_size
    x = front(args[0], in_dims[0], size)
    shape = x.shape
    positions = args[1] if len(args) > 1 else None
    scale = args[2] if len(args) > 2 else None
    if scale is not None and in_dims[2] is not None:
        return loop_rule(torch.ops.posembed.sinusoidal_add, info, in_dims, *args, **options)
    if positions is not None:
        positions = front(positions, in_dims[1], size)
        if positions.dim() < x.dim() - 1:  # [size, seq] beside [size, batch, seq, embedding_dim]
            positions = positions.unsqueeze(1)
        positions = positions.expand(shape[:-1]).reshape(-1, shape[-2])
    rows = x.reshape(-1, *shape[-2:])
    result = torch.ops.posembed.sinusoidal_add(rows, positions, scale, **options)
    return result.reshape(shape), 0


def sinusoidal_encode_rule(
    info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Positions may have any shape."""
    if len(args) > 1 and in_dims[1] is not None:
        return loop_rule(torch.ops.posembed.sinusoidal_encode, info, in_dims, *args, **options)
    return torch.ops.posembed.sinusoidal_encode(*args, **options), in_dims[0]


def has_mapped_places(in_dims: tuple[int | None, ...], first: int) -> bool:
    """Whether positions, documents or a mask, which heads share, differ from copy to copy."""
    return any(dim is not None for dim in in_dims[first:])


def alibi_bias_rule(
    info: Any, in_dims: tuple[int | None, ...], slopes: Tensor, *args: Any, **options: Any
) -> Any:
    """Into heads: those of each copy side by side."""
    operator = torch.ops.posembed.alibi_bias
    if has_mapped_places(in_dims, 1):
        return loop_rule(operator, info, in_dims, slopes, *args, **options)
    sides = slopes.dim() - 2  # where heads are: [heads] or [2, heads]
    bias = operator(fold(slopes, in_dims[0], sides, info.batch_size), *args, **options)
    heads = size_of(slopes, in_dims[0], sides)
    return unfold(bias, bias.dim() - 3, info.batch_size, heads)


def alibi_bias_backward_rule(
    info: Any, in_dims: tuple[int | None, ...], grad: Tensor, *args: Any, **options: Any
) -> Any:
    """Into heads: those of each copy side by side."""
    operator = torch.ops.posembed.alibi_bias_backward
    if has_mapped_places(in_dims, 1):
        return loop_rule(operator, info, in_dims, grad, *args, **options)
    folded = fold(grad, in_dims[0], grad.dim() - 4, info.batch_size)
    result = operator(folded, *args, **options)
    heads = size_of(grad, in_dims[0], grad.dim() - 4)
    return unfold(result, result.dim() - 1, info.batch_size, heads)


def alibi_scores_rule(
    name: str,
    info: Any,
    in_dims: tuple[int | None, ...],
    scores: Tensor,
    slopes: Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """alibi_add and alibi_softmax: into heads, those of each copy side by side."""
    operator = getattr(torch.ops.posembed, name)
    if has_mapped_places(in_dims, 2):
        return loop_rule(operator, info, in_dims, scores, slopes, *args, **options)
    size = info.batch_size
    heads = scores.dim() - (3 if in_dims[0] is None else 4)
    sides = slopes.dim() - (1 if in_dims[1] is None else 2)
    folded = (fold(scores, in_dims[0], heads, size), fold(slopes, in_dims[1], sides, size))
    result = operator(*folded, *args, **options)
    return unfold(result, heads, size, size_of(scores, in_dims[0], heads))


def alibi_softmax_backward_rule(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    weights: Tensor,
    *args: Any,
    sides: int = 1,
    **options: Any,
) -> Any:
    """Into heads: those of each copy side by side."""
    operator = torch.ops.posembed.alibi_softmax_backward
    if has_mapped_places(in_dims, 2):
        return loop_rule(operator, info, in_dims, grad, weights, *args, sides=sides, **options)
    size = info.batch_size
    heads = [
        tensor.dim() - (3 if dim is None else 4)
        for tensor, dim in zip((grad, weights), in_dims, strict=False)
    ]
    folded = (fold(grad, in_dims[0], heads[0], size), fold(weights, in_dims[1], heads[1], size))
    of_scores, of_slopes = operator(*folded, *args, sides=sides, **options)
    rest = size_of(grad, in_dims[0], heads[0])
    of_scores, _ = unfold(of_scores, heads[0], size, rest)
    if sides == 0:
        return (of_scores, of_slopes), (heads[0], None)
    of_slopes, dim = unfold(of_slopes, sides - 1, size, rest)
    return (of_scores, of_slopes), (heads[0], dim)


def register() -> None:
    """Tells torch.func about every rule."""
    rules: dict[str, Callable[..., Any]] = {
        "embedding": embedding_rule,
        "embedding_backward": embedding_backward_rule,
        "learned_add": learned_add_rule,
        "sinusoidal_add": sinusoidal_add_rule,
        "sinusoidal_encode": sinusoidal_encode_rule,
        "rotary": functools.partial(rotary_rule, 1),
        "rotary_pair": functools.partial(rotary_rule, 2),
        "alibi_bias": alibi_bias_rule,
        "alibi_bias_backward": alibi_bias_backward_rule,
        "alibi_add": functools.partial(alibi_scores_rule, "alibi_add"),
        "alibi_softmax": functools.partial(alibi_scores_rule, "alibi_softmax"),
        "alibi_softmax_backward": alibi_softmax_backward_rule,
    }
    in_place = (
        "alibi_add_",
        "alibi_bias_out",
        "alibi_softmax_",
        "rotary_",
        "rotary_pair_",
        "rotary_out",
        "rotary_pair_out",
        "norm_rotary_",
    )
    for name in (
        "alibi_lse_correction",
        "learned_extend",
        "rotary_permute_weight",
        "rotary_tangent",
        "rotary_frequencies_backward",
        "learned_encode",
        "learned_backward",
        "norm_rotary",
        "norm_rotary_forward",
        "norm_rotary_backward",
        "input_embedding",
        "input_embedding_forward",
        "input_embedding_backward",
        "input_dropout",
        "token_bag",
        "token_bag_max",
        "token_bag_backward",
        "token_bag_weights_backward",
    ):
        rules[name] = functools.partial(loop_rule, getattr(torch.ops.posembed, name))
    for name, rule in rules.items():
        rule = functools.partial(some_or_no_copies, getattr(torch.ops.posembed, name), rule)
        torch.library.register_vmap(f"posembed::{name}", rule)
    for name in in_place:
        rule = functools.partial(in_place_rule, name)
        torch.library.register_vmap(f"posembed::{name}", rule)
