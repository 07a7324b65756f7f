"""How rotary frequencies are stretched to longer contexts: values that :class:`RotarySpec` takes.

The formulas are the operator's (csrc/rotary/scaling.cpp); here are names, defaults and papers.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


def whole(name: str, value: Any) -> int:
    """A whole number, of any integer type."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected a whole number, got {value!r}") from None


def finite(name: str, value: Any) -> float:
    """``value`` as a float; JSON has no word for what is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def finites(name: str, values: Any) -> tuple[float, ...]:
    """``values`` as floats."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected numbers, got {values!r}")
    return tuple(finite(name, value) for value in values)


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool; a text is none, whatever it says."""
    if isinstance(value, str) or value not in (True, False):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def coerced(name: str, declared: str, value: Any) -> Any:
    """``value`` as the field's declared type, so that equal numbers make equal specifications."""
    if value is None and declared.endswith("None"):
        return None
    if declared == "bool":
        return flag(name, value)
    if declared.startswith("tuple"):
        return finites(name, value)
    number = finite(name, value)
    if declared != "int":
        return number
    return whole(name, int(number) if number.is_integer() else value)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What all scalings have in common. Frozen, hashable, comparable, picklable."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = coerced(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, and the type."""
        return {"type": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Scaling:
        """What :meth:`to_dict` gave."""
        known = {scaling.kind: scaling for scaling in typing.get_args(RotaryScaling)}
        given = dict(fields)
        return typing.cast(Scaling, known[given.pop("type")](**given))


@dataclasses.dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: every frequency divided by ``factor``. Chen et al., arXiv:2306.15595.

    Examples:
        >>> import posembed as pe
        >>> pe.RotarySpec(4, scaling=pe.LinearScaling(2.0)).frequencies().tolist()
        [0.5, 0.005]
    """

    kind: ClassVar[str] = "linear"
    factor: float


@dataclasses.dataclass(frozen=True)
class NtkScaling(Scaling):
    """NTK-aware: the longest wavelength stretched by ``factor``, the shortest kept.

    The base becomes ``base * factor ** (d / (d - 2))`` with d = rotary_dim.
    """

    kind: ClassVar[str] = "ntk"
    factor: float


@dataclasses.dataclass(frozen=True)
class DynamicNtkScaling(Scaling):
    """NTK-aware with a factor that grows with the sequence: see :meth:`RotarySpec.resolve`."""

    kind: ClassVar[str] = "dynamic_ntk"
    factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: fast pairs kept, slow ones divided by ``factor``. Peng et al., arXiv:2309.00071.

    Args:
        factor: How many times longer the context becomes.
        original_max_positions: The context of training.
        beta_fast: Pairs with more turns than this in the original context are kept.
        beta_slow: Pairs with fewer turns are divided by ``factor``; between, both are blended.
        mscale, mscale_all_dim: DeepSeek's: with both, the attention factor is
            ``(0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all_dim * log(factor) + 1)``.
        truncate: Round the ends of the blend outwards to whole pairs.
        attention_factor: What rotated queries and keys are multiplied by; default
            ``0.1 * log(factor) + 1``. With 1 this is "NTK by parts", the method before YaRN.
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
    """Llama 3.1: long wavelengths stretched by ``factor``, short ones kept, blended between.

    Long is over ``original_max_positions / low_freq_factor``, short under
    ``original_max_positions / high_freq_factor``.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """Gemma: the first ``proportion`` of the pairs turn, the others stand still.

    Exponents go over all of rotary_dim, which is not what a smaller rotary_dim would give.
    """

    kind: ClassVar[str] = "proportional"
    proportion: float = 1.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """LongRoPE: each pair divided by a searched factor of its own. Ding et al., arXiv:2402.13753.

    Args:
        short_factor: [rotary_dim / 2], for sequences up to ``original_max_positions``.
        long_factor: [rotary_dim / 2], beyond; :meth:`RotarySpec.resolve` chooses.
        original_max_positions: The context of training.
        factor: How many times longer the context becomes.
        attention_factor: Default ``sqrt(1 + log(factor) / log(original_max_positions))``.
        long_attention_factor: That of long sequences, where it differs (Phi-3.5-MoE).
    """

    kind: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    long_attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class XPosScaling(Scaling):
    """xPos: scores fade with distance. Sun et al., arXiv:2212.10554.

    Pair ``i`` of a query is multiplied by ``zeta ** ((position - center) / scale_base)`` with
    ``zeta = (2 * i / rotary_dim + 0.4) / 1.4``, that of a key by the inverse. A tensor alone is a
    query; :meth:`RotarySpec.for_keys` gives the specification for keys alone.

    Args:
        scale_base: Positions; negative: query and key change places.
        center: The position where nothing is multiplied; the middle of a sequence keeps numbers
            near 1. Queries and keys need the same.
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
