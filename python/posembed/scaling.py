"""Context extension: values for the ``scaling`` of :class:`RotarySpec`.

The formulas are in csrc/rotary/scaling.cpp; here are names, defaults and papers.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from posembed._validation import finite, finites, flag, whole


def _coerced(name: str, declared: str, value: Any) -> Any:
    """``value`` as the field's declared type, so that equal numbers make equal specifications."""
    if value is None and declared.endswith("None"):
        return None
    if declared == "bool":
        return flag(name, value)
    if declared.startswith("Sequence"):
        return finites(name, value)
    number = finite(name, value)
    if declared != "int":
        return number
    return whole(name, int(number) if number.is_integer() else value)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Base of all scalings: frozen, hashable, comparable, picklable."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _coerced(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, and the scaling's ``type``."""
        return {"type": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Scaling:
        """The inverse of :meth:`to_dict`."""
        known = {scaling.kind: scaling for scaling in typing.get_args(RotaryScaling)}
        given = dict(fields)
        return typing.cast(Scaling, known[given.pop("type")](**given))


@dataclasses.dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: divides all frequencies by ``factor``. Chen et al., arXiv:2306.15595.

    Examples:
        >>> import posembed as pe
        >>> pe.RotarySpec(4, scaling=pe.LinearScaling(2.0)).frequencies().tolist()
        [0.5, 0.005]
    """

    kind: ClassVar[str] = "linear"
    factor: float


@dataclasses.dataclass(frozen=True)
class NtkScaling(Scaling):
    """NTK-aware: stretches the longest wavelength by ``factor`` and keeps the shortest.

    The base becomes ``base * factor ** (d / (d - 2))`` with d = rotary_dim.
    """

    kind: ClassVar[str] = "ntk"
    factor: float


@dataclasses.dataclass(frozen=True)
class DynamicNtkScaling(Scaling):
    """NTK-aware, by a factor for each length: :meth:`RotarySpec.resolve` makes it NtkScaling."""

    kind: ClassVar[str] = "dynamic_ntk"
    factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: keeps fast pairs, divides slow ones by ``factor``. Peng et al., arXiv:2309.00071.

    Args:
        factor: How many times longer the context becomes.
        original_max_positions: The context length of training.
        beta_fast: Pairs with more turns than this in the original context are kept.
        beta_slow: Pairs with fewer turns are divided by ``factor``; those between are blended.
        mscale, mscale_all_dim: From DeepSeek; with both, the attention factor is
            ``(0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all_dim * log(factor) + 1)``.
        truncate: Round the ends of the blend outwards to whole pairs.
        attention_factor: Multiplies rotated queries and keys; default ``0.1 * log(factor) + 1``.
            With 1 this is "NTK by parts", the method before YaRN.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1: stretches long wavelengths by ``factor``, keeps short ones, blends those between.

    Long means over ``original_max_positions / low_freq_factor``, short under
    ``original_max_positions / high_freq_factor``.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """Gemma: only the first ``proportion`` of the pairs turn.

    Frequencies are still those of the full rotary_dim, unlike with a smaller rotary_dim.
    """

    kind: ClassVar[str] = "proportional"
    proportion: float = 1.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """LongRoPE: divides each pair by its own, searched factor. Ding et al., arXiv:2402.13753.

    Args:
        short_factor: [rotary_dim / 2], for sequences up to ``original_max_positions``.
        long_factor: [rotary_dim / 2], for longer ones; :meth:`RotarySpec.resolve` chooses.
        original_max_positions: The context length of training.
        factor: How many times longer the context becomes.
        attention_factor: Default ``sqrt(1 + log(factor) / log(original_max_positions))``.
        long_attention_factor: For longer sequences, if it differs (Phi-3.5-MoE).
    """

    kind: ClassVar[str] = "longrope"
    short_factor: Sequence[float]  # kept as tuples
    long_factor: Sequence[float]
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    long_attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class XPosScaling(Scaling):
    """xPos: scores fade with distance. Sun et al., arXiv:2212.10554.

    Pair ``i`` of a query is multiplied by ``zeta ** ((position - center) / scale_base)`` with
    ``zeta = (2 * i / rotary_dim + 0.4) / 1.4``, a key's by the inverse. A single tensor is taken
    as a query; :meth:`RotarySpec.for_keys` gives the specification for single keys.

    Args:
        scale_base: In positions; if negative, query and key change places.
        center: The position where the factor is 1, the same for queries and keys. The middle of
            the sequence keeps factors near 1.
    """

    kind: ClassVar[str] = "xpos"
    scale_base: float = 512.0
    center: float = 0.0


RotaryScaling = (
    LinearScaling
    | NtkScaling
    | DynamicNtkScaling
    | YarnScaling
    | Llama3Scaling
    | ProportionalScaling
    | LongRopeScaling
    | XPosScaling
)
