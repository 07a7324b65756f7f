"""Mistakes that programs make with rotations: each changes a :class:`Rotation` as they do.

Mistakes of one aspect exclude one another; those of different aspects are also tried together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from posembed.diagnosis.rotation import Rotation
from posembed.specifications import RotarySpec, Sections
from posembed.specifications.scaling import LinearScaling, LongRopeScaling, Scaling, YarnScaling


class Mistake(NamedTuple):
    """A mistake by name; ``made`` returns None where it cannot be made."""

    aspect: str
    name: str
    made: Callable[[Rotation], Rotation | None]


class Read(NamedTuple):
    """What a program's outputs suggest: its base, and the ratio of its frequencies to the right."""

    base: float | None = None
    ratio: float | None = None


def _of_spec(aspect: str, name: str, change: Callable[[RotarySpec], dict[str, Any]]) -> Mistake:
    """A mistake that another specification describes; no changes: it cannot be made."""

    def made(rotation: Rotation) -> Rotation | None:
        changes = change(rotation.spec)
        if not changes:
            return None
        try:
            spec = dataclasses.replace(rotation.spec, **changes)
        except ValueError:
            return None
        return dataclasses.replace(rotation, spec=spec)

    return Mistake(aspect, name, made)


def _of_rotation(aspect: str, name: str, **changes: Any) -> Mistake:
    return Mistake(aspect, name, lambda rotation: dataclasses.replace(rotation, **changes))


def _always(**changes: Any) -> Callable[[RotarySpec], dict[str, Any]]:
    return lambda spec: changes


def _scalings(spec: RotarySpec, longest: int, read: Read) -> Iterator[Mistake]:
    scaling = spec.scaling
    if read.ratio is not None:
        how = (
            f"multiplied by {read.ratio:g}" if read.ratio > 1 else f"divided by {1 / read.ratio:g}"
        )
        name, ratio = f"all frequencies {how}", read.ratio
        yield _of_spec("scaling", name, lambda s: _custom(s, s.frequencies() * ratio))
    if scaling is None:
        return
    yield _of_spec("scaling", "scaling ignored", lambda s: {"scaling": None})
    if spec.attention_factor != 1.0:
        name = "frequencies not scaled, though the attention factor is there"
        plain = functools.partial(dataclasses.replace, scaling=None)
        yield _of_spec("scaling", name, lambda s: _custom(s, plain(s).frequencies()))
    factor = getattr(scaling, "factor", None)
    if isinstance(scaling, LinearScaling):
        inverse = LinearScaling(1 / scaling.factor)
        name = "frequencies multiplied by the scaling's factor, not divided"
        yield _of_spec("scaling", name, lambda s: {"scaling": inverse})
    elif factor is not None:
        name = f"all frequencies divided by {factor:g}, as linear scaling does"
        yield _of_spec("scaling", name, lambda s: {"scaling": LinearScaling(factor)})
    original = getattr(scaling, "original_max_positions", longest)
    if original != longest:
        name = f"scaling by {longest} as the original length, not {original}"
        other = Scaling.from_dict({**scaling.to_dict(), "original_max_positions": longest})
        yield _of_spec("scaling", name, lambda s: {"scaling": other})
    if isinstance(scaling, YarnScaling):
        name = f"limits of YaRN's blend {'not ' * scaling.truncate}rounded to whole pairs"
        blunt = dataclasses.replace(scaling, truncate=not scaling.truncate)
        yield _of_spec("scaling", name, lambda s: {"scaling": blunt})


def _custom(spec: RotarySpec, frequencies: torch.Tensor) -> dict[str, Any]:
    """Other frequencies, and the attention factor of the scaling."""
    factor = spec.attention_factor
    custom = {"custom_frequencies": frequencies.tolist(), "custom_attention_factor": factor}
    return {"scaling": None, **custom}


def _with_factor(spec: RotarySpec, factor: float) -> dict[str, Any]:
    """Another attention factor."""
    if isinstance(spec.scaling, YarnScaling):
        return {"scaling": dataclasses.replace(spec.scaling, attention_factor=factor)}
    if isinstance(spec.scaling, LongRopeScaling):
        return {
            "scaling": dataclasses.replace(
                spec.scaling, attention_factor=factor, long_attention_factor=None
            )
        }
    return {} if spec.custom_attention_factor is None else {"custom_attention_factor": factor}


def _factors(spec: RotarySpec) -> Iterator[Mistake]:
    if _with_factor(spec, 1.0):
        yield _of_spec("factor", "attention factor missing", lambda s: _with_factor(s, 1.0))
        yield _of_spec(
            "factor", "attention factor applied twice",
            lambda s: _with_factor(s, s.attention_factor**2),
        )  # fmt: skip


def _lengths(spec: RotarySpec, longest: int) -> Iterator[Mistake]:
    """Of frequencies that depend on the length."""
    if not spec.is_dynamic:
        return
    for rule, name in (
        ("original", "frequencies of the original length at every length"),
        ("longest", "frequencies of the longest sequence at every length"),
        ("late", "frequencies change one position late"),
        ("early", "frequencies change one position early"),
    ):
        yield _of_rotation("length", name, length=rule, longest=longest)


def _bases(spec: RotarySpec, read: Read) -> Iterator[Mistake]:
    if spec.custom_frequencies is not None:
        return
    if spec.base != 10000.0:
        yield _of_spec("base", "theta ignored, 10,000 instead", lambda s: {"base": 10000.0})
    if read.base is not None and read.base not in (spec.base, 10000.0):
        name = f"theta is {read.base:g}, not {spec.base:g}"
        yield _of_spec("base", name, lambda s: {"base": read.base})


