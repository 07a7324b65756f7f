"""Rotation that writes to a paged cache, and its variants for latent attention."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from posembed.functional._offset import counted
from posembed.functional._options import CacheLayout, Layout, rotary_text
from posembed.functional._rotary_norm import Norm, NormOver, norm_flags
from posembed.glue.gate import Pair, gated
from posembed.glue.sharding import any_sharded, refuse_sharded
from posembed.specifications import RotarySpec

_MLA_ROTARY = cast(Pair, gated(torch.ops.posembed.mla_rotary.default, sharded=True))
_MLA_ROTARY_CACHE_ = gated(torch.ops.posembed.mla_rotary_cache_.default)
_ROTARY_CACHE_ = gated(torch.ops.posembed.rotary_cache_.default)


def scale_parts(scale: float | Tensor) -> tuple[float, Tensor | None]:
    """A scale in the operators' form: a number, and a tensor, which the host need not read."""
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


def rotary_cache_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "thd",
    cache_layout: CacheLayout = "nhd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    rotate_key: bool = False,
    query_out: Tensor | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
    norm: Norm | None = None,
    over: NormOver = "head",
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> Tensor:
    """Rotates query in place, and writes the rotated key and the value to a paged cache.

    One kernel launch without host synchronisation, for inference. Pages are as in Kwon et al.,
    "PagedAttention", arXiv:2309.06180. Tensors may have any strides, but the last dimension must be
    contiguous.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [tokens, heads, head_dim].
        key: Like ``query`` with any number of heads.
        value: As many heads as the key, any head_dim.
        key_cache: [pages, page_size, heads, head_dim], or [pages, heads, page_size, head_dim] for
            ``cache_layout="hnd"``; in the dtype of the data, or float8_e4m3fn.
        value_cache: Like ``key_cache`` with the value's head_dim.
        slot_mapping: int32 or int64 [tokens], [batch, seq] in other layouts: ``page * page_size +
            index in the page``, each slot at most once; a token with slot -1 is not written.
        positions: As in :func:`rotary`; a token at -1 is written but not rotated.
        spec: The specification of the rotation, exact and without xPos.
        layout: The order of dimensions of query, key and value.
        cache_layout: The order of dimensions of the caches.
        offset: As in :func:`rotary`.
        cu_seqlens: As in :func:`rotary`.
        rotate_key: Also rotate ``key`` in place, for attention that reads it there.
        query_out: Output tensor for the rotated query, instead of in place.
        key_scale: For float8: keys are divided by it in float32 and rounded to nearest even,
            saturating at 448. A float, or a float32 tensor of one element.
        value_scale: The same for values.
        norm: "rms" or "layer": query and key are normalised before the rotation, as by
            :func:`norm_rotary`, whose options the following arguments are.
        over: "head" or "all_heads".
        query_weight: [head_dim], or [heads * head_dim]; None for a norm without weights.
        key_weight: The same for the key.
        query_bias: LayerNorm's bias.
        key_bias: The same for the key.
        eps: Added to the mean square, or to the variance.
        weight_offset: Added to the weights: 1 for Gemma.

    Returns:
        The rotated query: ``query``, or ``query_out``.

    Raises:
        ValueError: Shapes, layouts or options are incompatible; or outputs share memory; or grad
            mode is on and an argument requires grad.
        TypeError: A dtype is not supported.
        IndexError: A position is below -1, or a slot is outside the cache.

    Examples:
        >>> import torch, posembed as pe
        >>> key_cache, value_cache = torch.zeros(2, 10, 16, 2, 64).unbind()  # 10 pages of 16 slots
        >>> query, key, value = torch.randn(3, 8, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        >>> slots, positions = torch.tensor([32, 33, -1]), torch.tensor([7, 8, 9])
        >>> query = pe.functional.rotary_cache_(
        ...     query, key, value, key_cache, value_cache, slots, positions, spec=pe.RotarySpec(64)
        ... )
        >>> torch.equal(value_cache[2, 0], value[0])
        True
    """
    if any_sharded(query, key_cache):
        refuse_sharded(query=query, key_cache=key_cache)
    positions, offset = counted(offset, positions, query, layout, cu_seqlens)
    key_number, key_tensor = scale_parts(key_scale)
    value_number, value_tensor = scale_parts(value_scale)
    options: tuple[Any, ...] = ()
    parameters = query_weight, key_weight, query_bias, key_bias
    if norm is not None:
        flags = norm_flags(norm, over)
        options = True, query_weight, key_weight, eps, weight_offset, *flags, query_bias, key_bias
    elif any(x is not None for x in parameters):
        raise ValueError("norm: expected 'rms' or 'layer' with weights and biases, got None")
    _ROTARY_CACHE_(
        query, key, value, key_cache, value_cache, slot_mapping, rotary_text(spec), positions,
        layout, cache_layout, offset, query_out, rotate_key, key_number, value_number, key_tensor,
        value_tensor, *options,
    )  # fmt: skip
    return query if query_out is None else query_out


