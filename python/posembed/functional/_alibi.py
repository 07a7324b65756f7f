"""ALiBi as functions: slopes, and the bias as a tensor, added to scores, or inside a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.functional._options import Device, is_sharded, sharded
from posembed.score_positions import ScorePositions


def _options(
    causal: bool,
    positions_from_mask: bool,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    apply_mask: bool = True,
) -> tuple[Any, ...]:
    """The last arguments of the schemas, without trailing defaults."""
    no_positions = query_positions is None and key_positions is None and cu_seqlens is None
    if no_positions and apply_mask is True:
        if attention_mask is not None:
            return causal, query_offset, attention_mask, positions_from_mask
        return () if causal is True and query_offset is None else (causal, query_offset)
    positions = (query_positions, key_positions, cu_seqlens)
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
        max_bias: With a power of two of heads, the last has slope ``2 ** -max_bias``.
        total_heads: Heads of the whole model, if these are only some of them.
        head_start: The index of the first of these heads in the whole model.
        values: The slopes themselves: one for each of total_heads, or two, left and right of the
            query.
        factor: Divides all slopes.
        device: Default: CPU.

    Returns:
        float32 [num_heads], or [2, num_heads] with two values per head.

    Raises:
        ValueError: No heads, heads outside total_heads, or another number of values.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    return torch.ops.posembed.alibi_slopes.default(  # type: ignore[no-any-return]
        num_heads,
        kind,
        max_bias,
        total_heads,
        head_start,
        list(values),
        factor,
        None if device is None else torch.device(device),
    )


def alibi_scaled_slopes(slopes: Tensor, key_length: int, train_length: int) -> Tensor:
    """The slopes of JAIS and BTLM, which divide them if there are more keys than in training.

    Args:
        slopes: Floating [heads] or [2, heads].
        key_length: Number of keys.
        train_length: Number of keys up to which slopes stay as they are.

    Returns:
        ``slopes``, divided by ``key_length / train_length`` if that is more than 1.

    Raises:
        ValueError: train_length is not positive.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_scaled_slopes(pe.functional.alibi_slopes(4), 4096, 2048)
        tensor([0.1250, 0.0312, 0.0078, 0.0020])
    """
    if is_sharded(slopes):
        lengths = {"key_length": key_length, "train_length": train_length}
        return sharded().of_slopes(alibi_scaled_slopes, slopes, **lengths)  # type: ignore[no-any-return]
    return torch.ops.posembed.alibi_scaled_slopes.default(  # type: ignore[no-any-return]
        slopes, key_length, train_length
    )


def alibi_positions(attention_mask: Tensor) -> Tensor:
    """Positions that number only visible keys, from 0, as in Bloom; hidden keys have 0.

    Args:
        attention_mask: bool or integers [key_length] or [batch, key_length]; 0: padding, on either
            side or in between.

    Returns:
        int64, shaped like attention_mask.

    Raises:
        ValueError: The mask has no dimension.
        TypeError: The mask is floating.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.alibi_positions(torch.tensor([0, 0, 1, 1, 0, 1]))
        tensor([0, 0, 0, 1, 0, 2])
    """
    return torch.ops.posembed.alibi_positions.default(attention_mask)  # type: ignore[no-any-return]


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

    It is computed from distances in float32 and rounded once, so that it is accurate at any
    position.

    Args:
        slopes: Floating [heads], or [2, heads] for keys left and right of the query.
        query_length: Number of queries.
        key_length: Number of keys.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        dtype: Default: that of slopes.
        out: Memory for the result, for inference: any strides with a contiguous last dimension.
        positions_from_mask: With an attention_mask and without positions, only visible keys are
            numbered, as by :func:`alibi_positions`.
        **positions: See :class:`posembed.score_positions.ScorePositions`.

    Returns:
        [heads, query_length, key_length]; [batch, heads, query_length, key_length] if positions or
        mask have a batch; ``out`` if given.

    Raises:
        ValueError: Shapes or lengths do not fit, or a distance has more than 31 bits; or, with
            ``out``, slopes require grad in grad mode.
        TypeError: A dtype is not supported.
        IndexError: A position has more than 31 bits.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_bias(pe.functional.alibi_slopes(8), 2, 3)[0]
        tensor([[-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])
    """
    if is_sharded(slopes) and out is None:
        call = {"causal": causal, "dtype": dtype, "positions_from_mask": positions_from_mask}
        lengths = (query_length, key_length)
        return sharded().of_slopes(alibi_bias, slopes, *lengths, **call, **positions)  # type: ignore[no-any-return]
    options = _options(causal, positions_from_mask, **positions)
    if out is None:
        return torch.ops.posembed.alibi_bias.default(  # type: ignore[no-any-return]
            slopes, query_length, key_length, dtype, *options
        )
    if dtype not in (None, out.dtype):
        raise TypeError(f"dtype: expected none or that of out, {out.dtype}, got {dtype}")
    torch.ops.posembed.alibi_bias_out.default(out, slopes, query_length, key_length, *options)
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
    """Scores times scale plus bias in one pass over memory; gradients flow to scores and slopes.

    Args:
        scores: Floating [batch, heads, query, key] or [heads, query, key].
        slopes: Floating [heads], or [2, heads] for keys left and right of the query.
        scale: Multiplies the scores, not the bias.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        positions_from_mask: With an attention_mask and without positions, only visible keys are
            numbered, as by :func:`alibi_positions`.
        **positions: See :class:`posembed.score_positions.ScorePositions`.

    Returns:
        Shape and dtype of scores.

    Raises:
        ValueError, TypeError, IndexError: As :func:`alibi_bias`.

    Examples:
        >>> import torch, posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_add(torch.ones(8, 2, 3), slopes, scale=0.5)[0]
        tensor([[ 0.0000,  0.5000,    -inf],
                [-0.5000,  0.0000,  0.5000]])
    """
    if is_sharded(scores) or is_sharded(slopes):
        call = {"scale": scale, "causal": causal, "positions_from_mask": positions_from_mask}
        return sharded().of_scores(alibi_add, scores, slopes, **call, **positions)  # type: ignore[no-any-return]
    options = _options(causal, positions_from_mask, **positions)
    return torch.ops.posembed.alibi_add.default(scores, slopes, scale, *options)  # type: ignore[no-any-return]


