"""Functional ALiBi: slopes, and the bias as a tensor, added to scores, or fused into softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.functional._options import Device
from posembed.glue.gate import gated
from posembed.glue.other_names import unexpected
from posembed.specifications.score_positions import ScorePositions

_ALIBI_ATTENTION = gated(torch.ops.posembed.alibi_attention.default, sharded=True)
_ALIBI_BIAS_OUT = gated(torch.ops.posembed.alibi_bias_out.default)
_ALIBI_CHECK_ATTENTION = gated(torch.ops.posembed.alibi_check_attention.default)
_ALIBI_LSE_CORRECTION = gated(torch.ops.posembed.alibi_lse_correction.default, sharded=True)
_ALIBI_POSITIONS = gated(torch.ops.posembed.alibi_positions.default)
_ALIBI_SCALED_SLOPES = gated(torch.ops.posembed.alibi_scaled_slopes.default, sharded=True)
_ALIBI_SLOPES = gated(torch.ops.posembed.alibi_slopes.default)
_ALIBI_BIAS = gated(torch.ops.posembed.alibi_bias.default, sharded=True)
_ALIBI_ADD = gated(torch.ops.posembed.alibi_add.default, sharded=True)
_ALIBI_ADD_ = gated(torch.ops.posembed.alibi_add_.default, sharded=True)
_ALIBI_SOFTMAX = gated(torch.ops.posembed.alibi_softmax.default, sharded=True)
_ALIBI_SOFTMAX_ = gated(torch.ops.posembed.alibi_softmax_.default, sharded=True)


def score_options(
    causal: bool,
    positions_from_mask: bool,
    query_offset: int | Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    apply_mask: bool = True,
    **unknown: Any,
) -> tuple[Any, ...]:
    """The operators' last arguments, without trailing defaults."""
    if unknown:
        raise unexpected(unknown)
    positions: tuple[Any, ...] = (query_positions, key_positions, cu_seqlens)
    if isinstance(query_offset, Tensor):
        rest = (positions_from_mask, *positions, apply_mask, query_offset)
        return (causal, None, attention_mask, *rest)
    no_positions = query_positions is None and key_positions is None and cu_seqlens is None
    if no_positions and apply_mask is True:
        if attention_mask is not None:
            return causal, query_offset, attention_mask, positions_from_mask
        return () if causal is True and query_offset is None else (causal, query_offset)
    return (causal, query_offset, attention_mask, positions_from_mask, *positions, apply_mask)


