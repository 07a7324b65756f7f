"""RelativeLogits: logits of the query and a learned table of relative positions.

Shaw et al., "Self-Attention with Relative Position Representations", arXiv:1803.02155; Dai et al.,
"Transformer-XL", arXiv:1901.02860; He et al., "DeBERTa", arXiv:2006.03654; Kirillov et al.,
"Segment Anything", arXiv:2304.02643.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from posembed import functional
from posembed.functional import By, Device, RelativeBuckets
from posembed.functional._relative_logits import by_key, logits_of
from posembed.glue.gate import check_tensors
from posembed.glue.tracers import Leaf
from posembed.glue.validation import finite, flag, whole, wholes, written
from posembed.modules.relative_bias import check_rule, rows_of
from posembed.specifications.score_positions import ScorePositions


class RelativeLogits(Leaf, nn.Module):
    """A table of relative positions that acts through the query: ``query[q] @ weight[row]``.

    ``weight`` is [rows, head_dim], or [num_heads, rows, head_dim], initialised from N(0, 0.02). The
    tables of several axes follow one another, as SAM's ``rel_pos_h`` and ``rel_pos_w``; their
    logits are added.

    Args:
        num_buckets: Rows of the table; of several axes, those of each axis' table. Of a "grid", the
            numbers of differences of each axis, ``2 * size - 1``; the table has their product.
        head_dim: Columns of the table.
        num_heads: Give each head a table; None: heads share one.
        buckets: How distances map to rows; see :func:`posembed.functional.relative_buckets`.
        max_distance: For "t5" and "deberta": longer distances share a row.
        bidirectional: Give keys after the query their own rows.
        causal: Hide keys after the query.
        by: "key": the table multiplies keys (DeBERTa's second term).
        scale: Multiplies the logits.
        device, dtype: Device and dtype of the table.

    Raises:
        ValueError: Options are inconsistent.

    Examples:
        >>> import torch, posembed as pe
        >>> shaw = pe.RelativeLogits(2 * 16 + 1, 64)
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64)
        >>> scores = shaw(query, scores=query @ key.mT) / 8
        >>> y = scores.softmax(-1) @ value
        >>> sam = pe.RelativeLogits((2 * 14 - 1, 2 * 14 - 1), 64, buckets="bert")
        >>> cells = torch.cartesian_prod(torch.arange(14), torch.arange(14)).T
        >>> sam(torch.randn(1, 8, 196, 64), query_positions=cells, key_positions=cells).shape
        torch.Size([1, 8, 196, 196])
    """

    def __init__(
        self,
        num_buckets: int | Sequence[int],
        head_dim: int,
        *,
        num_heads: int | None = None,
        buckets: RelativeBuckets = "clipped",
        max_distance: int = 128,
        bidirectional: bool = True,
        causal: bool = False,
        by: By = "query",
        scale: float = 1.0,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = num_buckets if isinstance(num_buckets, Iterable) else (num_buckets,)
        self.num_buckets = wholes("num_buckets", given)
        self.head_dim = whole("head_dim", head_dim, 1)
        self.num_heads = None if num_heads is None else whole("num_heads", num_heads, 1)
        self.buckets = buckets
        self.max_distance = whole("max_distance", max_distance)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.causal = flag("causal", causal)
        self.by: By = "key" if by_key(by) else "query"
        self.scale = finite("scale", scale)
        if not self.num_buckets:
            raise ValueError("num_buckets: expected a number for each axis, got none")
        for count in self.num_buckets:
            check_rule(self, count)
        count = math.prod(self.num_buckets) if buckets == "grid" else sum(self.num_buckets)
        sizes = [count, head_dim] if num_heads is None else [num_heads, count, head_dim]
        self.weight = nn.Parameter(torch.empty(sizes, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 0.02)."""
        nn.init.normal_(self.weight, std=0.02)

    def rows(
        self, query_length: int, key_length: int, **positions: Unpack[ScorePositions]
    ) -> Tensor:
        """The row of each query and key; see :func:`posembed.functional.relative_rows`."""
        return rows_of(self, query_length, key_length, causal=self.causal, **positions)

    def _rows_of(
        self, query: Tensor, other_length: int | None, positions: ScorePositions
    ) -> tuple[Tensor, int, int]:
        check_tensors(query=query)
        if query.dim() != 4:
            raise ValueError(
                f"query: expected [batch, heads, queries, dim], got {list(query.shape)}"
            )
        own = query.shape[2]
        other = own if other_length is None else other_length
        queries, keys = (other, own) if self.by == "key" else (own, other)
        return self.rows(queries, keys, **positions), queries, keys

    def forward(
        self,
        query: Tensor,
        other_length: int | None = None,
        *,
        scores: Tensor | None = None,
        **positions: Unpack[ScorePositions],
    ) -> Tensor:
        """The logits, or their sum with ``scores``.

        Args:
            query: [batch, heads, queries, head_dim]; with ``by="key"``, the keys.
            other_length: Number of keys, or of queries with ``by="key"``; default: that of scores,
                or of ``query``.
            scores: [batch, heads, queries, keys].
            positions: Positions, documents and mask; see
                :func:`posembed.functional.relative_rows`.

        Returns:
            [batch, heads, queries, keys] in the dtype of ``query``.

        Raises:
            ValueError: Shapes are incompatible.
            TypeError: Dtypes differ.
        """
        if other_length is None and isinstance(scores, Tensor) and scores.dim() == 4:
            other_length = scores.shape[2 if self.by == "key" else 3]
        rows, _, _ = self._rows_of(query, other_length, positions)
        weight: Tensor = self._parameter("weight")
        return logits_of(query, weight, rows, scores, self.scale, self.by == "key")

    def add_(self, scores: Tensor, query: Tensor, **positions: Unpack[ScorePositions]) -> Tensor:
        """Adds the logits to ``scores`` in place, for inference; returns ``scores``.

        Raises:
            RuntimeError: A gradient would be lost.
            ValueError: Shapes are incompatible.
            TypeError: Dtypes differ.
        """
        check_tensors(scores=scores)
        if scores.dim() != 4:
            raise ValueError(
                f"scores: expected [batch, heads, queries, keys], got {list(scores.shape)}"
            )
        rows = self.rows(scores.shape[2], scores.shape[3], **positions)
        weight: Tensor = self._parameter("weight")
        return functional.relative_logits_(
            scores, query, weight, rows, by=self.by, scale=self.scale
        )

    def score_mod(
        self, query: Tensor, other_length: int | None = None, **positions: Unpack[ScorePositions]
    ) -> Callable[..., Tensor]:
        """A ``score_mod`` for ``torch.nn.attention.flex_attention``.

        It keeps the products [batch, heads, queries, rows] and the rows of all pairs [queries,
        keys] for as long as it exists. Arguments are as in :meth:`forward`; gradients flow to the
        query and the table.

        Examples:
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> import torch, posembed as pe
            >>> query, key, value = torch.randn(3, 1, 4, 49, 16)
            >>> shaw = pe.RelativeLogits(2 * 8 + 1, 16)
            >>> y = flex_attention(query, key, value, score_mod=shaw.score_mod(query))
        """
        found, queries, keys = self._rows_of(query, other_length, positions)
        # rows: [axes, batch or 1, queries, keys]
        batch = found.shape[-3:-2] or (1,)
        rows = found.reshape(-1 if found.dim() == 4 else 1, *batch, queries, keys)
        products = query @ self._parameter("weight").mT * self.scale
        keyed, shared = self.by == "key", rows.shape[1] == 1

        def logits(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            for axis in range(rows.shape[0]):
                row = rows[axis, b * 0 if shared else b, q, k]
                logit = products[b, h, k if keyed else q, row.clamp_min(0)]
                score = score + torch.where(row < 0, torch.zeros_like(logit), logit)
                score = torch.where(row == -2, torch.full_like(score, -math.inf), score)
            return score

        return logits

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        first = self.num_buckets[0] if len(self.num_buckets) == 1 else self.num_buckets
        usual: dict[str, Any] = {"num_heads": None, "buckets": "clipped"}
        if self.buckets in ("t5", "deberta"):
            usual["max_distance"] = None
        usual |= {"bidirectional": True, "causal": False, "by": "query", "scale": 1.0}
        return written(self, f"{first}, {self.head_dim}", **usual)
