"""Positions of sequences and documents that begin at different offsets, as with caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.functional._options import AdditiveLayout
from posembed.glue.gate import gated
from posembed.glue.validation import one_of, whole

INTEGERS = (torch.int32, torch.int64)
# The first number that positions cast to 16 bits cannot hold.
_LOST = {torch.bfloat16: 257, torch.float16: 2049}
LAYOUTS = {"bshd": (0, 1), "bhsd": (0, 2), "sbhd": (1, 0), "thd": (None, 0)}
_PACKED_POSITIONS = gated(torch.ops.posembed.packed_positions.default)


def positions_from(
    offset: int | Tensor,
    positions: Tensor | None,
    x: Tensor,
    batch: int | None = -3,
    seq: int = -2,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Positions [batch, seq] of the tokens of ``x``, starting at ``offset`` [batch].

    With ``cu_seqlens``, positions [seq] that restart at ``offset``, a number or [documents], in
    each document. ``batch`` and ``seq`` are dimensions of ``x``; ``batch`` is None if there is
    none.

    Raises:
        ValueError: Positions are passed too, or the offsets are not [batch] or [documents].
        TypeError: The offsets are not int32 or int64.
    """
    if cu_seqlens is not None:
        if positions is not None:
            raise ValueError("cu_seqlens: expected none where positions are given")
        if batch is not None and x.dim() + batch >= 0 and x.shape[batch] != 1:
            raise ValueError(f"cu_seqlens: expected batch 1, got batch {x.shape[batch]}")
        if isinstance(offset, Tensor):
            return _PACKED_POSITIONS(cu_seqlens, x.shape[seq], offset)
        _check_number(offset)
        return _PACKED_POSITIONS(cu_seqlens, x.shape[seq]) + offset
    assert isinstance(offset, Tensor)
    shape = list(offset.shape)
    if positions is not None:
        raise ValueError(f"offset: expected 0 where positions are given, got {shape}")
    if offset.dtype not in INTEGERS:
        lost = _LOST.get(offset.dtype)
        hint = "" if lost is None else f", which cannot represent {lost}: keep it out of the cast"
        raise TypeError(f"offset: expected int32 or int64, got {offset.dtype}{hint}")
    if batch is None or x.dim() + batch < 0:
        raise ValueError(f"offset: expected a number where there is no batch, got {shape}")
    if offset.dim() != 1 or offset.shape[0] != x.shape[batch]:
        raise ValueError(
            f"offset: expected a number or [batch] with batch {x.shape[batch]}, got {shape}"
        )
    tokens = torch.arange(x.shape[seq], dtype=offset.dtype, device=offset.device)
    return offset.unsqueeze(-1) + tokens


def _check_number(offset: Any) -> None:
    """As the operators check an offset that they take themselves."""
    if isinstance(offset, float):
        raise TypeError(f"offset: expected an int, got a {type(offset).__name__}")


def of_layout(
    offset: int | Tensor,
    positions: Tensor | None,
    query: Tensor,
    layout: str,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """:func:`positions_from` for a query in ``layout``; the operator refuses other queries."""
    if layout not in LAYOUTS:
        return positions
    batch, seq = LAYOUTS[layout]
    if query.dim() <= max(batch or 0, seq):
        return positions
    return positions_from(offset, positions, query, batch, seq, cu_seqlens)


def counted(
    offset: int | Tensor,
    positions: Tensor | None,
    query: Tensor,
    layout: str,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, int]:
    """Positions and offset for operators without documents, whose offset is a number."""
    if not isinstance(offset, Tensor) and cu_seqlens is None:
        return positions, offset
    if not isinstance(offset, Tensor):
        whole("offset", offset, 0)
    return of_layout(offset, positions, query, layout, cu_seqlens), 0


def additive_layout(layout: Any) -> AdditiveLayout:
    """The layout of what positions are added to; raises ValueError for an unknown one."""
    one_of("layout", layout, "bsd", "sbd")
    return layout  # type: ignore[no-any-return]


def sequence_first(
    x: Tensor, positions: Tensor | None, offset: int | Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Positions [seq, batch] of x [seq, batch, dim], for operators that take [batch, seq, dim]."""
    if isinstance(offset, Tensor) or cu_seqlens is not None:
        positions = positions_from(offset, positions, x, 1, 0, cu_seqlens)
    elif positions is None:
        _check_number(offset)
        positions = torch.arange(offset, offset + x.shape[0], device=x.device)
    elif offset != 0:
        raise ValueError(f"offset: expected 0 where positions are given, got {offset}")
    seq, batch = x.shape[:2]
    rows = positions.unsqueeze(0) if positions.dim() == 1 else positions
    if rows.dim() != 2 or rows.shape[1] != seq or rows.shape[0] not in (1, batch):
        raise ValueError(
            f"positions: expected [{seq}] or [{batch}, {seq}] for x [seq, batch, dim], got "
            f"{list(positions.shape)}"
        )
    return rows.T.expand(seq, batch)
