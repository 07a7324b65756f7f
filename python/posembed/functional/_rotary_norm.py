"""RMSNorm of each head and rotation, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._options import Layout, is_sharded, rotary_text, sharded
from posembed.specification import RotarySpec


def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of query and key, then rotary, in one launch.

    QK-norm: Henry et al., arXiv:2010.04245; with RMSNorm in Qwen 3, Gemma 3 and others. Computes in
    float32 (float64 data: float64) and rounds once. Gradients flow to all four tensors; those of
    the weights are accumulated in float32 and repeatable. Only the norms' divisors are saved.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: The same with any number of heads.
        query_weight: [head_dim], dtype of ``query``.
        key_weight: [head_dim], dtype of ``query``.
        positions: As in :func:`rotary`; a token at -1 is normed but not rotated.
        spec: The specification of the rotation, exact and without xPos; a head_dim of at most 1024.
        layout: The order of dimensions.
        offset: The position of the first token, without ``positions``.
        eps: Added to the mean square.
        weight_offset: Added to the weights: 1 for Gemma.

    Returns:
        Query and key: shapes and dtypes as given.

    Raises:
        ValueError: Shapes, layouts or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: A position is below -1.

    Examples:
        >>> import torch, posembed as pe
        >>> query, key = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64)
        >>> weight = torch.ones(64)
        >>> query, key = pe.functional.norm_rotary(
        ...     query, key, weight, weight, spec=pe.RotarySpec(64)
        ... )
    """
    tensors = (query, key, query_weight, key_weight)
    options = (rotary_text(spec), positions, layout, offset, eps, weight_offset)
    if is_sharded(query):
        return sharded().norm_rotary(*tensors, *options)  # type: ignore[no-any-return]
    return torch.ops.posembed.norm_rotary.default(*tensors, *options)  # type: ignore[no-any-return]


def norm_rotary_(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """:func:`norm_rotary` in place; returns query and key. For inference.

    Tensors may have any strides with a contiguous last dimension.

    Returns:
        The same tensors: (query, key).

    Raises:
        ValueError: As :func:`norm_rotary`; or grad mode is on and an argument requires grad; or
            tensors overlap in memory.

    Examples:
        >>> import torch, posembed as pe
        >>> query, key = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64)
        >>> weight = torch.ones(64)
        >>> query, key = pe.functional.norm_rotary_(
        ...     query, key, weight, weight, spec=pe.RotarySpec(64)
        ... )
    """
    tensors = (query, key, query_weight, key_weight)
    options = (rotary_text(spec), positions, layout, offset, eps, weight_offset)
    if is_sharded(query):
        return sharded().norm_rotary(*tensors, *options, in_place=True)  # type: ignore[no-any-return]
    torch.ops.posembed.norm_rotary_.default(*tensors, *options)
    return query, key
