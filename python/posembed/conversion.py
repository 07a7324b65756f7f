"""Projection weights for the other pairing, so that attention scores stay equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor


def permute_rotary_weight(
    weight: Tensor,
    num_heads: int,
    *,
    to: Literal["interleaved", "half_split"],
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    heads: Iterable[int] | None = None,
) -> Tensor:
    """Reorders the rows that make a head's components, from one pairing to the other.

    Queries and keys permuted alike have the same products: a model trained with half-split pairs
    gives the same scores with interleaved ones after this, and back.

    Args:
        weight: [num_heads * head_dim, ...]: a projection's weight, its bias, or a LoRA B matrix; of
            a norm over one head [head_dim] with ``num_heads=1``.
        num_heads: Heads in the rows: of keys with grouped queries, of all three if packed.
        to: The pairing that it is to have; it has the other.
        rotary_dim: Components that are rotated; default: all.
        rotary_start: The first of them.
        heads: Which heads to permute, default: all. Of packed QKV those of query and key:
            ``range(query_heads + key_heads)`` for parts one after the other.

    Raises:
        ValueError: Rows do not fit num_heads, or the window does not fit the head.

    Example:
        >>> import torch, posembed as pe
        >>> weight = torch.arange(4.0).unsqueeze(1)
        >>> pe.permute_rotary_weight(weight, 1, to="interleaved").flatten().tolist()
        [0.0, 2.0, 1.0, 3.0]
    """
    if to not in ("interleaved", "half_split"):
        raise ValueError(f"to: expected 'interleaved' or 'half_split', got {to!r}")
    if num_heads <= 0 or weight.dim() == 0 or weight.shape[0] % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of the weight's rows, {tuple(weight.shape)}, "
            f"got {num_heads}"
        )
    head_dim = weight.shape[0] // num_heads
    width = head_dim if rotary_dim is None else rotary_dim
    if width % 2 or rotary_start < 0 or rotary_start + width > head_dim:
        raise ValueError(
            f"rotary_dim: expected an even number of components from {rotary_start} on within "
            f"head_dim, {head_dim}, got {width}"
        )
    shape = (2, width // 2) if to == "interleaved" else (width // 2, 2)
    order = torch.arange(head_dim, device=weight.device)
    window = order[rotary_start : rotary_start + width]
    order[rotary_start : rotary_start + width] = window.view(shape).t().flatten()
    result = weight.detach().clone(memory_format=torch.contiguous_format)
    rows = result.view(num_heads, head_dim, *weight.shape[1:])
    chosen = list(range(num_heads) if heads is None else heads)
    rows[chosen] = rows[chosen][:, order]
    return result
