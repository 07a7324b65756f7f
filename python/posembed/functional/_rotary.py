"""Functional rotary embedding of queries and keys."""

from __future__ import annotations

from typing import Any, TypedDict, cast, overload

import torch
from torch import Tensor
from typing_extensions import Required, Unpack

from posembed.functional._offset import of_layout
from posembed.functional._options import Layout, rotary_text
from posembed.glue.gate import Pair, gated
from posembed.glue.sharding import refuse_sharded
from posembed.specifications import RotarySpec

_ROTARY_ = gated(torch.ops.posembed.rotary_.default, sharded=True)
_ROTARY_OUT = gated(torch.ops.posembed.rotary_out.default)
_ROTARY_PAIR_ = gated(torch.ops.posembed.rotary_pair_.default, sharded=True)
_ROTARY_PAIR_OUT = gated(torch.ops.posembed.rotary_pair_out.default)
_ROTARY_REROTATE_ = gated(torch.ops.posembed.rotary_rerotate_.default)
_ROTARY = gated(torch.ops.posembed.rotary.default, sharded=True)
_ROTARY_PAIR = cast(Pair, gated(torch.ops.posembed.rotary_pair.default, sharded=True))
# For plain tensors.
ROTARY = gated(torch.ops.posembed.rotary.default)
ROTARY_PAIR = cast(Pair, gated(torch.ops.posembed.rotary_pair.default))


class RotaryCall(TypedDict, total=False):
    """Options of :func:`rotary_`, for type checkers."""

    spec: Required[RotarySpec]
    layout: Layout
    offset: int | Tensor
    cu_seqlens: Tensor | None
    frequencies: Tensor | None
    inverse: bool


class RotaryInto(RotaryCall, total=False):
    """Options of :func:`rotary`."""

    out: Tensor | tuple[Tensor, Tensor] | None


@overload
def rotary(
    query: Tensor, key: None = None, positions: Tensor | None = None, **options: Unpack[RotaryInto]
) -> Tensor: ...


@overload
def rotary(
    query: Tensor, key: Tensor, positions: Tensor | None = None, **options: Unpack[RotaryInto]
) -> tuple[Tensor, Tensor]: ...


def rotary(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates query, or query and key in one kernel launch, by their positions.

    Pair ``i`` of a head rotates by ``position * frequency[i]`` radians. Angles are exact at every
    position. Su et al., "RoFormer", arXiv:2104.09864.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: Like ``query`` with any number of heads, or None. To rotate keys alone, pass them as
            ``query``, with ``spec.for_keys()`` for xPos. A tensor whose head_dim is
            ``spec.rotary_dim`` holds only the rotated components, like the shared key in multi-head
            latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434).
        positions: int32, int64, float32 or float64 [seq], [batch, seq] or [tokens]; with sections
            also [axes, batch, seq] or [axes, tokens], where the batch may be 1. The integer -1, on
            all axes, leaves a token unchanged. Floating-point positions may be fractional, with the
            same accuracy; negative ones rotate backwards, and none leaves a token unchanged. None:
            ``offset``, ``offset + 1``, and so on.
        spec: The specification of the rotation.
        layout: The order of dimensions; ``"thd"`` is [tokens, heads, head_dim].
        offset: Position of the first token if ``positions`` is None. int32 or int64 [batch]: that
            of each sample's; beside ``cu_seqlens`` [documents]: that of each document's.
        cu_seqlens: int32 or int64 [documents + 1], from 0 to the number of tokens: the boundaries
            of packed documents (layout "thd", or a batch of 1). Positions restart at ``offset`` in
            each document; do not pass ``positions`` too.
        frequencies: float32 or float64 [rotary_dim / 2]: radians per position, instead of those of
            the specification. Gradients flow to them. Also [heads, rotary_dim / 2], where query and
            key have as many heads; or [axes, heads, rotary_dim / 2], where the angle of a pair is
            the sum of position times frequency over all axes of ``positions`` (RoPE-Mixed: Heo et
            al., "Rotary Position Embedding for Vision Transformer", arXiv:2403.13298).
        inverse: Undo the rotation instead.
        out: Output tensor, or (query, key) if there is a key, for inference: any strides, but the
            last dimension must be contiguous. It may be the input itself; other overlap is not
            allowed.

    Returns:
        The rotated query, or (query, key), in the shapes and dtypes of the inputs; or ``out``.

    Raises:
        ValueError: Shapes, layouts or options are incompatible; or, with ``out``, an argument
            requires grad in grad mode or tensors overlap in memory.
        TypeError: A dtype is not supported.
        IndexError: An integer position is below -1.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(64, base=500000.0)
        >>> query, key = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64)
        >>> query, key = pe.functional.rotary(query, key, spec=spec)
    """
    text = rotary_text(spec)
    if out is not None:
        rotate_into(
            out, query, key, positions, text, layout, offset, inverse, frequencies, cu_seqlens
        )
        return out
    return rotated(query, key, positions, text, layout, offset, inverse, frequencies, cu_seqlens)


def rotated(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: Layout,
    offset: int | Tensor,
    inverse: bool,
    frequencies: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`rotary` without ``out``, with the text of a specification.

    Keywords, arguments that have their default value, and a function for the steps that
    :func:`rotated_in_place` shares would cost a tenth of a one-token call.
    """
    if isinstance(offset, Tensor):
        positions = of_layout(offset, positions, query, layout, cu_seqlens)
        offset, cu_seqlens = 0, None
    options: tuple[Any, ...] = (spec, positions, layout, offset)
    if inverse is not False or cu_seqlens is not None or frequencies is not None:
        options = (*options, inverse, cu_seqlens, frequencies)
    return _ROTARY(query, *options) if key is None else _ROTARY_PAIR(query, key, *options)


