"""ALiBi as functions: slopes, and the bias as a tensor, added to scores, or inside a softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posembed import _C
from posembed.functional._eager import eager
from posembed.functional._options import Device


def alibi_slopes(
    num_heads: int,
    *,
    kind: str = "press",
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
        kind: "press": the paper's series, interleaved if the number of heads is not a power of two.
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
    return torch.ops.posembed.alibi_slopes(  # type: ignore[no-any-return]
        num_heads,
        kind=kind,
        max_bias=max_bias,
        total_heads=total_heads,
        head_start=head_start,
        values=list(values),
        factor=factor,
        device=None if device is None else torch.device(device),
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
    return torch.ops.posembed.alibi_positions(attention_mask)  # type: ignore[no-any-return]


def alibi_bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    *,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The bias of attention scores; gradients flow to slopes.

    Computed from distances in float32 and rounded once, so that it is accurate at any position.

    Args:
        slopes: Floating [heads], or [2, heads] for keys left and right of the query.
        query_length: Number of queries.
        key_length: Number of keys.
        query_offset: Position of the first query among the keys; default: the last query is at the
            last key.
        query_positions: Positions of the queries, int32 or int64 [query_length] or
            [batch, query_length]; default: consecutive.
        key_positions: Positions of the keys, [key_length] or [batch, key_length].
        cu_seqlens: Boundaries of packed documents: int32 or int64 [documents + 1], from 0 to
            key_length. Keys of other documents than the query's are hidden.
        attention_mask: bool or integers [key_length] or [batch, key_length]; 0: hidden, but still
            counted: :func:`alibi_positions` gives positions that number only visible keys.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        hide: Hidden keys get -inf; otherwise 0.
        dtype: Default: that of slopes.
        out: Memory for the result, for inference: any strides with a contiguous last dimension.

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
    if out is not None:
        if dtype not in (None, out.dtype):
            raise TypeError(f"dtype: expected none or that of out, {out.dtype}, got {dtype}")
        torch.ops.posembed.alibi_bias_out(
            out,
            slopes,
            query_length,
            key_length,
            query_positions,
            key_positions,
            cu_seqlens,
            attention_mask,
            query_offset=query_offset,
            causal=causal,
            hide=hide,
        )
        return out
    return torch.ops.posembed.alibi_bias(  # type: ignore[no-any-return]
        slopes,
        query_length,
        key_length,
        query_positions,
        key_positions,
        cu_seqlens,
        attention_mask,
        query_offset=query_offset,
        causal=causal,
        hide=hide,
        dtype=dtype,
    )


def alibi_add(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> Tensor:
    """Scores times scale plus bias in one pass over memory; gradients flow to scores and slopes.

    Args:
        scores: Floating [batch, heads, query, key] or [heads, query, key].
        slopes: As in :func:`alibi_bias`, with the other arguments.
        scale: Multiplies the scores, not the bias.
        query_offset: Position of the first query among the keys; default: the last query is at the
            last key.
        query_positions: As in :func:`alibi_bias`.
        key_positions: As in :func:`alibi_bias`.
        cu_seqlens: As in :func:`alibi_bias`.
        attention_mask: As in :func:`alibi_bias`.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        hide: Hidden keys get -inf for any score; otherwise nothing is added to their scores.

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
    given = (scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask)
    if eager(*given):
        return _C.alibi_add(*given, query_offset, causal, hide, scale)
    form = {"query_offset": query_offset, "causal": causal, "hide": hide, "scale": scale}
    return torch.ops.posembed.alibi_add(*given, **form)  # type: ignore[no-any-return]


def alibi_add_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> Tensor:
    """:func:`alibi_add` in place; returns ``scores``. For inference.

    Scores may have any strides with a contiguous last dimension.

    Returns:
        ``scores``.

    Raises:
        ValueError: Shapes do not fit; or grad mode is on and an argument requires grad.
    """
    given = (scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask)
    if eager(*given):
        return _C.alibi_add_(*given, query_offset, causal, hide, scale)
    form = {"query_offset": query_offset, "causal": causal, "hide": hide, "scale": scale}
    torch.ops.posembed.alibi_add_(*given, **form)
    return scores


def alibi_softmax(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
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
    given = (scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask)
    if eager(*given):
        return _C.alibi_softmax(*given, query_offset, causal, hide, scale)
    form = {"query_offset": query_offset, "causal": causal, "hide": hide, "scale": scale}
    return torch.ops.posembed.alibi_softmax(*given, **form)  # type: ignore[no-any-return]


def alibi_softmax_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> Tensor:
    """:func:`alibi_softmax` in place; returns ``scores``. For inference.

    Scores may have any strides with a contiguous last dimension.

    Returns:
        ``scores``.

    Raises:
        ValueError: Shapes do not fit; or grad mode is on and an argument requires grad.
    """
    given = (scores, slopes, query_positions, key_positions, cu_seqlens, attention_mask)
    if eager(*given):
        return _C.alibi_softmax_(*given, query_offset, causal, hide, scale)
    form = {"query_offset": query_offset, "causal": causal, "hide": hide, "scale": scale}
    torch.ops.posembed.alibi_softmax_(*given, **form)
    return scores


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
    return torch.ops.posembed.alibi_lse_correction(  # type: ignore[no-any-return]
        slopes,
        query_length,
        query_start=query_start,
        key_start=key_start,
        form=form,
        causal=causal,
    )
