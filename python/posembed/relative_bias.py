"""RelativePositionBias: a learned score bias for each head and distance bucket.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
(T5), arXiv:1910.10683.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posembed import functional
from posembed._leaf import Leaf
from posembed._validation import flag, whole
from posembed.functional import Device, RelativeBuckets


class RelativePositionBias(Leaf, nn.Module):
    """A table of attention-score biases, ``weight`` [num_buckets, num_heads].

    Initialised from N(0, 0.02). T5's table is ``relative_attention_bias.weight`` of the first layer
    of its encoder (``bidirectional=True``) and of its decoder (``bidirectional=False``); all layers
    share it.

    Args:
        num_heads: Columns of the table.
        num_buckets: Rows of the table: even for "t5" in both directions; odd,
            ``2 * max_positions - 1``, for "bert".
        max_distance: For "t5": longer distances share a bucket.
        bidirectional: Give keys after the query their own buckets.
        buckets: "t5" or "bert"; see :func:`posembed.functional.relative_buckets`.
        device: Device of the table.
        dtype: Dtype of the table.

    Raises:
        ValueError: Options are inconsistent.

    Examples:
        >>> import torch, posembed as pe
        >>> bias = pe.RelativePositionBias(8)
        >>> query, key, value = torch.randn(3, 2, 8, 16, 64)
        >>> y = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias(16))
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        buckets: RelativeBuckets = "t5",
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = whole("num_heads", num_heads)
        if num_heads < 0:
            raise ValueError(f"num_heads: expected 0 or more, got {num_heads}")
        self.num_buckets = whole("num_buckets", num_buckets)
        self.max_distance = whole("max_distance", max_distance)
        self.bidirectional = flag("bidirectional", bidirectional)
        self.buckets = buckets
        functional.relative_buckets(  # checks the options
            torch.zeros(0, dtype=torch.int64, device="cpu"),
            num_buckets,
            max_distance=max_distance,
            bidirectional=bidirectional,
            kind=buckets,
        )
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from N(0, 0.02)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self, query_length: int, key_length: int | None = None, *, query_offset: int | None = None
    ) -> Tensor:
        """The bias that SDPA takes as ``attn_mask``.

        Args:
            query_length: Number of queries.
            key_length: Number of keys; default: ``query_length``.
            query_offset: Position of the first query among the keys; default: the last query aligns
                with the last key.

        Returns:
            [num_heads, query_length, key_length] in the dtype of the table.
        """
        return functional.relative_bias(
            self.weight,
            query_length,
            query_length if key_length is None else key_length,
            query_offset=query_offset,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
            kind=self.buckets,
        )

    def extra_repr(self) -> str:
        """The options, in the C++ module's format."""
        parts = [
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        ]
        if not self.bidirectional:
            parts.append("bidirectional=False")
        if self.buckets != "t5":
            parts.append(f"buckets={self.buckets!r}")
        return ", ".join(parts)
