"""ALiBi: mapped copies become additional heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.batching.copies import loop_rule
from posembed.batching.dimensions import fold, size_of, unfold


def has_mapped_positions(in_dims: tuple[int | None, ...], first: int) -> bool:
    """Whether positions, documents or a mask, which all heads share, differ between copies."""
    return any(dim is not None for dim in in_dims[first:])


def alibi_bias_rule(
    info: Any, in_dims: tuple[int | None, ...], slopes: Tensor, *args: Any, **options: Any
) -> Any:
    """Merges copies into heads: the heads of each copy are adjacent."""
    operator = torch.ops.posembed.alibi_bias.default
    if has_mapped_positions(in_dims, 1):
        return loop_rule(operator, info, in_dims, slopes, *args, **options)
    sides = slopes.dim() - 2  # the dimension of heads: [heads] or [2, heads]
    bias = operator(fold(slopes, in_dims[0], sides, info.batch_size), *args, **options)
    heads = size_of(slopes, in_dims[0], sides)
    return unfold(bias, bias.dim() - 3, info.batch_size, heads)


def alibi_bias_backward_rule(
    info: Any, in_dims: tuple[int | None, ...], grad: Tensor, *args: Any, **options: Any
) -> Any:
    """Merges copies into heads: the heads of each copy are adjacent."""
    operator = torch.ops.posembed.alibi_bias_backward.default
    if has_mapped_positions(in_dims, 1):
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
    """alibi_add and alibi_softmax: merges copies into heads, those of each copy adjacent."""
    operator = getattr(torch.ops.posembed, name).default
    if has_mapped_positions(in_dims, 2):
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
    scale: float = 1.0,
    sides: int = 1,
    *args: Any,
    **options: Any,
) -> Any:
    """Merges copies into heads: the heads of each copy are adjacent."""
    operator = torch.ops.posembed.alibi_softmax_backward.default
    if has_mapped_positions(in_dims, 2):
        return loop_rule(operator, info, in_dims, grad, weights, scale, sides, *args, **options)
    size = info.batch_size
    heads = [
        tensor.dim() - (3 if dim is None else 4)
        for tensor, dim in zip((grad, weights), in_dims, strict=False)
    ]
    folded = (fold(grad, in_dims[0], heads[0], size), fold(weights, in_dims[1], heads[1], size))
    of_scores, of_slopes = operator(*folded, scale, sides, *args, **options)
    rest = size_of(grad, in_dims[0], heads[0])
    of_scores, _ = unfold(of_scores, heads[0], size, rest)
    if sides == 0:
        return (of_scores, of_slopes), (heads[0], None)
    of_slopes, dim = unfold(of_slopes, sides - 1, size, rest)
    return (of_scores, of_slopes), (heads[0], dim)
