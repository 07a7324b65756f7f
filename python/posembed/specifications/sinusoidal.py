"""SinusoidalSpec: the numbers that define a sinusoidal encoding."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posembed.glue.validation import convert_fields, fields_of
from posembed.specifications.text import block_texts, canonical_text


@dataclasses.dataclass(frozen=True)
class SinusoidalSpec:
    """The parameters of a sinusoidal encoding: immutable, hashable, comparable, picklable.

    Args:
        embedding_dim: Components of an encoding.
        base: Approximately the ratio of the longest to the shortest wavelength.
        preset: "vaswani", "marian", "tensor2tensor", "ddpm" or "fairseq"; for several axes "detr",
            "sam2", "mae", "sd3", "pixart" or "cogvideox"; see
            :class:`posembed.SinusoidalPositionalEmbedding`.
        cos_first: Put cosines before sines; default: False.
        shift: Frequencies are ``base ** (-i / (embedding_dim / 2 - shift))``; default: the
            preset's.
        scale: Multiplies the encoding.
        position_scale: A whole number that multiplies positions, exactly, also fractional ones:
            diffusers' ``scale`` of a timestep.
        padding_idx: Position 0 has the sinusoid of ``padding_idx + 1``, and position -1 (padding)
            is zero. Default: 1 with "fairseq", otherwise None.
        axes: For positions of several axes (rows and columns; or frames, rows and columns): the
            axis that each block of columns encodes, in the order of the blocks. Default: the
            preset's.
        widths: Columns of each block. Default: the preset's, otherwise equal parts.
        start: Cell i of a grid's axis has position ``(i + start) / interpolation_scale``. Default:
            the preset's, otherwise 0.
        length: If above 0, positions are also multiplied by ``length / cells``: the last is near
            ``length`` for a picture of any size. Default: the preset's, otherwise 0.
        interpolation_scale: A number for each axis. Default: the preset's, otherwise 1.
        max_size: If above 0, a grid is the middle of one of ``max_size`` cells an axis, and
            ``cells`` is that number. Default: the preset's, otherwise 0.

    Raises:
        ValueError: The numbers are inconsistent; the message names the field.

    Examples:
        >>> import posembed as pe
        >>> spec = pe.SinusoidalSpec(512, preset="marian")
        >>> spec == pe.SinusoidalSpec.from_json(spec.to_json())
        True
    """

    embedding_dim: int
    _: dataclasses.KW_ONLY
    base: float = 10000.0
    preset: str = "vaswani"
    cos_first: bool | None = None
    shift: float | None = None
    scale: float = 1.0
    position_scale: int = 1
    padding_idx: int | None = None
    axes: Sequence[int] | None = None  # stored as a tuple, like the next ones
    widths: Sequence[int] | None = None
    start: float | None = None
    length: float | None = None
    interpolation_scale: Sequence[float] | None = None
    max_size: int | None = None
    text: str = dataclasses.field(init=False, repr=False, compare=False)
    # With several axes: the axis and the text of each block of columns.
    block_texts: tuple[tuple[int, str], ...] = dataclasses.field(
        default=(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        convert_fields(self)
        text = canonical_text("sinusoidal", fields_of(self))
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "block_texts", block_texts(text))

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """The node that torch.fx puts into a graph for a specification."""
        return tracer.create_node("call_function", sinusoidal_spec, (self.text,), {})

    def to_json(self) -> str:
        """JSON text; equal specifications have equal text, in C++ too."""
        return self.text

    @classmethod
    def from_json(cls, text: str) -> SinusoidalSpec:
        """The specification that :meth:`to_json` wrote.

        Raises:
            ValueError: The text is not JSON, or has a key that is not a field.
        """
        fields: dict[str, Any] = json.loads(
            torch.ops.posembed.sinusoidal_specification.default(text)
        )
        return cls(**fields)

    @classmethod
    def from_huggingface(cls, config: Any) -> SinusoidalSpec:
        """The encoding of timesteps in a UNet of diffusers, by its config.json.

        Its first widths and the keys flip_sin_to_cos and freq_shift count. What other models of
        diffusers call ``scale`` multiplies the timestep, not the encoding: ``position_scale``.

        Args:
            config: A dict, a configuration of diffusers, or the path of a config.json or folder.

        Raises:
            ValueError: The class is unknown, or does not encode timesteps by sinusoids.
            TypeError: ``config`` is of another type.

        Examples:
            >>> import posembed as pe
            >>> unet = {"_class_name": "UNet2DConditionModel", "block_out_channels": [320, 640],
            ...         "flip_sin_to_cos": True, "freq_shift": 0}
            >>> pe.SinusoidalSpec.from_huggingface(unet).embedding_dim
            320
        """
        from posembed.models import reading

        return reading.sinusoidal(config)

    @property
    def num_axes(self) -> int:
        """Number of axes of a position: 1, or 2 or 3 for a cell of a picture or a video."""
        return max(1, len(self.block_texts))

    def blocks(self) -> list[tuple[int, SinusoidalSpec]]:
        """The axis of each block of columns and the specification of its columns.

        Examples:
            >>> import posembed as pe
            >>> [(axis, block.embedding_dim) for axis, block in
            ...  pe.SinusoidalSpec(64, preset="cogvideox").blocks()]
            [(0, 16), (2, 24), (1, 24)]
        """
        return [
            (axis, self.from_json(text)) for axis, text in self.block_texts or ((0, self.text),)
        ]

    def permutation_to(self, other: SinusoidalSpec) -> Tensor:
        """The column order that turns this encoding into ``other``: int64 [embedding_dim].

        To use a model with another preset than it was trained with, reorder the columns of its
        token table and of all weights that read or write embeddings.

        Raises:
            ValueError: Frequencies, scales or paddings differ, so no order makes the encodings
                equal; or there are several axes.

        Examples:
            >>> import torch, posembed as pe
            >>> halves = pe.SinusoidalSpec(8, preset="marian")
            >>> order = pe.SinusoidalSpec(8).permutation_to(halves)
            >>> order.tolist()
            [0, 2, 4, 6, 1, 3, 5, 7]
        """
        return torch.ops.posembed.sinusoidal_permutation.default(self.text, other.text)  # type: ignore[no-any-return]

    def frequencies(self) -> Tensor:
        """Radians per position of each pair of sine and cosine, block by block: float64 [pairs]."""
        frequencies: Tensor = torch.ops.posembed.sinusoidal_frequencies.default(self.text)
        return frequencies * self.position_scale

    def wavelengths(self) -> Tensor:
        """Positions per turn of each pair: float64 [pairs]."""
        return 2 * math.pi / self.frequencies()


def sinusoidal_spec(text: str) -> SinusoidalSpec:
    """:meth:`SinusoidalSpec.from_json` as a function that torch.fx can refer to by name."""
    return SinusoidalSpec.from_json(text)
