"""Context extension: values for the ``scaling`` of :class:`RotarySpec`.

This file has the names, defaults and papers; the formulas are in csrc/rotary/rotary_angles.cpp.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from posembed.glue import other_names
from posembed.glue.validation import convert_fields, fields_of, shown


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Base class of all scalings: frozen, hashable, comparable, picklable."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        convert_fields(self)
        factor, length = (
            getattr(self, name, None) for name in ("factor", "original_max_positions")
        )
        if factor is not None and length is not None and factor >= 256 > length > 1:
            name = type(self).__name__
            raise ValueError(
                f"{name}.factor: expected at most original_max_positions, {length}, got {factor}; "
                "the factor comes first"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, and the scaling's ``type``."""
        return {"type": self.kind, **fields_of(self)}

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

    Examples:
        >>> import posembed as pe
        >>> pe.RotarySpec(4, scaling=pe.NtkScaling(2.0)).frequencies().tolist()  # otherwise 1, 0.01
        [1.0, 0.005]
    """

    kind: ClassVar[str] = "ntk"
    factor: float


@dataclasses.dataclass(frozen=True)
class DynamicNtkScaling(Scaling):
    """NTK-aware with a factor per length: :meth:`RotarySpec.resolve` turns it into NtkScaling.

    Examples:
        >>> import posembed as pe
        >>> spec = pe.RotarySpec(4, scaling=pe.DynamicNtkScaling(1.0, 2048))
        >>> [spec.resolve(length).frequencies().tolist() for length in (2048, 8192)]
        [[1.0, 0.01], [1.0, 0.0025]]
    """

    kind: ClassVar[str] = "dynamic_ntk"
    factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: keeps fast pairs, divides slow ones by ``factor``. Peng et al., arXiv:2309.00071.

    Args:
        factor: How many times longer the context becomes.
        original_max_positions: The context length of training.
        beta_fast: Pairs that make more turns than this in the original context are unchanged.
        beta_slow: Pairs that make fewer turns are divided by ``factor``; those in between are
            blended.
        mscale, mscale_all_dim: From DeepSeek; with both, the attention factor is
            ``(0.1 * mscale * log(factor) + 1) / (0.1 * mscale_all_dim * log(factor) + 1)``.
        truncate: Round the limits of the blended range outwards to whole pairs.
        attention_factor: Multiplies rotated queries and keys; default ``0.1 * log(factor) + 1``.
            With 1 this is "NTK by parts", the method before YaRN.

    Examples:
        >>> import posembed as pe
        >>> yarn = pe.RotarySpec(64, scaling=pe.YarnScaling(4.0, original_max_positions=4096))
        >>> divisors = pe.RotarySpec(64).frequencies() / yarn.frequencies()
        >>> [round(divisors[pair].item(), 2) for pair in (0, 12, 20, 31)]  # from fast to slow
        [1.0, 1.13, 2.36, 4.0]
        >>> round(yarn.attention_factor, 3)
        1.139
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
    """Llama 3.1: stretches long wavelengths by ``factor``, keeps short ones, blends in between.

    Long wavelengths exceed ``original_max_positions / low_freq_factor``; short ones are below
    ``original_max_positions / high_freq_factor``.

    Examples:
        >>> import posembed as pe
        >>> scaling = pe.Llama3Scaling(8.0, 1.0, 4.0, 8192)
        >>> scaled = pe.RotarySpec(128, base=500000.0, scaling=scaling).frequencies()
        >>> divisors = pe.RotarySpec(128, base=500000.0).frequencies() / scaled
        >>> [round(divisors[pair].item(), 2) for pair in (0, 28, 32, 40)]
        [1.0, 1.0, 2.69, 8.0]
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """Gemma: only the first ``proportion`` of the pairs turn.

    Frequencies are computed from the full rotary_dim, unlike with a smaller rotary_dim.

    Examples:
        >>> import posembed as pe
        >>> pe.RotarySpec(8, scaling=pe.ProportionalScaling(0.5)).frequencies().tolist()
        [1.0, 0.1, 0.0, 0.0]
    """

    kind: ClassVar[str] = "proportional"
    proportion: float = 1.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(Scaling):
    """LongRoPE: divides each pair by its own searched factor. Ding et al., arXiv:2402.13753.

    Args:
        short_factor: [rotary_dim / 2], for sequences up to ``original_max_positions``.
        long_factor: [rotary_dim / 2], for longer ones; :meth:`RotarySpec.resolve` chooses.
        original_max_positions: The context length of training.
        factor: How many times longer the context becomes.
        attention_factor: Default ``sqrt(1 + log(factor) / log(original_max_positions))``.
        long_attention_factor: Attention factor for longer sequences, if different (Phi-3.5-MoE).

    Examples:
        >>> import posembed as pe
        >>> scaling = pe.LongRopeScaling((1, 1), (1, 8), original_max_positions=4096, factor=8)
        >>> spec = pe.RotarySpec(4, scaling=scaling)
        >>> [spec.resolve(length).frequencies().tolist() for length in (4096, 4097)]
        [[1.0, 0.01], [1.0, 0.00125]]
    """

    kind: ClassVar[str] = "longrope"
    short_factor: Sequence[float]  # stored as tuples
    long_factor: Sequence[float]
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    long_attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class XPosScaling(Scaling):
    """xPos: scores fade with distance. Sun et al., arXiv:2212.10554.

    Pair ``i`` of a query is multiplied by ``zeta ** ((position - center) / scale_base)`` with
    ``zeta = (2 * i / rotary_dim + 0.4) / 1.4``; a key's, by the inverse. A single tensor is treated
    as a query; :meth:`RotarySpec.for_keys` gives the specification for keys.

    Args:
        scale_base: In positions; if negative, query and key swap roles.
        center: The position where the factor is 1, the same for queries and keys. Choose the middle
            of the sequence to keep factors near 1.

    Examples:
        >>> import torch, posembed as pe
        >>> spec, ones = pe.RotarySpec(4, scaling=pe.XPosScaling(512.0)), torch.ones(1, 1, 1, 4)
        >>> query = pe.functional.rotary(ones, spec=spec, offset=512)
        >>> key = pe.functional.rotary(ones, spec=spec.for_keys(), offset=512)
        >>> [round(tensor.norm().item(), 2) for tensor in (query, key)]  # 2.0 at position 0
        [0.99, 5.42]
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


def meant_by(value: Any) -> str:
    """What to write for a scaling that is given as a name, a number or a configuration's dict."""
    fields = dict(value) if isinstance(value, Mapping) else {}
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        kind, fields = "linear", {"factor": value}
    name = other_names.ours("scalings", kind) if isinstance(kind, str) else None
    if name is None:
        return "a scaling such as pe.YarnScaling(factor, original_max_positions)"
    scaling = next(each for each in typing.get_args(RotaryScaling) if each.__name__ == name)
    texts = []
    for field in dataclasses.fields(scaling):
        others = (field.name, *other_names.tables()["arguments"].get(field.name, ()))
        given = next((fields[other] for other in others if other in fields), None)
        if given is not None:
            texts.append(f"{field.name}={shown(given)}")
        elif field.default is dataclasses.MISSING:
            texts.append(f"{field.name}=…")
    return f"pe.{name}({', '.join(texts)})"