def rotate_into(
    out: Tensor | tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: Layout,
    offset: int | Tensor,
    inverse: bool,
    frequencies: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """:func:`rotated` into ``out``."""
    parts = out if isinstance(out, tuple) else (out,)
    count = 1 if key is None else 2
    as_given = isinstance(out, tuple) == (count == 2) and len(parts) == count
    if not as_given or not all(isinstance(part, Tensor) for part in parts):
        expected = "a tensor" if key is None else "two tensors, (query_out, key_out)"
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"out: expected {expected}, got {kinds}")
    if isinstance(offset, Tensor):
        positions = of_layout(offset, positions, query, layout, cu_seqlens)
        offset, cu_seqlens = 0, None
    options = (spec, positions, layout, offset, inverse, cu_seqlens, frequencies)
    if key is None:
        _ROTARY_OUT(*parts, query, *options)
    else:
        _ROTARY_PAIR_OUT(*parts, query, key, *options)


def rerotate_(
    key: Tensor,
    old_positions: Tensor,
    new_positions: Tensor,
    *,
    spec: RotarySpec,
    new_spec: RotarySpec | None = None,
    layout: Layout = "bshd",
    frequencies: Tensor | None = None,
) -> Tensor:
    """Moves rotated keys to other positions, or to another specification, in place.

    For context shifts, moved prefixes, and scalings that change with the length. The result is that
    of rotating the original keys anew, up to one rounding to their dtype. Computes on a float64
    copy. Keys in 16 bits or float8 lose accuracy with every move: make few, long moves.

    Args:
        key: Rotated keys in ``layout``; also float8_e4m3fn, as in a cache of :func:`rotary_cache_`
            with pages as the batch. Rotations are linear, so the scale of the cache stays the same;
            numbers beyond 448 times the scale become that.
        old_positions: The positions that the keys were rotated to, as in :func:`rotary`.
        new_positions: The new positions.
        spec: The specification that the keys were rotated with.
        new_spec: The new specification; default: the same.
        layout: The order of dimensions.
        frequencies: The frequencies that were passed to :func:`rotary`, if any; the keys keep them,
            or get those of ``new_spec``.

    Returns:
        ``key``.

    Raises:
        ValueError, TypeError, IndexError: See :func:`rotary_`.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(64)
        >>> positions = torch.arange(100, 110)
        >>> cache = pe.functional.rotary(torch.randn(1, 10, 2, 64), positions=positions, spec=spec)
        >>> cache = pe.functional.rerotate_(cache, positions, positions - 100, spec=spec)
    """
    refuse_sharded(key=key)
    text = rotary_text(spec), None if new_spec is None else rotary_text(new_spec, "new_spec")
    _ROTARY_REROTATE_(key, old_positions, new_positions, *text, layout, frequencies)
    return key


@overload
def rotary_(
    query: Tensor, key: None = None, positions: Tensor | None = None, **options: Unpack[RotaryCall]
) -> Tensor: ...


@overload
def rotary_(
    query: Tensor, key: Tensor, positions: Tensor | None = None, **options: Unpack[RotaryCall]
) -> tuple[Tensor, Tensor]: ...


def rotary_(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """In-place :func:`rotary` for inference; returns query, and key if passed.

    Arguments are as in :func:`rotary`. Tensors may have any strides, but the last dimension must be
    contiguous.

    Returns:
        The same tensors: query, or (query, key).

    Raises:
        ValueError: As in :func:`rotary`; or grad mode is on and an argument requires grad; or
            tensors overlap in memory.

    Examples:
        >>> import torch, posembed as pe
        >>> cache = torch.randn(1, 10, 2, 64)
        >>> pe.functional.rotary_(cache, spec=pe.RotarySpec(64), offset=7) is cache
        True
    """
    text = rotary_text(spec)
    return rotated_in_place(
        query, key, positions, text, layout, offset, inverse, frequencies, cu_seqlens
    )


def rotated_in_place(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    spec: str,
    layout: Layout,
    offset: int | Tensor,
    inverse: bool,
    frequencies: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`rotary_` with the text of a specification."""
    if isinstance(offset, Tensor):
        positions = of_layout(offset, positions, query, layout, cu_seqlens)
        offset, cu_seqlens = 0, None
    options: tuple[Any, ...] = (spec, positions, layout, offset)
    if inverse is not False or cu_seqlens is not None or frequencies is not None:
        options = (*options, inverse, cu_seqlens, frequencies)
    if key is None:
        _ROTARY_(query, *options)
        return query
    _ROTARY_PAIR_(query, key, *options)
    return query, key
