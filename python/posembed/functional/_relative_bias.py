"""Functional relative position bias: T5's distances, and Swin's windows in two dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._learned import Grid, Window
from posembed.functional._options import Device, RelativeBuckets, ResamplingMethod
from posembed.glue.gate import gated

_RELATIVE_BIAS = gated(torch.ops.posembed.relative_bias.default, sharded=True)
_RELATIVE_BUCKETS = gated(torch.ops.posembed.relative_buckets.default)
_RELATIVE_LOG_DISTANCES = gated(torch.ops.posembed.relative_log_distances.default)
_RELATIVE_WINDOW_BIAS = gated(torch.ops.posembed.relative_window_bias.default, sharded=True)
_RELATIVE_WINDOW_RESAMPLE = gated(torch.ops.posembed.relative_window_resample.default, sharded=True)


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
        num_buckets: Number of buckets: even for "deberta" and bidirectional "t5", odd for other
            bidirectional kinds.
        max_distance: For "t5" and "deberta": longer distances share a bucket.
        bidirectional: Give keys after the query their own buckets; otherwise they share the bucket
            of distance 0.
        kind: "t5": a bucket for each short distance, then logarithmically wider ones (Raffel et
            al., arXiv:1910.10683). "bert": a bucket for each distance, query minus key; longer
            distances share the outermost bucket. "clipped": the same for key minus query (Shaw et
            al., arXiv:1803.02155). "deberta": as "bert" up to ``num_buckets // 4``, then
            logarithmically wider (He et al., arXiv:2006.03654). "band": as "bert", and -1 for
            longer distances. "grid": as "bert", for an axis of a grid.

    Returns:
        int64 [...], 0 to num_buckets - 1; -1 outside a band.

    Raises:
        ValueError: Options are inconsistent.
        TypeError: Distances are not int32 or int64.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.relative_buckets(torch.tensor([-200, -9, -1, 0, 1, 9, 200])).tolist()
        [15, 8, 1, 0, 17, 24, 31]
    """
    return _RELATIVE_BUCKETS(distances, num_buckets, max_distance, bidirectional, kind)


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
    return _RELATIVE_BIAS(weight, *lengths, *options)


def relative_window_bias(weight: Tensor, window: Window, *, class_token: bool = False) -> Tensor:
    """The attention-score bias of a window in two or three dimensions, with gradients.

    The row of a query and a key is ``(y + rows - 1) * (2 * columns - 1) + x + columns - 1`` for
    their differences y and x, query minus key (Swin, arXiv:2103.14030).

    Args:
        weight: float32, float64, bfloat16 or float16
            [(2 * rows - 1) * (2 * columns - 1), num_heads]; three more rows with a class token, for
            the scores from it, to it and with itself (BEiT, arXiv:2106.08254).
        window: Rows and columns, or frames, rows and columns, whose differences are then numbered
            in that order (Video Swin, arXiv:2106.13230).
        class_token: A token stands before the cells.

    Returns:
        [num_heads, tokens, tokens] in the dtype of ``weight``: the cells row by row, after the
        class token.

    Raises:
        ValueError: Shapes do not match.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.arange(3.0).unsqueeze(1)  # one head, a window of 1 x 2
        >>> pe.functional.relative_window_bias(weight, (1, 2))
        tensor([[[1., 0.],
                 [2., 1.]]])
    """
    return _RELATIVE_WINDOW_BIAS(weight, window, class_token)


def relative_window_resample(
    weight: Tensor,
    window: Grid,
    new_window: Grid,
    *,
    method: ResamplingMethod = "bilinear",
    align_corners: bool = False,
    antialias: bool = False,
) -> Tensor:
    """The table of a window resampled to that of another one; gradients flow to ``weight``.

    Args:
        weight: As in :func:`relative_window_bias`; rows of a class token do not change.
        window: Rows and columns of the window.
        new_window: Those of the other one.
        method: As in :func:`learned_resample`, like the other options.
        align_corners: The corners of both tables are the same points.
        antialias: Average over all rows that a smaller table merges.

    Returns:
        The rows of ``new_window``, [(2 * rows - 1) * (2 * columns - 1), num_heads], and those of
        the class token.

    Raises:
        ValueError: Shapes do not match, or an option is unknown.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.randn(13 * 13, 4)
        >>> pe.functional.relative_window_resample(weight, (7, 7), (12, 12)).shape
        torch.Size([529, 4])
    """
    options = (window, new_window, method, align_corners, antialias)
    return _RELATIVE_WINDOW_RESAMPLE(weight, *options)


def relative_log_distances(
    window: Grid,
    scale_window: Grid | tuple[()] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: Device | None = None,
) -> Tensor:
    """The inputs of SwinV2's MLP (arXiv:2111.09883), or timm's: logarithms of differences.

    Args:
        window: Rows and columns.
        scale_window: The window whose largest differences count as 8; default: ``window``. ():
            natural logarithms, unscaled, as in timm's Swin V2 Cr.
        dtype: Floating-point dtype of the result.
        device: Device of the result.

    Returns:
        [(2 * rows - 1) * (2 * columns - 1), 2]: ``sign(d) * log8(abs(d) + 1)`` of the scaled
        differences d of rows and of columns, query minus key; ``sign(d) * ln(abs(d) + 1)`` of
        unscaled ones.

    Raises:
        ValueError: A window is not one.
        TypeError: The dtype is not supported.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.relative_log_distances((1, 8))[::7, 1].round(decimals=2)
        tensor([-1.0600,  0.0000,  1.0600])
    """
    like = torch.empty(0, dtype=dtype, device=device)
    return _RELATIVE_LOG_DISTANCES(like, window, window if scale_window is None else scale_window)