def _windows(spec: RotarySpec) -> Iterator[Mistake]:
    head, width, start = spec.head_dim, spec.rotary_dim, spec.rotary_start
    assert width is not None
    if width == head:
        half = head // 4 * 2
        yield _of_spec(
            "window", f"only the first {half} components rotate", lambda s: {"rotary_dim": half}
        )
        return
    other = head - width - start
    if other != start:
        ends = ("first", "last") if start == 0 else ("last", "first")
        name = (
            f"partial window at the wrong end: the {ends[1]} {width} components, not the {ends[0]}"
        )
        yield _of_spec("window", name, lambda s: {"rotary_start": other})
    whole: dict[str, Any] = {"rotary_dim": head, "rotary_start": 0}
    yield _of_spec("window", f"the whole head rotates, not {width} components", lambda s: whole)
    if spec.sections is None and spec.custom_frequencies is None:
        name = f"frequencies of {head} components, not of the {width} that rotate"
        wide = functools.partial(dataclasses.replace, **whole)
        yield _of_spec("series", name, lambda s: _custom(s, wide(s).frequencies()[: width // 2]))


def _pairs(spec: RotarySpec) -> Iterator[Mistake]:
    forms = ("split in halves", "interleaved (2i, 2i + 1)")
    name = f"pairs {forms[not spec.interleaved]}, not {forms[spec.interleaved]}"
    yield _of_spec("pairs", name, lambda s: {"interleaved": not s.interleaved})
    yield _of_spec("direction", "turned backwards", lambda s: {"reverse": not s.reverse})
    yield _of_rotation("times", "turned twice", times=2)
    yield _of_rotation("times", "not turned at all", times=0)


def _axes(spec: RotarySpec) -> Iterator[Mistake]:
    sections = spec.sections
    if sections is None:
        return
    count = sections.axes or 1 + max(sections.axis_of_pair)
    for order in itertools.permutations(range(count)):
        if order != tuple(range(count)):
            yield _of_rotation("axes", f"axes exchanged: {order}, not in order", axes=order)
    if count > 1:
        yield _of_rotation("axes", "all pairs turn by the first axis", axes=(0,) * count)
    sizes = [sections.axis_of_pair.count(axis) for axis in range(count)]
    for turns, name in (
        (False, "pairs of an axis lie together, not in turns"),
        (True, "axes alternate from pair to pair"),
    ):
        other = Sections(sizes, turns, sections.restart, within_axes=sections.within_axes)
        if other.axis_of_pair != sections.axis_of_pair:
            yield _of_spec("sections", name, _always(sections=other))
    whole, shared = "each axis has the whole series of frequencies", "one series for all axes"
    within, over = "pairs within the components of their axis", "pairs not within their axis"
    for field, names in (("restart", (whole, shared)), ("within_axes", (within, over))):
        if field == "restart" and spec.custom_frequencies is not None:
            continue
        now = getattr(sections, field)
        other = Sections(**{**vars(sections), field: not now})
        yield _of_spec(field, names[now], _always(sections=other))


def _numbers() -> Iterator[Mistake]:
    for shift, name in ((1, "late"), (-1, "early")):
        yield _of_rotation("shift", f"positions off by one: {name}", shift=shift)
    yield _of_rotation("shift", "positions off by two: late", shift=2)
    words = {
        "frequencies": "frequencies rounded to",
        "positions": "positions rounded to",
        "angles": "positions, frequencies, angles, cosines and sines rounded to",
        "tables": "cosines and sines rounded to",
    }
    for precision in (torch.bfloat16, torch.float16):
        for what, text in words.items():
            name = f"{text} 16 bits ({str(precision).removeprefix('torch.')})"
            yield _of_rotation("rounding", name, rounded=what, precision=precision)


def mistakes_of(
    spec: RotarySpec, longest: int, read: Read, others: Mapping[str, RotarySpec]
) -> list[Mistake]:
    """All that can go wrong with a specification whose sequences have up to ``longest`` tokens.

    The order counts where two are made together: those that replace the specification come first.
    """
    return [
        *(
            _of_rotation("kind", f"rotates as layers of kind {kind!r} do", spec=other)
            for kind, other in others.items()
        ),
        *_bases(spec, read),
        *_windows(spec),
        *_pairs(spec),
        *_axes(spec),
        *_factors(spec),
        *_scalings(spec, longest, read),
        *_lengths(spec, longest),
        *_numbers(),
    ]


def together(mistakes: list[Mistake], count: int) -> Iterator[tuple[Mistake, ...]]:
    """All sets of so many mistakes of different aspects."""
    for chosen in itertools.combinations(mistakes, count):
        if len({mistake.aspect for mistake in chosen}) == count:
            yield chosen


def made(rotation: Rotation, mistakes: tuple[Mistake, ...]) -> Rotation | None:
    """The rotation with these mistakes; None where one cannot be made."""
    found: Rotation | None = rotation
    for mistake in mistakes:
        found = None if found is None else mistake.made(found)
    return found


def snapped(value: float) -> float | None:
    """A number of three digits, if this is near one."""
    if not (math.isfinite(value) and value > 0):
        return None
    near = float(f"{value:.3g}")
    return near if abs(near / value - 1) < 1e-3 else None
