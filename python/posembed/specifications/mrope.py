"""MropeRule: the numbers by which models number images, videos and audio among text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import torch

from posembed.glue.validation import convert_fields, fields_of
from posembed.specifications.text import canonical_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class MropeRule:
    """The numbers by which models differ in numbering images, videos and audio among text.

    :func:`posembed.positions.rules` has those of all model types; ``dataclasses.replace`` changes
    a number.

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
        time_advances: What follows an item begins after its latest position on any axis, time too,
            as Qwen2-VL, Qwen2.5-VL, ERNIE 4.5 VL and PaddleOCR-VL were trained; otherwise after its
            height and width, although the video's times may go further.
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
        Rules of transformers 5 for text after videos of Qwen2-VL and Qwen2.5-VL differ from those
        of training, which are in transformers 4 and vLLM:

        >>> import posembed as pe
        >>> pe.positions.rules()["qwen2_vl"].time_advances
        False
        >>> pe.positions.rules()["qwen2_vl_trained"].time_advances
        True
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

        HY-V4-VL has a token at the end of each row: pass grids that are ``spatial_merge`` wider.

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
        from posembed.models import reading

        return reading.mrope_rule(config)
