"""Functional relative logits: a query times a table's row of the distance to each key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.functional._options import By, Device, RelativeBuckets
from posembed.glue.gate import check_tensors, gated, wrong_type
from posembed.glue.sharding import any_sharded, call, is_sharded
from posembed.glue.validation import one_of
from posembed.specifications.score_positions import ScorePositions, check_names

_RELATIVE_LOGITS = gated(torch.ops.posembed.relative_logits.default, sharded=True)
_RELATIVE_LOGITS_ = gated(torch.ops.posembed.relative_logits_.default)
_RELATIVE_ROWS = gated(torch.ops.posembed.relative_rows.default)


def by_key(by: By) -> bool:
    """Whether the table multiplies keys; a ValueError for an unknown ``by``."""
    one_of("by", by, "query", "key")
    return by == "key"


def relative_rows(
    query_length: int,
    key_length: int,
    num_buckets: int | Sequence[int],
    *,
    rule: RelativeBuckets = "clipped",
    max_distance: int = 128,
    bidirectional: bool = True,
    causal: bool = False,
    positions_from_mask: bool = False,
    device: Device | None = None,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """The row of each query and key in a table of relative positions.

    Args:
        query_length: Number of queries.
        key_length: Number of keys.
        num_buckets: Rows of the table; of several axes, those of each axis' table.
        rule: How distances map to rows: ``kind`` of :func:`relative_buckets`. Of a "grid", the rows
            of all axes are one number, row by row; otherwise the axes' tables follow one another.
        max_distance: As in :func:`relative_buckets`.
        bidirectional: As in :func:`relative_buckets`.
        causal: Hide keys after the query.
        positions_from_mask: Number only the keys that ``attention_mask`` does not hide.
        device: Device of the result.
        positions: See :class:`posembed.specifications.score_positions.ScorePositions`.
            With several axes, ``query_positions`` and ``key_positions`` are [axes, length] or
            [axes, batch, length].

    Returns:
        int64 [query_length, key_length]; [batch, query_length, key_length] where positions, offsets
        or mask have a batch; [axes, batch or 1, query_length, key_length] with several axes. -1:
        the distance has no row, -2: the key is hidden.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: Positions are not int32 or int64.
        IndexError: A position is out of range.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.relative_rows(3, 3, 3)  # Shaw's, clipped to one token
        tensor([[1, 2, 2],
                [0, 1, 2],
                [0, 0, 1]])
    """
    check_names(positions)
    like = torch.empty(0, device=device)
    counts = [num_buckets] if isinstance(num_buckets, int) else list(num_buckets)
    at = positions.get
    offset = at("query_offset")
    number, offsets = (None, offset) if isinstance(offset, Tensor) else (offset, None)
    places = (at("query_positions"), at("key_positions"), at("cu_seqlens"))
    return _RELATIVE_ROWS(
        like, query_length, key_length, counts, max_distance, bidirectional, rule, causal,
        number, at("attention_mask"), positions_from_mask, *places, at("apply_mask", True), offsets,
    )  # fmt: skip


def _check_axes(name: str, value: Any) -> None:
    """Raises TypeError for what is neither a tensor nor one for each axis."""
    each = value if isinstance(value, list | tuple) else [value]
    if not each or not all(isinstance(one, Tensor) for one in each):
        raise wrong_type(name, "a Tensor", type(value).__name__)


def _with_axes(
    table: Tensor | Sequence[Tensor], rows: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The tables of several axes one after another, and the axes' rows in that table."""
    if isinstance(table, Tensor):
        if isinstance(rows, Tensor):
            return table, rows
        table = [table] * len(rows)
    if isinstance(rows, Tensor) or len(rows) != len(table):
        got = "one tensor" if isinstance(rows, Tensor) else str(len(rows))
        raise ValueError(f"rows: expected one for each of {len(table)} tables, got {got}")
    found, first = [], 0
    for each, row in zip(table, rows, strict=True):
        found.append(torch.where(row < 0, row, row + first))
        first += each.shape[-2]
    stacked = torch.stack(found)
    return torch.cat(tuple(table), -2), stacked.unsqueeze(1) if stacked.dim() == 3 else stacked


