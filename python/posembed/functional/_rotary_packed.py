"""Rotation of the query and key of a packed projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from posembed.functional._offset import of_layout
from posembed.functional._options import Layout, rotary_text
from posembed.glue.gate import gated
from posembed.specifications import RotarySpec

Three = Callable[..., tuple[Tensor, Tensor, Tensor]]
_ROTARY_PACKED = cast(Three, gated(torch.ops.posembed.rotary_packed.default, sharded=True))
_ROTARY_PACKED_ = gated(torch.ops.posembed.rotary_packed_.default, sharded=True)

PackedOrder = Literal["blocks", "groups"]


def rotary_packed(
    qkv: Tensor,
    heads: int,
    key_heads: int | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    order: PackedOrder = "blocks",
    layout: Layout = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the query and key of a packed projection, and splits off the value.

    The result is that of :func:`rotary` for views of the projection. The backward pass is faster:
    gradients of query and key are rotated straight into the one gradient of ``qkv``, where torch
    joins three tensors. Learned frequencies and forward-mode derivatives take torch's way.

    Args:
        qkv: [batch, seq, width], [seq, batch, width] for layout "sbhd", or [tokens, width] for
            "thd", where the width is (heads + 2 * key_heads) * head_dim.
        heads: The number of query heads.
        key_heads: The number of key heads, a divisor of ``heads``; the value has as many. Default:
            ``heads``.
        positions: As in :func:`rotary`.
        spec: The specification of the rotation.
        order: "blocks": all query heads, then all key heads, then those of the value, as Phi-3's
            ``qkv_proj``. "groups": for each key head its query heads, the key head and the value
            head, as Megatron-LM's ``linear_qkv`` and GPT-NeoX's ``query_key_value``.
        layout: The order of dimensions of the results; "bhsd" gives views with heads first.
        offset: As in :func:`rotary`.
        cu_seqlens: As in :func:`rotary`.
        frequencies: As in :func:`rotary`.
        inverse: Undo the rotation instead.

    Returns:
        The rotated query and key, which are new tensors, and the value, a view of ``qkv``.

    Raises:
        ValueError, TypeError, IndexError: See :func:`rotary`.

    Examples:
        >>> import torch, posembed as pe
        >>> projection = torch.nn.Linear(256, (8 + 2 + 2) * 64)
        >>> query, key, value = pe.functional.rotary_packed(
        ...     projection(torch.randn(1, 10, 256)), 8, 2, spec=pe.RotarySpec(64)
        ... )
        >>> query.shape, value.shape
        (torch.Size([1, 10, 8, 64]), torch.Size([1, 10, 2, 64]))
    """
    given = (heads, key_heads, positions, order, layout, offset, cu_seqlens, frequencies, inverse)
    return rotated_packed(qkv, rotary_text(spec), *given)


def rotary_packed_(
    qkv: Tensor,
    heads: int,
    key_heads: int | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    order: PackedOrder = "blocks",
    layout: Layout = "bshd",
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """In-place :func:`rotary_packed` for inference; the value stays as it is.

    Arguments are as in :func:`rotary_packed`; the last dimension of ``qkv`` must be contiguous.

    Returns:
        ``qkv``.

    Raises:
        ValueError, TypeError, IndexError: See :func:`rotary_`.

    Examples:
        >>> import torch, posembed as pe
        >>> qkv = torch.randn(1, 10, (8 + 2 + 2) * 64)
        >>> pe.functional.rotary_packed_(qkv, 8, 2, spec=pe.RotarySpec(64)) is qkv
        True
    """
    given = (heads, key_heads, positions, order, layout, offset, cu_seqlens, frequencies, inverse)
    return rotated_packed_in_place(qkv, rotary_text(spec), *given)


def rotated_packed(qkv: Tensor, spec: str, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rotary_packed` with the text of a specification."""
    return _ROTARY_PACKED(qkv, *_options(qkv, spec, *given))


def rotated_packed_in_place(qkv: Tensor, spec: str, *given: Any) -> Tensor:
    """:func:`rotary_packed_` with the text of a specification."""
    _ROTARY_PACKED_(qkv, *_options(qkv, spec, *given))
    return qkv


def _options(
    qkv: Tensor,
    spec: str,
    heads: int,
    key_heads: int | None,
    positions: Tensor | None,
    order: str,
    layout: str,
    offset: int | Tensor,
    cu_seqlens: Tensor | None,
    frequencies: Tensor | None,
    inverse: bool,
) -> tuple[Any, ...]:
    """The operators' arguments after the projection."""
    if isinstance(offset, Tensor):
        by_token = "bshd" if layout == "bhsd" else layout
        positions = of_layout(offset, positions, qkv, by_token, cu_seqlens)
        offset, cu_seqlens = 0, None
    key_heads = heads if key_heads is None else key_heads
    packing = (heads, key_heads, order)
    return (*packing, spec, positions, layout, offset, inverse, cu_seqlens, frequencies)