def alibi_slopes(
    num_heads: int,
    *,
    kind: str = "paper",
    max_bias: float = 8.0,
    total_heads: int | None = None,
    head_start: int = 0,
    values: Sequence[float] = (),
    factor: float = 1.0,
    device: Device | None = None,
) -> Tensor:
    """The slopes of heads, correctly rounded. Press et al., arXiv:2108.12409.

    Args:
        num_heads: Number of heads.
        kind: "paper": the paper's series, interleaved if the number of heads is not a power of two.
            "geometric": ``2 ** (-max_bias * (head + 1) / total_heads)``.
        max_bias: If the number of heads is a power of two, the last slope is ``2 ** -max_bias``.
        total_heads: Number of heads in the whole model, if these are only some of them.
        head_start: Index of the first of these heads in the whole model. If equal shards do not
            divide the heads, the last one is padded with slopes of 0.
        values: The slopes themselves: one for each of total_heads, or two, for keys left and right
            of the query.
        factor: Divides all slopes.
        device: Default: CPU.

    Returns:
        float32 [num_heads], or [2, num_heads] with two values per head.

    Raises:
        ValueError: No heads, heads outside total_heads, a wrong number of values, or max_bias
            beside values.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    where = None if device is None else torch.device(device)
    options = (total_heads, head_start, list(values), factor, where)
    return _ALIBI_SLOPES(num_heads, kind, max_bias, *options)


def alibi_scaled_slopes(slopes: Tensor, key_length: int, train_length: int) -> Tensor:
    """Scales slopes as JAIS and BTLM do if there are more keys than in training.

    Args:
        slopes: Floating-point [heads] or [2, heads].
        key_length: Number of keys.
        train_length: Number of keys up to which slopes do not change.

    Returns:
        ``slopes``, divided by ``key_length / train_length`` if that is more than 1.

    Raises:
        ValueError: train_length is not positive.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_scaled_slopes(pe.functional.alibi_slopes(4), 4096, 2048)
        tensor([0.1250, 0.0312, 0.0078, 0.0020])
    """
    return _ALIBI_SCALED_SLOPES(slopes, key_length, train_length)


def alibi_positions(attention_mask: Tensor) -> Tensor:
    """Positions that count only visible keys, from 0, as in Bloom; masked keys get 0.

    Args:
        attention_mask: bool or integers [key_length] or [batch, key_length]; 0 marks padding, which
            may be anywhere.

    Returns:
        int64, in the shape of attention_mask.

    Raises:
        ValueError: The mask is a scalar.
        TypeError: The mask is floating-point.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.alibi_positions(torch.tensor([0, 0, 1, 1, 0, 1]))
        tensor([0, 0, 0, 1, 0, 2])
    """
    return _ALIBI_POSITIONS(attention_mask)


def alibi_bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    *,
    causal: bool = True,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """The bias that SDPA takes as ``attn_mask``; gradients flow to slopes.

    It is computed from distances in float32 and rounded once, so it is accurate at any position.

    Args:
        slopes: Floating-point [heads]; without ``causal`` also [2, heads], for keys left and right
            of the query. For each sample: [batch, 1 or 2, heads].
        query_length: Number of queries.
        key_length: Number of keys.
        causal: The bias is ``-slope * (i - j)``, and keys after the query are masked; otherwise it
            is ``-slope * abs(i - j)``.
        dtype: Default: that of slopes.
        out: Output tensor, for inference: any strides, but the last dimension must be contiguous.
        positions_from_mask: If an attention_mask but no positions are passed, count only visible
            keys, as :func:`alibi_positions` does.
        **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

    Returns:
        [heads, query_length, key_length]; [batch, heads, query_length, key_length] if slopes,
        positions or mask have a batch dimension; ``out`` if passed.

    Raises:
        ValueError: Shapes or lengths are incompatible, or a distance has more than 31 bits; or,
            with ``out``, slopes require grad in grad mode.
        TypeError: A dtype is not supported.
        IndexError: A position has more than 31 bits.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_bias(pe.functional.alibi_slopes(8), 2, 3)[0]
        tensor([[-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])
    """
    options = score_options(causal, positions_from_mask, **positions)
    return bias(slopes, query_length, key_length, dtype, out, options)


def bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    dtype: torch.dtype | None,
    out: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """:func:`alibi_bias` with the last arguments of :func:`score_options`."""
    if out is None and dtype is None and not options:
        return _ALIBI_BIAS(slopes, query_length, key_length)
    if out is None:
        return _ALIBI_BIAS(slopes, query_length, key_length, dtype, *options)
    if dtype not in (None, out.dtype):
        raise TypeError(f"dtype: expected none or that of out, {out.dtype}, got {dtype}")
    _ALIBI_BIAS_OUT(out, slopes, query_length, key_length, *options)
    return out


def alibi_add(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """Computes scores * scale + bias in one pass; gradients flow to scores and slopes.

    Args:
        scores: Floating-point [batch, heads, query, key] or [heads, query, key].
        slopes: Floating-point [heads]; without ``causal`` also [2, heads], for keys left and right
            of the query. For each sample: [batch, 1 or 2, heads].
        scale: Multiplies the scores, not the bias.
        causal: The bias is ``-slope * (i - j)``, and keys after the query are masked; otherwise it
            is ``-slope * abs(i - j)``.
        positions_from_mask: If an attention_mask but no positions are passed, count only visible
            keys, as :func:`alibi_positions` does.
        **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

    Returns:
        A tensor with the shape and dtype of scores.

    Raises:
        ValueError, TypeError, IndexError: See :func:`alibi_bias`.

    Examples:
        >>> import torch, posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_add(torch.ones(8, 2, 3), slopes, scale=0.5)[0]
        tensor([[ 0.0000,  0.5000,    -inf],
                [-0.5000,  0.0000,  0.5000]])
    """
    options = score_options(causal, positions_from_mask, **positions)
    return _ALIBI_ADD(scores, slopes, scale, *options)


def alibi_add_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """In-place :func:`alibi_add` for inference; returns ``scores``.

    Scores may have any strides, but the last dimension must be contiguous.

    Returns:
        ``scores``.

    Raises:
        ValueError: Shapes are incompatible; or grad mode is on and an argument requires grad.
    """
    options = score_options(causal, positions_from_mask, **positions)
    _ALIBI_ADD_(scores, slopes, scale, *options)
    return scores


def alibi_softmax(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """Attention weights: softmax(scores * scale + bias) over keys, in one pass over scores.

    Gradients flow to scores and slopes. The arguments are those of :func:`alibi_add`.

    Returns:
        A tensor with the shape and dtype of scores. If all keys of a query are masked, its weights
        are 0.

    Raises:
        ValueError, TypeError, IndexError: See :func:`alibi_bias`.

    Examples:
        >>> import torch, posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_softmax(torch.zeros(8, 2, 3), slopes)[0]
        tensor([[0.3775, 0.6225, 0.0000],
                [0.1863, 0.3072, 0.5065]])
    """
    options = score_options(causal, positions_from_mask, **positions)
    return _ALIBI_SOFTMAX(scores, slopes, scale, *options)


def alibi_softmax_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """In-place :func:`alibi_softmax` for inference; returns ``scores``.

    Scores may have any strides, but the last dimension must be contiguous.

    Returns:
        ``scores``.

    Raises:
        ValueError: Shapes are incompatible; or grad mode is on and an argument requires grad.
    """
    options = score_options(causal, positions_from_mask, **positions)
    _ALIBI_SOFTMAX_(scores, slopes, scale, *options)
    return scores


def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """Computes softmax(query key^T scale + bias) value; gradients flow to all inputs.

    The scores are written to memory; one kernel applies scale, bias, mask and softmax.

    Args:
        query: [batch, num_heads, seq, head_dim].
        key: [batch, num_heads or a divisor of it, keys, head_dim].
        value: [batch, heads of key, keys, value_dim].
        slopes: Floating-point [num_heads]; without ``causal`` also [2, num_heads], for keys left
            and right of the query. For each sample: [batch, 1 or 2, num_heads].
        scale: Default: ``head_dim ** -0.5``.
        dropout: Probability of zeroing a weight.
        causal: The bias is ``-slope * (i - j)``, and keys after the query are masked; otherwise it
            is ``-slope * abs(i - j)``.
        positions_from_mask: If an attention_mask but no positions are passed, count only visible
            keys, as :func:`alibi_positions` does.
        **positions: See :class:`posembed.specifications.score_positions.ScorePositions`.

    Returns:
        [batch, num_heads, seq, value_dim].

    Raises:
        ValueError: Shapes are incompatible, or dropout is not a probability.
        TypeError: Dtypes differ outside autocast.

    Examples:
        >>> import torch, posembed as pe
        >>> query, key = torch.randn(2, 8, 1, 64), torch.randn(2, 4, 100, 64)
        >>> pe.functional.alibi_attention(query, key, key, pe.functional.alibi_slopes(8)).shape
        torch.Size([2, 8, 1, 64])
    """
    options = score_options(causal, positions_from_mask, **positions)
    return _ALIBI_ATTENTION(query, key, value, slopes, scale, dropout, *options)


def check_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
    """Makes the checks of :func:`alibi_attention`, for other attention backends."""
    _ALIBI_CHECK_ATTENTION(query, key, value, dropout)


def alibi_lse_correction(
    slopes: Tensor,
    query_length: int,
    *,
    query_start: int,
    key_start: int,
    form: str = "distance",
    causal: bool = True,
) -> Tensor:
    """Corrects the log-sum-exp of a block whose bias was computed from block-local indices.

    Ring and blocked attention process blocks of keys separately and merge the results by their
    log-sum-exps. If a kernel knows only the indices within its block, its bias is off by a constant
    in each row. The block's outputs are correct, and adding this correction to its log-sum-exp
    gives that of the bias ``-slope * abs(query position - key position)``.

    Args:
        slopes: Floating-point [heads] or [2, heads].
        query_length: Number of queries in the block.
        query_start: Position of the block's first query.
        key_start: Position of the block's first key.
        form: The bias that the kernel added for query i and key j, numbered within the block:
            "distance": ``slope * (j - i)``; "key": ``slope * j``, as causal FlashAttention-2 does.
            For keys after the queries, the same with the opposite sign.
        causal: The correction is -inf if the block begins after the query, so the query ignores it.

    Returns:
        [heads, query_length], to be added to the log-sum-exps of the queries.

    Raises:
        ValueError: The form is unknown, or slopes have another shape.
        TypeError: The dtype of slopes is not supported.

    Examples:
        >>> import posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_lse_correction(slopes, 2, query_start=4, key_start=2)[0]
        tensor([-1., -1.])
    """
    return _ALIBI_LSE_CORRECTION(slopes, query_length, query_start, key_start, form, causal)