def relative_logits(
    query: Tensor,
    table: Tensor | Sequence[Tensor],
    rows: Tensor | Sequence[Tensor] | None = None,
    *,
    rule: RelativeBuckets = "clipped",
    num_buckets: Sequence[int] | None = None,
    max_distance: int = 128,
    bidirectional: bool = True,
    causal: bool = False,
    positions_from_mask: bool = False,
    other_length: int | None = None,
    by: By = "query",
    scale: float = 1.0,
    scores: Tensor | None = None,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """Logits of a query and a table of relative positions; gradients flow to both, and to scores.

    ``logits[q, k] = scale * query[q] @ table[row of q and k]``. Products are torch's, computed for
    a block of queries at a time and gathered; rows that a block of queries does not use are not
    multiplied on the CPU. The table's gradient has the same bits for any number of threads.

    Args:
        query: float32, float64, bfloat16 or float16 [batch, heads, queries, dim]. With
            ``by="key"``, the keys [batch, heads, keys, dim].
        table: [rows, dim], or [heads, rows, dim], in the dtype of ``query``. Several tables belong
            to several axes, whose logits are added.
        rows: int32 or int64 [queries, keys] or [batch, queries, keys], or a tensor for each axis;
            -1: logit 0, -2: -infinity. Default: by ``rule``.
        rule: As in :func:`relative_rows`, like the options up to ``positions_from_mask``.
        num_buckets: The differences of each axis of a "grid". Default: the rows of the tables.
        max_distance: As in :func:`relative_buckets`.
        bidirectional: As in :func:`relative_buckets`.
        causal: Hide keys after the query.
        positions_from_mask: Number only the keys that ``attention_mask`` does not hide.
        other_length: Number of keys, or of queries with ``by="key"``; default: that of scores, or
            of ``query``.
        by: "key": the table multiplies keys, ``key[k] @ table[row]`` (DeBERTa's second term).
        scale: Multiplies the logits.
        scores: [batch, heads, queries, keys], to which the logits are added.
        positions: As in :func:`relative_rows`.

    Returns:
        [batch, heads, queries, keys] in the dtype of ``query``.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: Dtypes differ or are not supported.
        IndexError: A row is outside the table, or a position is out of range.

    Examples:
        >>> import torch, posembed as pe
        >>> query, table = torch.randn(2, 4, 12, 16), torch.randn(2 * 5 + 1, 16)
        >>> logits = pe.functional.relative_logits(query, table)  # Shaw's, clipped to 5 tokens
        >>> distances = torch.arange(12) - torch.arange(12).unsqueeze(1)
        >>> expected = torch.einsum("bhqd,qkd->bhqk", query, table[distances.clamp(-5, 5) + 5])
        >>> torch.allclose(logits, expected, atol=1e-5)
        True
    """
    keyed = by_key(by)
    check_tensors(query=query)
    _check_axes("table", table)
    if rows is None:
        tables = [table] if isinstance(table, Tensor) else table
        counts = [each.shape[-2] for each in tables] if num_buckets is None else list(num_buckets)
        own = query.shape[-2]
        if other_length is None:
            other_length = own if scores is None else scores.shape[-2 if keyed else -1]
        lengths = (other_length, own) if keyed else (own, other_length)
        found = relative_rows(
            *lengths, counts, rule=rule, max_distance=max_distance, bidirectional=bidirectional,
            causal=causal, positions_from_mask=positions_from_mask, device=query.device,
            **positions,
        )  # fmt: skip
        joined = torch.cat(tuple(tables), -2) if len(tables) > 1 else tables[0]
    else:
        check_names(positions)
        if positions or other_length is not None or num_buckets is not None:
            raise ValueError("rows: expected None beside positions, other_length or num_buckets")
        _check_axes("rows", rows)
        joined, found = _with_axes(table, rows)
    return logits_of(query, joined, found, scores, scale, keyed)


def logits_of(
    query: Tensor, table: Tensor, rows: Tensor, scores: Tensor | None, scale: float, keyed: bool
) -> Tensor:
    """The operator."""
    return _RELATIVE_LOGITS(query, table, rows, scale, keyed, scores)


def relative_logits_(
    scores: Tensor,
    query: Tensor,
    table: Tensor,
    rows: Tensor,
    *,
    by: By = "query",
    scale: float = 1.0,
) -> Tensor:
    """Adds :func:`relative_logits` to ``scores`` in place, for inference.

    Args:
        scores: [batch, heads, queries, keys] with contiguous keys.
        query: As in :func:`relative_logits`, in the dtype of ``scores``.
        table: As in :func:`relative_logits`.
        rows: As :func:`relative_rows` returns.
        by: As in :func:`relative_logits`.
        scale: Multiplies the logits.

    Returns:
        ``scores``.

    Raises:
        RuntimeError: A gradient would be lost.
        ValueError: Shapes are incompatible.
        TypeError: Dtypes differ.
        IndexError: A row is outside the table.

    Examples:
        >>> import torch, posembed as pe
        >>> query, table, scores = torch.ones(1, 1, 2, 4), torch.ones(3, 4), torch.zeros(1, 1, 2, 2)
        >>> pe.functional.relative_logits_(scores, query, table, torch.tensor([[1, -1], [0, 1]]))
        tensor([[[[4., 0.],
                  [4., 4.]]]])
    """
    arguments = (scores, query, table, rows, scale, by_key(by))
    if any_sharded(scores, query) or is_sharded(table):
        call(_RELATIVE_LOGITS_, *arguments)
    else:
        _RELATIVE_LOGITS_(*arguments)
    return scores
