"""The positions of queries and keys in ALiBi's scores, and which keys are visible."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from posembed.glue.other_names import unexpected


class ScorePositions(TypedDict, total=False):
    """Arguments of all ALiBi methods: positions of queries and keys, and which keys are visible.

    Attributes:
        query_offset: Position of the first query among the keys; default: the last query aligns
            with the last key. int32 or int64 [batch]: that of each sample's, for caches of
            different lengths; not beside ``cu_seqlens``.
        query_positions: Positions of the queries, int32 or int64 [query] or [batch, query];
            default: consecutive.
        key_positions: Positions of the keys, [key] or [batch, key].
        cu_seqlens: Boundaries of packed documents: int32 or int64 [documents + 1], from 0 to the
            number of keys. Keys in other documents than the query's are masked.
        attention_mask: bool or integers [key] or [batch, key]: keys with 0 are masked. If no
            query or key positions are passed, modules number only visible keys, as Bloom does;
            functions such as :func:`posembed.functional.alibi_bias` do so with
            ``positions_from_mask``.
        apply_mask: Masked keys get score -inf; False: their scores do not change.
    """

    query_offset: int | Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    cu_seqlens: Tensor | None
    attention_mask: Tensor | None
    apply_mask: bool


def check_names(positions: ScorePositions) -> None:
    """Raises TypeError for an argument that is none of the positions'."""
    unknown = positions.keys() - ScorePositions.__annotations__.keys()
    if unknown:
        raise unexpected(dict.fromkeys(unknown))
