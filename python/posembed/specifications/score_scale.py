"""ScoreScale: what a model multiplies its attention scores by because of lengths and positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.glue.other_names import check_options
from posembed.glue.validation import convert_fields
from posembed.models.options import READING, Reading


@dataclasses.dataclass(frozen=True)
class ScoreScale:
    """The scale of scores besides the usual ``1 / sqrt(width of a whole query)``.

    Scores, or queries, are multiplied by ``factor * (1 + growth * log(1 + floor((position + offset)
    / length)))``; with ``logn`` by ``factor * max(1, log(position + 1) / log(length))``. A rotation
    does not do that: multiply the query, or pass ``scale`` to the attention.

    Args:
        factor: The factor at every position.
        growth: How much queries grow with their position; 0: not at all.
        length: In positions.
        offset: Added to positions.
        logn: Grow with the logarithm of the position beyond ``length``.
        source: The keys of the configuration that say so.

    Raises:
        ValueError: A field is not a number.

    Examples:
        >>> import torch, posembed as pe
        >>> config = {"model_type": "gemma2", "head_dim": 128, "query_pre_attn_scalar": 144,
        ...           "rope_theta": 10000.0}
        >>> scale = pe.RotarySpec.from_huggingface(config).score_scale
        >>> round(scale.factor, 4), scale.source
        (0.9428, 'query_pre_attn_scalar')
        >>> pe.ScoreScale(growth=0.1, length=16384).at(torch.tensor([0, 100000]))
        tensor([1.0000, 1.1946], dtype=torch.float64)
    """

    factor: float = 1.0
    growth: float = 0.0
    length: float = 1.0
    offset: int = 0
    logn: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        convert_fields(self)

    @property
    def is_constant(self) -> bool:
        """Whether the scale is the same at every position."""
        return self.growth == 0.0 and not self.logn

    def at(self, positions: Tensor) -> Tensor:
        """The scale of queries at integer positions of any shape: float64 of that shape.

        Raises:
            TypeError: Positions are no integers.
        """
        numbers = (self.factor, self.growth, self.length, self.offset, self.logn)
        return torch.ops.posembed.score_scale.default(positions, *numbers)  # type: ignore[no-any-return]

    @classmethod
    def for_layers(cls, config: Any, **reading: Unpack[Reading]) -> list[ScoreScale | None]:
        """Reads one scale per layer, None for 1; also of layers that do not rotate (Llama 4).

        Arguments and errors are those of :meth:`posembed.RotarySpec.for_layers`.
        """
        from posembed.models.reading import score_scales

        check_options("ScoreScale.for_layers", reading, READING)
        return score_scales(config, **reading)