def mla_rotary(
    query: Tensor,
    key_rope: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates the query's window and the key's rotated part, which all heads share.

    For multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434. Gradients flow to
    both.

    Args:
        query: In ``layout``; the window that ``spec`` defines is rotated.
        key_rope: ``spec.rotary_dim`` components in ``layout`` with one head, or without the head
            dimension: [batch, seq, rotary_dim], [tokens, rotary_dim].
        positions: As in :func:`rotary`.
        spec: The query's head_dim, with ``rotary_dim`` and ``rotary_start`` of the window.
        layout: The order of dimensions.
        offset: As in :func:`rotary`.
        cu_seqlens: As in :func:`rotary`.
        inverse: Undo the rotation instead.

    Returns:
        Rotated query and key_rope, with the shapes and dtypes of the inputs.

    Raises:
        ValueError, TypeError, IndexError: See :func:`rotary`.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(192, rotary_dim=64, rotary_start=128, interleaved=True)
        >>> query, key_rope = torch.randn(1, 5, 16, 192), torch.randn(1, 5, 64)
        >>> query, key_rope = pe.functional.mla_rotary(query, key_rope, spec=spec)
    """
    positions, offset = counted(offset, positions, query, layout, cu_seqlens)
    options = (rotary_text(spec), positions, layout, offset, inverse)
    return _MLA_ROTARY(query, key_rope, *options)


def mla_rotary_cache_(
    query: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "thd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    query_out: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """In-place :func:`mla_rotary` of query; writes [latent, key_rope] to a paged cache.

    Args:
        query: In ``layout``; by default [tokens, heads, head_dim].
        latent: The compressed keys and values: [tokens, latent_dim], or with one head.
        key_rope: ``spec.rotary_dim`` components: [tokens, rotary_dim], or with one head; it
            is not changed.
        cache: [pages, page_size, latent_dim + rotary_dim], in the dtype of the data or
            float8_e4m3fn.
        slot_mapping: As in :func:`rotary_cache_`.
        positions: As in :func:`rotary`.
        spec: As in :func:`mla_rotary`, exact and without xPos.
        layout: The order of dimensions.
        offset: As in :func:`rotary`.
        cu_seqlens: As in :func:`rotary`.
        query_out: Output tensor for the rotated query, instead of in place.
        scale: For float8: rows are divided by it. A float, or a float32 tensor of one element.

    Returns:
        The rotated query: ``query``, or ``query_out``.

    Raises:
        ValueError, TypeError, IndexError: See :func:`rotary_cache_`.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(192, rotary_dim=64, rotary_start=128, interleaved=True)
        >>> cache, slots = torch.zeros(10, 16, 512 + 64), torch.tensor([32, 33])
        >>> query, latent = torch.randn(2, 16, 192), torch.randn(2, 512)
        >>> key_rope = torch.randn(2, 64)
        >>> query = pe.functional.mla_rotary_cache_(
        ...     query, latent, key_rope, cache, slots, spec=spec
        ... )
    """
    if any_sharded(query, cache):
        refuse_sharded(query=query, cache=cache)
    positions, offset = counted(offset, positions, query, layout, cu_seqlens)
    options = (rotary_text(spec), positions, layout, offset, query_out, *scale_parts(scale))
    _MLA_ROTARY_CACHE_(query, latent, key_rope, cache, slot_mapping, *options)
    return query if query_out is None else query_out