def alibi_add_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """:func:`alibi_add` in place; returns ``scores``. For inference.

    Scores may have any strides with a contiguous last dimension.

    Returns:
        ``scores``.

    Raises:
        ValueError: Shapes do not fit; or grad mode is on and an argument requires grad.
    """
    if is_sharded(scores) or is_sharded(slopes):
        call = {"scale": scale, "causal": causal, "positions_from_mask": positions_from_mask}
        sharded().of_scores(alibi_add_, scores, slopes, **call, **positions)
        return scores
    options = _options(causal, positions_from_mask, **positions)
    torch.ops.posembed.alibi_add_.default(scores, slopes, scale, *options)
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
    """Attention weights, softmax(scores * scale + bias) over keys, in one pass over scores.

    Gradients flow to scores and slopes. Arguments as in :func:`alibi_add`.

    Returns:
        Shape and dtype of scores. A query that sees no key has weights 0.

    Raises:
        ValueError, TypeError, IndexError: As :func:`alibi_bias`.

    Examples:
        >>> import torch, posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_softmax(torch.zeros(8, 2, 3), slopes)[0]
        tensor([[0.3775, 0.6225, 0.0000],
                [0.1863, 0.3072, 0.5065]])
    """
    if is_sharded(scores) or is_sharded(slopes):
        call = {"scale": scale, "causal": causal, "positions_from_mask": positions_from_mask}
        return sharded().of_scores(alibi_softmax, scores, slopes, **call, **positions)  # type: ignore[no-any-return]
    options = _options(causal, positions_from_mask, **positions)
    return torch.ops.posembed.alibi_softmax.default(scores, slopes, scale, *options)  # type: ignore[no-any-return]


