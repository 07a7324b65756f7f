"""Norm of query and key and their rotation, in one pass."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, cast, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.functional._offset import counted
from posembed.functional._options import Layout, rotary_text
from posembed.functional._rotary_packed import PackedOrder, Three
from posembed.functional._rotary_tables import TableNumerics
from posembed.glue.gate import Pair, check_tensors, gated
from posembed.glue.other_names import unexpected
from posembed.glue.sharding import is_sharded
from posembed.glue.validation import one_of
from posembed.specifications import RotarySpec

_NORM_ROTARY = cast(Pair, gated(torch.ops.posembed.norm_rotary.default, sharded=True))
_NORM_ROTARY_ = gated(torch.ops.posembed.norm_rotary_.default, sharded=True)
_NORM_ROTARY_PACKED = cast(
    Three, gated(torch.ops.posembed.norm_rotary_packed.default, sharded=True)
)
_NORM_ROTARY_PACKED_ = gated(torch.ops.posembed.norm_rotary_packed_.default, sharded=True)

Norm = Literal["rms", "layer"]
NormOver = Literal["head", "all_heads"]


class NormRotaryOptions(TypedDict, total=False):
    """Options of :func:`norm_rotary`, for type checkers."""

    layout: Layout
    offset: int | Tensor
    cu_seqlens: Tensor | None
    eps: float
    weight_offset: float
    norm: Norm
    over: NormOver
    query_bias: Tensor | None
    key_bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    numerics: TableNumerics
    round_before_weight: bool


HEADS = {"bshd": 2, "bhsd": 1, "sbhd": 2, "thd": 1}  # the index of the dimension


@overload
def norm_rotary(
    query: Tensor,
    key: None = None,
    query_weight: Tensor | None = None,
    key_weight: None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec | None = None,
    **options: Unpack[NormRotaryOptions],
) -> Tensor: ...


@overload
def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec | None = None,
    **options: Unpack[NormRotaryOptions],
) -> tuple[Tensor, Tensor]: ...


def norm_rotary(
    query: Tensor,
    key: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec | None = None,
    layout: Layout = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm: Norm = "rms",
    over: NormOver = "head",
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    numerics: TableNumerics = "float32",
    round_before_weight: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalises query, or query and key, then rotates, in one kernel launch.

    QK-norm: Henry et al., arXiv:2010.04245; with RMSNorm in Qwen 3, Gemma 3 and others. Computes in
    float32 (float64 for float64 data) and rounds once, unless ``cos`` is given. Gradients flow to
    all tensors. For RMSNorm of each head and exact angles they are one kernel: weight gradients are
    accumulated in float32 and reproducible, and only the norms' divisors are saved. For other norms
    and for tables they are composed of PyTorch's operators.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: Like ``query`` with any number of heads, or None.
        query_weight: [head_dim], in the dtype of ``query`` or float32; None for a norm without
            weights. With ``over="all_heads"``, [heads * head_dim].
        key_weight: Like ``query_weight``, for the key.
        positions: As in :func:`rotary`; a token at -1 is normalised but not rotated.
        spec: The specification of the rotation, exact and without xPos; head_dim at most 1024. With
            tables, only its head_dim, rotary_dim, rotary_start and interleaved count; None: heads
            are rotated whole, half-split.
        layout: The order of dimensions.
        offset: As in :func:`rotary`.
        cu_seqlens: As in :func:`rotary`.
        eps: Added to the mean square, or to the variance.
        weight_offset: Added to the weights: 1 for Gemma.
        norm: "rms" for RMSNorm, "layer" for LayerNorm, which subtracts the mean.
        over: "head": each head has its own norm. "all_heads": one norm over all heads of a token,
            as in OLMo 2 and Wan.
        query_bias: LayerNorm's bias, like ``query_weight``.
        key_bias: The same for the key.
        cos: Cosines to rotate by instead of exact angles: [batch or 1, seq, width] or [seq, width],
            where the width is rotary_dim or rotary_dim / 2, as in :func:`rotary_tables`; or complex
            ``freqs_cis`` without ``sin``.
        sin: Like ``cos``.
        numerics: With tables. "float32": the roundings of a PyTorch program, each step to the dtype
            of ``query``; products with tables of a wider dtype are not rounded. Sums of squares
            have another order than PyTorch's, so results may differ by one rounding.
            "float32_product": float32 throughout, rounded once.
        round_before_weight: With tables and "float32": rows are rounded before the weights multiply
            them and after it, as in Llama and Qwen 3; False: only after it, as in Gemma, OLMo 2 and
            torch's ``rms_norm`` and ``layer_norm``.

    Returns:
        The query, or (query, key), with the shapes and dtypes of the inputs.

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
        >>> angles = torch.outer(torch.arange(10.0), pe.RotarySpec(64).frequencies().float())
        >>> query = pe.functional.norm_rotary(
        ...     query, cos=angles.cos(), sin=angles.sin(), norm="layer"
        ... )
    """
    both = key is not None
    tensors, options = _norm_rotary(
        query, key, query_weight, key_weight, positions, spec, layout, offset, cu_seqlens, eps,
        weight_offset, norm, over, query_bias, key_bias, cos, sin, numerics, round_before_weight,
    )  # fmt: skip
    results = _NORM_ROTARY(*tensors, *options)
    return results if both else results[0]


