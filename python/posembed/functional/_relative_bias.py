"""Functional relative position bias (T5)."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._gate import gated
from posembed.functional._options import RelativeBuckets
from posembed.sharding import call, is_sharded

_RELATIVE_BIAS = gated(torch.ops.posembed.relative_bias.default)
_RELATIVE_BUCKETS = gated(torch.ops.posembed.relative_buckets.default)


def relative_buckets(
    distances: Tensor,
    num_buckets: int = 32,
    *,
    max_distance: int = 128,
    bidirectional: bool = True,
    kind: RelativeBuckets = "t5",
) -> Tensor:
    """The bucket of each key-query distance.

    Args:
        distances: int32 or int64 [...]: the position of the key minus that of the query.
        num_buckets: Number of buckets: even for bidirectional "t5", odd for "bert".
        max_distance: For "t5": longer distances share a bucket.
        bidirectional: Give keys after the query their own buckets; otherwise they share the bucket
            of distance 0.
        kind: "t5": a bucket for each short distance, then logarithmically wider ones (Raffel et
            al., arXiv:1910.10683). "bert": a bucket for each distance; longer distances share the
            outermost bucket (Shaw et al., arXiv:1803.02155).

    Returns:
        int64 [...], 0 to num_buckets - 1.

    Raises:
        ValueError: Options are inconsistent.
        TypeError: Distances are not int32 or int64.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.relative_buckets(torch.tensor([-200, -9, -1, 0, 1, 9, 200])).tolist()
        [15, 8, 1, 0, 17, 24, 31]
    """
    return _RELATIVE_BUCKETS(  # type: ignore[no-any-return]
        distances, num_buckets, max_distance, bidirectional, kind
    )


def relative_bias(
    weight: Tensor,
    query_length: int,
    key_length: int,
    *,
    query_offset: int | None = None,
    max_distance: int = 128,
    bidirectional: bool = True,
    kind: RelativeBuckets = "t5",
) -> Tensor:
    """The attention-score bias by distance; gradients flow to ``weight``.

    Args:
        weight: float32, float64, bfloat16 or float16 [num_buckets, num_heads].
        query_length: Number of queries.
        key_length: Number of keys.
        query_offset: Position of the first query among the keys; default: the last query aligns
            with the last key.
        max_distance: As in :func:`relative_buckets`.
        bidirectional: As in :func:`relative_buckets`.
        kind: As in :func:`relative_buckets`.

    Returns:
        [num_heads, query_length, key_length] in the dtype of ``weight``.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.arange(32.0).unsqueeze(1)  # one head, whose biases are the buckets
        >>> pe.functional.relative_bias(weight, 2, 4)
        tensor([[[ 2.,  1.,  0., 17.],
                 [ 3.,  2.,  1.,  0.]]])
    """
    lengths = (query_length, key_length, query_offset)
    options = (max_distance, bidirectional, kind)
    if is_sharded(weight):
        return call("relative_bias", weight, *lengths, *options)  # type: ignore[no-any-return]
    return _RELATIVE_BIAS(weight, *lengths, *options)  # type: ignore[no-any-return]
