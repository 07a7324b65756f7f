"""Converts projection weights to the other pairing without changing attention scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from posembed.glue.gate import gated
from posembed.glue.validation import one_of

_PERMUTE_WEIGHT = gated(torch.ops.posembed.rotary_permute_weight.default)


def permute_rotary_weight(
    weight: Tensor,
    num_heads: int,
    *,
    to: Literal["interleaved", "half_split"],
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    heads: Iterable[int] | None = None,
) -> Tensor:
    """Reorders the rows of a projection's heads from one pairing to the other.

    If query and key weights are both permuted, attention scores do not change: a model trained with
    half-split pairs gives the same scores with interleaved pairs, and vice versa.

    Args:
        weight: [num_heads * head_dim, ...]: a projection's weight or bias, or a LoRA B matrix; for
            a norm over one head, [head_dim] with ``num_heads=1``.
        num_heads: Heads in the rows: the key heads of a key projection, all heads of packed QKV.
        to: The new pairing; the weight currently has the other one.
        rotary_dim: Number of rotated components; default: all.
        rotary_start: The first rotated component.
        heads: The heads to permute; default: all. For packed QKV, the heads of query and key:
            ``range(query_heads + key_heads)`` if query, key and value are stored in that order.

    Raises:
        ValueError: The number of rows does not match num_heads, or the rotated window does not fit
            the head.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.arange(4.0).unsqueeze(1)
        >>> pe.permute_rotary_weight(weight, 1, to="interleaved").flatten().tolist()
        [0.0, 2.0, 1.0, 3.0]
    """
    one_of("to", to, "interleaved", "half_split")
    chosen = None if heads is None else list(heads)
    window = (to == "interleaved", rotary_dim, rotary_start)
    return _PERMUTE_WEIGHT(weight, num_heads, *window, chosen)
