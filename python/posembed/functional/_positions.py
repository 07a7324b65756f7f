"""Positions of images, videos and audio among text, of grids, and of packed documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posembed.functional._options import Device
from posembed.glue.gate import gated
from posembed.glue.validation import finite, finites
from posembed.specifications import MropeRule

_DOCUMENT_POSITIONS = gated(torch.ops.posembed.document_positions.default)
_GRID_POSITIONS = gated(torch.ops.posembed.grid_positions.default)
_MROPE_POSITIONS = gated(torch.ops.posembed.mrope_positions.default)
_PACKED_GRID_POSITIONS = gated(torch.ops.posembed.packed_grid_positions.default)
_PACKED_POSITIONS = gated(torch.ops.posembed.packed_positions.default)
_ZIGZAG_POSITIONS = gated(torch.ops.posembed.zigzag_positions.default)


class MropePositions(NamedTuple):
    """The result of :func:`mrope`.

    Attributes:
        positions: [axes, batch, seq], int64, or float32 if the rule's time is "exact".
        delta: [batch, 1]: the position after the last one, minus the number of tokens. A token that
            is generated later has its index among the sample's tokens, plus delta, on every axis.
    """

    positions: Tensor
    delta: Tensor


class ZigzagPart(NamedTuple):
    """The result of :func:`zigzag`.

    Attributes:
        indices: int64 [tokens]: each token's index in the whole sequence.
        positions: int64 [tokens]: each token's index in its document.
        cu_seqlens: [documents + 1]: the boundaries of the documents in this part.
    """

    indices: Tensor
    positions: Tensor
    cu_seqlens: Tensor


def rules() -> dict[str, MropeRule]:
    """The rules by name: the model types of transformers that number images.

    Token ids are those of transformers' configuration classes, or of the checkpoint if these
    differ; a model with other ids has its rule from :meth:`MropeRule.from_huggingface`.
    """
    return {name: MropeRule.from_json(name) for name in torch.ops.posembed.mrope_rules.default()}


def mrope(
    ids: Tensor,
    *,
    rule: str | MropeRule,
    image_grids: Tensor | None = None,
    video_grids: Tensor | None = None,
    seconds_per_grid: Tensor | Sequence[float] | None = None,
    audio_lengths: Tensor | None = None,
    attention_mask: Tensor | None = None,
    token_types: Tensor | None = None,
) -> MropePositions:
    """Positions of text with images, videos and audio: time, height and width of each token.

    Items are taken in the order of their placeholders: sample by sample, as processors do. Runs on
    the device of ``ids`` without waiting for it, and can be compiled and exported.

    Args:
        ids: int32 or int64 [batch, seq].
        rule: A model type, such as "qwen2_vl", or a rule; see :func:`rules`.
        image_grids: int32 or int64 [images, 3]: patches along time, height and width before they
            are merged, as ``image_grid_thw`` of processors; or [images, 2], height and width.
        video_grids: int32 or int64 [videos, 3], or [videos, 2] for single frames.
        seconds_per_grid: [videos]: seconds between two frames of a grid; default: 1. For rules that
            count frames, whose videos have their times in the text, None.
        audio_lengths: int32 or int64 [audios]: feature frames of each audio. Optional: it serves to
            check the number of placeholders.
        attention_mask: bool or integers [batch, seq], 0 for padding on any side; default: none.
        token_types: Integers [batch, seq], 0 for text, 1 for images, 2 for videos, 3 for audio, as
            ``mm_token_type_ids`` of processors; default: from the ids.

    Returns:
        Positions for ``RotaryEmbedding`` with sections, and the delta for generation.

    Raises:
        ValueError: Shapes do not fit, or the grids or lengths do not fit the placeholders in ids.
            On CUDA and in compiled programs, where reading values would wait for the device, all
            positions are then less than -1 (or NaN), which RotaryEmbedding rejects.
        TypeError: A dtype is not supported.

    Examples:
        Two tokens of text, an image of 2 x 3 merged patches, and text again:

        >>> import torch, posembed as pe
        >>> ids = torch.tensor([[1, 2] + [151655] * 6 + [3, 4]])
        >>> grids = torch.tensor([[1, 4, 6]])
        >>> positions, delta = pe.positions.mrope(ids, rule="qwen2_vl", image_grids=grids)
        >>> positions[:, 0]
        tensor([[0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
                [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
                [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]])
        >>> delta
        tensor([[-3]])
    """
    if seconds_per_grid is not None and not isinstance(seconds_per_grid, Tensor):
        seconds_per_grid = torch.tensor(seconds_per_grid, dtype=torch.float64, device=ids.device)
    grids = (image_grids, video_grids, seconds_per_grid, audio_lengths)
    text = rule if isinstance(rule, str) else rule.text
    return MropePositions(*_MROPE_POSITIONS(ids, text, *grids, attention_mask, token_types))


def grid(
    frames: int,
    height: int,
    width: int,
    *,
    centred: bool = False,
    scale: float | Sequence[float] | None = None,
    offset: float | Sequence[float] | None = None,
    order: str = "thw",
    merge: int = 1,
    device: Device | None = None,
) -> Tensor:
    """Positions of a grid's tokens, by rows, frame after frame.

    Args:
        frames: Size along time; 1 for an image.
        height: Number of rows.
        width: Number of columns.
        centred: Put 0 in the middle of each axis: ``index - (size - 1) / 2``.
        scale: Multiplies positions: a number, or one each for time, height and width.
        offset: Added last: a number, or one each for time, height and width.
        order: The axes of the result: "thw", "hw", "wh", and so on.
        merge: Order tokens by squares of ``merge`` x ``merge``, which a vision tower merges later.
        device: Default: the CPU.

    Returns:
        [axes, frames * height * width]: int64, or float32 with ``centred``, ``scale``, or an offset
        that is negative or no whole number. The float -1.0 is a position as any other; the integer
        -1 would leave a token unrotated.

    Raises:
        ValueError: A size is negative, or an option is unknown or does not fit.

    Examples:
        >>> import posembed as pe
        >>> pe.positions.grid(1, 2, 3, order="hw")
        tensor([[0, 0, 0, 1, 1, 1],
                [0, 1, 2, 0, 1, 2]])

        DINOv3's coordinates are those of patch centres in the square from -1 to 1:

        >>> pe.positions.grid(1, 2, 4, centred=True, scale=(1, 2 / 2, 2 / 4), order="hw")
        tensor([[-0.5000, -0.5000, -0.5000, -0.5000,  0.5000,  0.5000,  0.5000,  0.5000],
                [-0.7500, -0.2500,  0.2500,  0.7500, -0.7500, -0.2500,  0.2500,  0.7500]])
    """
    where = None if device is None else torch.device(device)
    return _GRID_POSITIONS(
        frames,
        height,
        width,
        centred,
        _numbers("scale", scale),
        _numbers("offset", offset),
        order,
        merge,
        where,
    )


def _numbers(name: str, value: float | Sequence[float] | None) -> list[float]:
    """An option as the list that the operator takes."""
    if value is None:
        return []
    one = isinstance(value, str) or not getattr(value, "ndim", isinstance(value, Iterable))
    return [finite(name, value)] if one else list(finites(name, value))


def packed_grids(
    grids: Tensor, *, order: str = "hw", merge: int = 1, num_tokens: int | None = None
) -> Tensor:
    """Positions of the tokens of pictures that are packed one after another.

    Args:
        grids: int32 or int64 [pictures, 3]: frames, rows and columns of patches, as
            ``image_grid_thw`` of processors; or [pictures, 2].
        order: The axes of the result: "hw", "wh", "thw", and so on.
        merge: The tokens of a frame are ordered by squares of ``merge`` x ``merge``, which a vision
            tower merges later.
        num_tokens: The number of tokens, if known; otherwise it is read, for which a GPU is waited
            for and which a compiled program does not know.

    Returns:
        int64 [axes, tokens].

    Raises:
        ValueError: ``grids`` do not fit ``merge`` or ``num_tokens``, or an axis is unknown. On
            CUDA and in compiled programs, grids that do not fit give positions less than -1, which
            RotaryEmbedding rejects.
        TypeError: ``grids`` are not int32 or int64.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.positions.packed_grids(torch.tensor([[1, 2, 4], [2, 1, 2]]))
        tensor([[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0],
                [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]])
        >>> pe.positions.packed_grids(torch.tensor([[1, 2, 4]]), merge=2)
        tensor([[0, 0, 1, 1, 0, 0, 1, 1],
                [0, 1, 0, 1, 2, 3, 2, 3]])
    """
    return _PACKED_GRID_POSITIONS(grids, order, merge, num_tokens)


def packed(
    cu_seqlens: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    num_tokens: int | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Positions of documents packed one after another: they restart at 0 in each.

    Args:
        cu_seqlens: int32 or int64 [documents + 1]: where each document begins, then the number of
            tokens.
        documents: Instead: int32 or int64 [..., seq]: the document of each token. Positions restart
            where the number changes; negative numbers are padding, at position -1.
        num_tokens: With ``cu_seqlens``: the number of tokens, if known; otherwise it is read, for
            which a GPU is waited for and which a compiled program does not know.
        offset: With ``cu_seqlens``: int32 or int64 [documents]: the first position of each
            document, which has tokens in a cache already; None: 0.

    Returns:
        int64 [tokens], or [..., seq] with ``documents``.

    Raises:
        ValueError: Not one of ``cu_seqlens`` and ``documents``, or boundaries that decrease or do
            not go from 0 to ``num_tokens`` (checked on the CPU).
        TypeError: A dtype is not int32 or int64.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.positions.packed(torch.tensor([0, 3, 5]))
        tensor([0, 1, 2, 0, 1])
        >>> pe.positions.packed(torch.tensor([0, 3, 5]), offset=torch.tensor([7, 4]))
        tensor([7, 8, 9, 4, 5])
        >>> pe.positions.packed(documents=torch.tensor([[4, 4, 7, 7, 7, -1]]))
        tensor([[ 0,  1,  0,  1,  2, -1]])
    """
    if documents is None and cu_seqlens is not None:
        return _PACKED_POSITIONS(cu_seqlens, num_tokens, offset)
    if documents is None or cu_seqlens is not None:
        raise ValueError("packed: expected either cu_seqlens or documents")
    for name, value in (("num_tokens", num_tokens), ("offset", offset)):
        if value is not None:
            raise ValueError(f"{name}: expected none beside documents")
    return _DOCUMENT_POSITIONS(documents)


def zigzag(
    seq_len_or_cu_seqlens: int | Tensor,
    rank: int,
    world_size: int,
    *,
    num_tokens: int | None = None,
) -> ZigzagPart:
    """One process's tokens of packed documents under context parallelism.

    Each document is cut into ``2 * world_size`` chunks, of which the process has the chunks
    ``rank`` and ``2 * world_size - 1 - rank``. That balances causal attention. The numbers are
    those of Megatron-Core and Transformer Engine (``thd_get_partitioned_indices``).

    Args:
        seq_len_or_cu_seqlens: The length of one document, or int32 or int64 [documents + 1]: where
            each begins, then the number of tokens. Lengths are multiples of ``2 * world_size``.
        rank: This process.
        world_size: Number of processes that share the sequence.
        num_tokens: With ``cu_seqlens``: the number of tokens of all processes, if known; see
            :func:`packed`.

    Returns:
        The tokens' indices, their positions in their documents, and the part's boundaries.

    Raises:
        ValueError: Lengths do not fit (checked on the CPU), or ``rank`` is not a process.
        TypeError: ``cu_seqlens`` is not int32 or int64.

    Examples:
        >>> import torch, posembed as pe
        >>> part = pe.positions.zigzag(torch.tensor([0, 4, 12]), rank=0, world_size=2)
        >>> part.positions
        tensor([0, 3, 0, 1, 6, 7])
        >>> part.indices
        tensor([ 0,  3,  4,  5, 10, 11])
    """
    if isinstance(seq_len_or_cu_seqlens, Tensor):
        cu_seqlens = seq_len_or_cu_seqlens
    else:
        if num_tokens is not None:
            raise ValueError("num_tokens: expected none beside a length")
        num_tokens = seq_len_or_cu_seqlens
        cu_seqlens = torch.tensor([0, num_tokens])
    return ZigzagPart(*_ZIGZAG_POSITIONS(cu_seqlens, rank, world_size, num_tokens))
