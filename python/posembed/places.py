"""The positions of queries and keys in ALiBi's scores, and which keys are visible."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from posembed import functional


class Places(TypedDict, total=False):
    """Arguments of all ALiBi methods: positions of queries and keys, and which keys are visible.

    Attributes:
        query_offset: Position of the first query among the keys; default: the last query is at the
            last key.
        query_positions: Positions of the queries, int32 or int64 [query] or [batch, query].
        key_positions: Positions of the keys, [key] or [batch, key].
        cu_seqlens: Boundaries [documents + 1] of packed documents; keys of other documents are
            hidden.
        attention_mask: bool or integers [key] or [batch, key]: keys with 0 are hidden. Without
            positions of queries or keys, only visible keys are numbered, as in Bloom; functions
            such as :func:`posembed.functional.alibi_bias` number all keys.
        hide: Hidden keys get -inf for any score; False: nothing is added to their scores.
    """

    query_offset: int | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    cu_seqlens: Tensor | None
    attention_mask: Tensor | None
    hide: bool


def lengths(scores: Tensor) -> torch.Size:
    """Numbers of queries and keys."""
    if scores.dim() not in (3, 4):
        raise ValueError(
            "scores: expected [batch, heads, query_length, key_length] or [heads, query_length, "
            f"key_length], got {list(scores.shape)}"
        )
    return scores.shape[-2:]


def complete(places: Places, queries: int, keys: int) -> Places:
    """Adds positions that number only visible keys if there is a mask and no positions."""
    mask = places.get("attention_mask")
    given = (places.get("query_positions"), places.get("key_positions"))
    if mask is None or any(positions is not None for positions in given):
        return places
    if mask.dim() == 0 or mask.shape[-1] != keys:
        return places  # the operator raises the error
    positions = functional.alibi_positions(mask)
    offset = places.get("query_offset")
    first = keys - queries if offset is None else offset
    if first < 0 or first + queries > keys:
        return {**places, "key_positions": positions}
    return {
        **places,
        "query_offset": None,
        "query_positions": positions.narrow(-1, first, queries),
        "key_positions": positions,
    }
