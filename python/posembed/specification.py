"""RotarySpec: the numbers that distinguish one model's RoPE from another's."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RotarySpec:
    """A rotation's numbers: immutable, hashable, comparable, picklable.

    Pair ``i`` turns by ``base ** (-2 * i / rotary_dim)`` radians per position.

    Args:
        head_dim: Components of one head.
        base: Ratio of the longest to the shortest wavelength, all but one step.
        rotary_dim: Components that are rotated; default: all.
        rotary_start: The first of them.
        interleaved: Pairs (2i, 2i + 1), as GPT-J; otherwise (i, i + rotary_dim / 2), as Llama.
        reverse: Rotate the other way.

    Raises:
        ValueError: The numbers do not fit together; the text names the field.

    Example:
        >>> import posembed as pe
        >>> spec = pe.RotarySpec(128, base=500000.0)
        >>> spec == pe.RotarySpec.from_json(spec.to_json())
        True
    """

    head_dim: int
    _: dataclasses.KW_ONLY
    base: float = 10000.0
    rotary_dim: int | None = None
    rotary_start: int = 0
    interleaved: bool = False
    reverse: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", float(self.base))
        if not math.isfinite(self.base):  # JSON has no word for it
            raise ValueError(f"base: expected a finite number of at least 1, got {self.base}")
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        self.frequencies()  # the operator reads the text and refuses what does not fit

    @functools.cached_property
    def text(self) -> str:
        """What operators are given: :meth:`to_json`, made once."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def to_json(self) -> str:
        """JSON text; equal specifications have equal text, in C++ too."""
        return self.text

    @classmethod
    def from_json(cls, text: str) -> RotarySpec:
        """The specification that :meth:`to_json` wrote.

        Raises:
            ValueError: The text is not JSON, or has a key that is not a field.
        """
        torch.ops.posembed.rotary_frequencies(text)
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)

    def frequencies(self) -> Tensor:
        """Radians per position of each pair: float64 [rotary_dim / 2]."""
        return torch.ops.posembed.rotary_frequencies(self.text)  # type: ignore[no-any-return]