def alibi_softmax_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = True,
    positions_from_mask: bool = False,
    **positions: Unpack[ScorePositions],
) -> Tensor:
    """:func:`alibi_softmax` in place; returns ``scores``. For inference.

    Scores may have any strides with a contiguous last dimension.

    Returns:
        ``scores``.

    Raises:
        ValueError: Shapes do not fit; or grad mode is on and an argument requires grad.
    """
    if is_sharded(scores) or is_sharded(slopes):
        call = {"scale": scale, "causal": causal, "positions_from_mask": positions_from_mask}
        sharded().of_scores(alibi_softmax_, scores, slopes, **call, **positions)
        return scores
    options = _options(causal, positions_from_mask, **positions)
    torch.ops.posembed.alibi_softmax_.default(scores, slopes, scale, *options)
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
    """Softmax(query key^T scale + bias) value; gradients flow to all of them.

    The scores are in memory; one kernel does scale, bias, mask and softmax.

    Args:
        query: [batch, num_heads, seq, head_dim].
        key: [batch, num_heads or a divisor of it, keys, head_dim].
        value: [batch, heads of key, keys, value_dim].
        slopes: Floating [num_heads], or [2, num_heads] for keys left and right of the query.
        scale: Default: ``head_dim ** -0.5``.
        dropout: Probability with which weights are zeroed.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        positions_from_mask: With an attention_mask and without positions, only visible keys are
            numbered, as by :func:`alibi_positions`.
        **positions: See :class:`posembed.score_positions.ScorePositions`.

    Returns:
        [batch, num_heads, seq, value_dim].

    Raises:
        ValueError: Shapes do not fit, or dropout is not a probability.
        TypeError: Dtypes differ, outside autocast.

    Examples:
        >>> import torch, posembed as pe
        >>> query, key = torch.randn(2, 8, 1, 64), torch.randn(2, 4, 100, 64)
        >>> pe.functional.alibi_attention(query, key, key, pe.functional.alibi_slopes(8)).shape
        torch.Size([2, 8, 1, 64])
    """
    if is_sharded(query):
        call = {"scale": scale, "causal": causal, "positions_from_mask": positions_from_mask}
        return sharded().alibi_attention(  # type: ignore[no-any-return]
            alibi_attention, query, key, value, slopes, dropout, **call, **positions
        )
    options = _options(causal, positions_from_mask, **positions)
    return torch.ops.posembed.alibi_attention.default(  # type: ignore[no-any-return]
        query, key, value, slopes, scale, dropout, *options
    )


def check_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
    """Raises as :func:`alibi_attention` does, for other implementations of attention."""
    torch.ops.posembed.alibi_check_attention.default(query, key, value, dropout)


def alibi_lse_correction(
    slopes: Tensor,
    query_length: int,
    *,
    query_start: int,
    key_start: int,
    form: str = "distance",
    causal: bool = True,
) -> Tensor:
    """Corrects the log-sum-exp of a block whose biases were computed from indices within it.

    Ring and blocked attention compute blocks of keys separately and merge them by their
    log-sum-exps. If a kernel knows only indices within its block, its bias is off by a constant
    along each row. The block's outputs are right, and its log-sum-exp plus this correction is that
    of the bias ``-slope * abs(query position - key position)``.

    Args:
        slopes: Floating [heads] or [2, heads].
        query_length: Queries of the block.
        query_start: Position of the first of them.
        key_start: Position of the block's first key.
        form: The bias that the kernel added for query i and key j, numbered within the block:
            "distance": ``slope * (j - i)``; "key": ``slope * j``, as causal FlashAttention-2 does.
            For keys after the queries, the negative.
        causal: The correction is -inf if the block begins after the query, which then ignores it.

    Returns:
        [heads, query_length], to add to the log-sum-exps of queries.

    Raises:
        ValueError: An unknown form, or slopes of another shape.
        TypeError: The dtype of slopes is not supported.

    Examples:
        >>> import posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_lse_correction(slopes, 2, query_start=4, key_start=2)[0]
        tensor([-1., -1.])
    """
    if is_sharded(slopes):
        starts = {"query_start": query_start, "key_start": key_start}
        options = {"form": form, "causal": causal}
        return sharded().of_slopes(  # type: ignore[no-any-return]
            alibi_lse_correction, slopes, query_length, **starts, **options
        )
    return torch.ops.posembed.alibi_lse_correction.default(  # type: ignore[no-any-return]
        slopes, query_length, query_start, key_start, form, causal
    )
