"""Positions of tokens, before any embedding: images, videos and audio among text, grids, packing.

Images have positions of three axes, time, height and width, and text goes on after them: Wang et
al., "Qwen2-VL", arXiv:2409.12191 (M-RoPE). Models differ in a few numbers, their rule.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from posembed import configuration
from posembed._validation import convert_fields, fields_of
from posembed.configuration import completion
from posembed.functional import opt_positions as from_mask
from posembed.specification import canonical_text

__all__ = [
    "MropePositions",
    "MropeRule",
    "ZigzagPart",
    "from_mask",
    "grid",
    "mrope",
    "packed",
    "rules",
    "zigzag",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MropeRule:
    """The numbers by which models differ in numbering images, videos and audio among text.

    :func:`rules` has the rules of all model types; ``dataclasses.replace`` changes a number.

    Args:
        image_token: The id of an image's placeholder; None: the model has no images.
        video_token: The id of a video's placeholder.
        audio_token: The id of an audio's placeholder.
        video_start: Image placeholders after this id and before ``video_end`` are a video's (GLM).
        video_end: See ``video_start``.
        shared: Pairs of neighbouring ids that share one position: the markers around a video with
            audio (Qwen2.5-Omni).
        spatial_merge: Patches of a grid, along height and width, in one token.
        temporal_merge: Frames of a video's grid in one token.
        separate_frames: Number each frame of a video like an image, because text, such as its time,
            stands between frames.
        time: The temporal position of a frame. "index": its index. "interval": ``floor(index *
            (seconds * positions_per_second))``. "elapsed": ``floor((index * seconds) *
            positions_per_second)``, which rounds otherwise. "exact": the same without floor, so
            positions are float32.
        positions_per_second: For all times but "index".
        time_advances: What follows an item begins after its latest temporal position, too;
            otherwise after its height and width, although the video's times may go further.
        audio_chunk: Feature frames of an audio whose convolutions give 13 tokens (Qwen3-Omni); 0:
            the audio is convolved as a whole (Qwen2.5-Omni).
        pages: HunYuan's positions: text counts every token, and image tokens have, after that
            count, their column, their row and the number of their image in the batch. A row has one
            token more than columns.
        margin: Placeholders before an image, and after it, that count as text.
        axes: Axes of the result: 3, or 4 with ``pages`` and the count of tokens.
        padding: The position of padding.
        canvas: MiniCPM-V's ids of image_start, image_end, slice_start, slice_end and newline. A
            picture and its slices share a canvas, on which these markers have places, too.

    Raises:
        ValueError: A number is impossible; the message names the field.

    Examples:
        Rules of transformers 5 for videos of Qwen2-VL and Qwen2.5-VL differ from those of training,
        which are in transformers 4 and vLLM:

        >>> import dataclasses, posembed as pe
        >>> rule = pe.positions.rules()["qwen2_vl"]
        >>> trained = dataclasses.replace(rule, time_advances=True)
    """

    image_token: int | None = None
    video_token: int | None = None
    audio_token: int | None = None
    video_start: int | None = None
    video_end: int | None = None
    shared: tuple[tuple[int, int], ...] = ()
    spatial_merge: int = 2
    temporal_merge: int = 1
    separate_frames: bool = False
    time: Literal["index", "interval", "elapsed", "exact"] = "index"
    positions_per_second: float = 1.0
    time_advances: bool = False
    audio_chunk: int = 0
    pages: bool = False
    margin: int = 0
    axes: int = 3
    padding: int = 0
    canvas: tuple[int, ...] = ()
    text: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        convert_fields(self)
        object.__setattr__(self, "shared", tuple((a, b) for a, b in self.shared))
        object.__setattr__(self, "canvas", tuple(self.canvas))
        object.__setattr__(self, "text", canonical_text("mrope", fields_of(self)))

    def to_json(self) -> str:
        """JSON text; equal rules have equal text, in C++ too."""
        return self.text

    @classmethod
    def from_json(cls, text: str) -> MropeRule:
        """The rule that :meth:`to_json` wrote, or that of a model type.

        Raises:
            ValueError: The text is neither, or has a key that is not a field.
        """
        return cls(**json.loads(torch.ops.posembed.mrope_specification.default(text)))

    @classmethod
    def from_huggingface(cls, config: Any) -> MropeRule:
        """The rule of a model type, with the token ids and merge sizes of a configuration.

        If transformers is installed, it fills in what a published file omits.

        Args:
            config: A dict, a ``PretrainedConfig``, or the path of a config.json or of its folder:
                of the whole model, or of an Omni model's thinker.

        Raises:
            ValueError: The model type has no rule, or a key is no number.
            TypeError: ``config`` is of another type.

        Examples:
            >>> import posembed as pe
            >>> config = {"model_type": "qwen2_vl", "image_token_id": 7,
            ...           "vision_config": {"spatial_merge_size": 2}}
            >>> pe.positions.MropeRule.from_huggingface(config).image_token
            7
        """
        fields = configuration.load(config)
        given = isinstance(config, (Mapping, str, os.PathLike))
        whole: Any = completion.complete(fields) if given else None
        complete = whole.to_dict() if hasattr(whole, "to_dict") else fields
        text = json.dumps(complete, default=str)
        return cls.from_json(torch.ops.posembed.mrope_rule_from_configuration.default(text))


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
    return MropePositions(
        *torch.ops.posembed.mrope_positions.default(
            ids,
            rule if isinstance(rule, str) else rule.text,
            image_grids,
            video_grids,
            seconds_per_grid,
            audio_lengths,
            attention_mask,
            token_types,
        )
    )


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
    device: torch.device | str | None = None,
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
    return torch.ops.posembed.grid_positions.default(  # type: ignore[no-any-return]
        frames, height, width, centred, _numbers(scale), _numbers(offset), order, merge, where
    )


def _numbers(value: float | Sequence[float] | None) -> list[float]:
    """An option as the list that the operator takes."""
    if value is None:
        return []
    return [float(value)] if isinstance(value, (int, float)) else [float(each) for each in value]


def packed(
    cu_seqlens: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    num_tokens: int | None = None,
) -> Tensor:
    """Positions of documents packed one after another: they restart at 0 in each.

    Args:
        cu_seqlens: int32 or int64 [documents + 1]: where each document begins, then the number of
            tokens.
        documents: Instead: int32 or int64 [..., seq]: the document of each token. Positions restart
            where the number changes; negative numbers are padding, at position -1.
        num_tokens: With ``cu_seqlens``: the number of tokens, if known; otherwise it is read, for
            which a GPU is waited for and which a compiled program does not know.

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
        >>> pe.positions.packed(documents=torch.tensor([[4, 4, 7, 7, 7, -1]]))
        tensor([[ 0,  1,  0,  1,  2, -1]])
    """
    if documents is None and cu_seqlens is not None:
        return torch.ops.posembed.packed_positions.default(cu_seqlens, num_tokens)  # type: ignore[no-any-return]
    if documents is None or cu_seqlens is not None:
        raise ValueError("packed: expected either cu_seqlens or documents")
    if num_tokens is not None:
        raise ValueError("num_tokens: expected none beside documents")
    return torch.ops.posembed.document_positions.default(documents)  # type: ignore[no-any-return]


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
    return ZigzagPart(
        *torch.ops.posembed.zigzag_positions.default(cu_seqlens, rank, world_size, num_tokens)
    )