@overload
def norm_rotary_(
    query: Tensor,
    key: None = None,
    query_weight: Tensor | None = None,
    key_weight: None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec | None = None,
    **options: Unpack[NormRotaryOptions],
) -> Tensor: ...


@overload
def norm_rotary_(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec | None = None,
    **options: Unpack[NormRotaryOptions],
) -> tuple[Tensor, Tensor]: ...


def norm_rotary_(
    query: Tensor,
    key: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec | None = None,
    **options: Unpack[NormRotaryOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """In-place :func:`norm_rotary` for inference; returns query, and key if passed.

    Arguments are as in :func:`norm_rotary`. Tensors may have any strides, but the last dimension
    must be contiguous: query and key may be parts of one packed projection.

    Returns:
        The same tensors: query, or (query, key).

    Raises:
        ValueError: As in :func:`norm_rotary`; or grad mode is on and an argument requires grad; or
            tensors overlap in memory.
        TypeError: As in :func:`norm_rotary`.
        IndexError: As in :func:`norm_rotary`.

    Examples:
        >>> import torch, posembed as pe
        >>> packed = torch.randn(1, 10, 8 + 2 + 2, 64)
        >>> query, key, value = packed.split((8, 2, 2), dim=2)
        >>> weight = torch.ones(64)
        >>> query, key = pe.functional.norm_rotary_(
        ...     query, key, weight, weight, spec=pe.RotarySpec(64)
        ... )
    """
    both = key is not None
    given = (query, key, query_weight, key_weight, positions, spec)
    tensors, others = _norm_rotary(*given, **options)
    _NORM_ROTARY_(*tensors, *others)
    return (query, tensors[1]) if both else query


def norm_rotary_packed(
    qkv: Tensor,
    heads: int,
    key_heads: int | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    order: PackedOrder = "blocks",
    **options: Unpack[NormRotaryOptions],
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises and rotates query and key of a packed projection, and splits off the value.

    The result is that of :func:`norm_rotary` for views of the projection. The backward pass is
    faster: gradients of query and key are written straight into the one gradient of ``qkv``, where
    torch joins three tensors. Other norms than RMSNorm of each head, tables and forward-mode
    derivatives take torch's way.

    Args:
        qkv: As in :func:`rotary_packed`.
        heads: The number of query heads.
        key_heads: The number of key heads, a divisor of ``heads``; the value has as many. Default:
            ``heads``.
        query_weight: As in :func:`norm_rotary`.
        key_weight: As in :func:`norm_rotary`.
        positions: As in :func:`norm_rotary`.
        spec: The specification of the rotation.
        order: As in :func:`rotary_packed`.
        **options: The other options of :func:`norm_rotary`.

    Returns:
        Query and key, which are new tensors, and the value, a view of ``qkv``.

    Raises:
        ValueError, TypeError, IndexError: See :func:`norm_rotary`.

    Examples:
        >>> import torch, posembed as pe
        >>> projection, weight = torch.nn.Linear(256, (8 + 2 + 2) * 64), torch.ones(64)
        >>> query, key, value = pe.functional.norm_rotary_packed(
        ...     projection(torch.randn(1, 10, 256)), 8, 2, weight, weight, spec=pe.RotarySpec(64)
        ... )
        >>> query.shape, value.shape
        (torch.Size([1, 10, 8, 64]), torch.Size([1, 10, 2, 64]))
    """
    weights = query_weight, key_weight
    return _NORM_ROTARY_PACKED(
        *_packed(qkv, heads, key_heads, weights, positions, spec, order, **options)
    )


def norm_rotary_packed_(
    qkv: Tensor,
    heads: int,
    key_heads: int | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    order: PackedOrder = "blocks",
    **options: Unpack[NormRotaryOptions],
) -> Tensor:
    """In-place :func:`norm_rotary_packed` for inference; the value stays as it is.

    Arguments are as in :func:`norm_rotary_packed`; the last dimension of ``qkv`` must be
    contiguous.

    Returns:
        ``qkv``.

    Raises:
        ValueError, TypeError, IndexError: See :func:`norm_rotary_`.

    Examples:
        >>> import torch, posembed as pe
        >>> qkv, weight = torch.randn(1, 10, (8 + 2 + 2) * 64), torch.ones(64)
        >>> spec = pe.RotarySpec(64)
        >>> pe.functional.norm_rotary_packed_(qkv, 8, 2, weight, weight, spec=spec) is qkv
        True
    """
    weights = query_weight, key_weight
    given = _packed(qkv, heads, key_heads, weights, positions, spec, order, **options)
    _NORM_ROTARY_PACKED_(*given)
    return qkv


def _packed(
    qkv: Tensor,
    heads: int,
    key_heads: int | None,
    weights: tuple[Tensor | None, Tensor | None],
    positions: Tensor | None,
    spec: RotarySpec,
    order: str,
    *,
    layout: str = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """The arguments of the operators on packed projections."""
    check_tensors(qkv=qkv)
    by_token = "bshd" if layout == "bhsd" else layout
    positions, offset = counted(offset, positions, qkv, by_token, cu_seqlens)
    _, others = _norm_rotary(qkv, qkv, *weights, positions, spec, layout, offset, **options)
    return qkv, heads, heads if key_heads is None else key_heads, order, *weights, *others


def _norm_rotary(
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    positions: Tensor | None,
    spec: RotarySpec | None,
    layout: str = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm: str = "rms",
    over: str = "head",
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    numerics: str = "float32",
    round_before_weight: bool = True,
    **unknown: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensors and options as the operators take them."""
    if unknown:
        raise unexpected(unknown)
    positions, offset = counted(offset, positions, query, layout, cu_seqlens)
    if key is None:
        if key_weight is not None:
            raise ValueError("key_weight: expected None without a key, got a tensor")
        if key_bias is not None:
            raise ValueError("key_bias: expected None without a key, got a tensor")
        key = no_key(query, layout)
    tensors = (query, key, query_weight, key_weight)
    if spec is None and cos is not None:
        check_tensors(query=query)
        text = head_text(int(query.shape[-1]))
    else:
        text = rotary_text(spec)  # type: ignore[arg-type]
    centred, all_heads = norm_flags(norm, over)
    if norm == "rms" and over == "head" and cos is None and sin is None:  # the usual call
        options: tuple[Any, ...] = (text, positions, layout, offset, eps, weight_offset)
        if query_bias is None and key_bias is None:
            return tensors, options
    return tensors, (
        text, positions, layout, offset, eps, weight_offset, centred, all_heads, query_bias,
        key_bias, cos, sin, numerics, round_before_weight,
    )  # fmt: skip


def norm_flags(norm: str, over: str) -> tuple[bool, bool]:
    """Whether a norm subtracts the mean, and whether it is over all heads."""
    if norm != "rms" or over != "head":  # the usual call has no more steps
        one_of("norm", norm, "rms", "layer")
        one_of("over", over, "head", "all_heads")
    return norm == "layer", over == "all_heads"


def no_key(query: Tensor, layout: str) -> Tensor:
    """A key without heads, of its own memory.

    Compilers write a view of the query back after the query, and the rotation would be lost.
    """
    check_tensors(query=query)
    heads = HEADS.get(layout, 0)
    if is_sharded(query) or not 0 < heads < query.dim():  # the operator refuses the layout
        return query.detach().clone()
    return query.new_empty((*query.shape[:heads], 0, *query.shape[heads + 1 :]))


@functools.lru_cache
def head_text(head_dim: int) -> str:
    """The specification of heads that are rotated whole, half-split, by given tables."""
    return RotarySpec(head_dim).text
