"""Per-head RMSNorm and rotation, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._gate import gated
from posembed.functional._options import Layout, rotary_text
from posembed.sharding import call, is_sharded
from posembed.specification import RotarySpec

_NORM_ROTARY = gated(torch.ops.posembed.norm_rotary.default)
_NORM_ROTARY_ = gated(torch.ops.posembed.norm_rotary_.default)


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
    """Applies RMSNorm to each head of query and key, then rotates, in one kernel launch.

    QK-norm: Henry et al., arXiv:2010.04245; with RMSNorm in Qwen 3, Gemma 3 and others. Computes in
    float32 (float64 for float64 data) and rounds once. Gradients flow to all four tensors; weight
    gradients are accumulated in float32 and reproducible. Only the norms' divisors are saved for
    backward.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: Like ``query`` with any number of heads.
        query_weight: [head_dim], in the dtype of ``query``.
        key_weight: [head_dim], in the dtype of ``query``.
        positions: As in :func:`rotary`; a token at -1 is normalised but not rotated.
        spec: The specification of the rotation, exact and without xPos; head_dim at most 1024.
        layout: The order of dimensions.
        offset: Position of the first token if ``positions`` is None.
        eps: Added to the mean square.
        weight_offset: Added to the weights: 1 for Gemma.

    Returns:
        Query and key, with the shapes and dtypes of the inputs.

    Raises:
        ValueError: Shapes, layouts or options are incompatible.
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
        return call("norm_rotary", *tensors, *options)  # type: ignore[no-any-return]
    return _NORM_ROTARY(*tensors, *options)  # type: ignore[no-any-return]


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
    """In-place :func:`norm_rotary` for inference; returns query and key.

    Tensors may have any strides, but the last dimension must be contiguous.

    Returns:
        The same tensors: (query, key).

    Raises:
        ValueError: As in :func:`norm_rotary`; or grad mode is on and an argument requires grad; or
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
        call("norm_rotary_", *tensors, *options)
    else:
        _NORM_ROTARY_(*tensors, *options)
    return query, key
