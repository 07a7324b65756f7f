"""diagnose: names what a program's rotation does wrong, from its outputs alone.

A program is right where it is within the bound of its dtype and of float32 angles. Otherwise every
mistake, and then every two, are made with posembed's own reading of the model, and those that give
the program's outputs are named.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.diagnosis import programs
from posembed.diagnosis.mistakes import Mistake, made, mistakes_of, together
from posembed.diagnosis.observation import (
    Caller,
    Observed,
    Program,
    Recorded,
    axes_of,
    longest_of,
    observe,
    observe_recorded,
)
from posembed.diagnosis.reading_off import Sight, see
from posembed.diagnosis.rotation import Call, Rotation
from posembed.diagnosis.truth import truth_of
from posembed.glue.other_names import check_options
from posembed.glue.validation import positive
from posembed.models.options import READING, Reading
from posembed.specifications import RotarySpec


class PositionError(NamedTuple):
    """The largest error of outputs at a position, and the bound there."""

    position: Any  # an int, or a tuple with one for each axis
    error: float
    bound: float


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found; as text, a verdict in one line and the evidence.

    Attributes:
        verdict: "right", "wrong" or "unknown".
        mistakes: Each entry explains all outputs alone; it has one mistake or two.
        errors: The largest error at each position, against the truth.
        worst: The one of these that is largest, in multiples of its bound where one is exceeded.
        heads: The verdict on each head, where heads differ.
        notes: What else to know.
        read: What was read off unit vectors, where nothing fits.
        truth: Where the right rotation comes from.
    """

    verdict: str
    mistakes: tuple[tuple[str, ...], ...]
    errors: tuple[PositionError, ...]
    worst: PositionError
    heads: dict[int, str]
    notes: tuple[str, ...]
    read: dict[str, Any]
    truth: str

    @property
    def right(self) -> bool:
        """Whether the program is right."""
        return self.verdict == "right"

    def headline(self) -> str:
        """The verdict."""
        if self.right:
            return f"right to {self.worst.error:.1g}"
        if self.heads:
            return "heads differ"
        if not self.mistakes:
            return "unknown: no known mistake, and no two, give these outputs"
        return named(self.mistakes)

    def __str__(self) -> str:
        at = f"{self.worst.error:.2g} at position {self.worst.position}"
        lines = [self.headline(), f"largest error: {at}, where the bound is {self.worst.bound:.2g}"]
        if not self.right:
            beyond = [each for each in self.errors if not each.error <= each.bound]
            few = [beyond[round(i * (len(beyond) - 1) / 5)] for i in range(6)] if beyond else []
            texts = [f"{each.position}: {each.error:.2g}" for each in dict.fromkeys(few)]
            count = f"{len(beyond)} of {len(self.errors)} positions"
            lines.append(f"errors above the bound at {count}: {', '.join(texts)}")
        lines += [f"head {head}: {text}" for head, text in self.heads.items()]
        lines += [f"{name}: {value}" for name, value in self.read.items()]
        return "\n".join([*lines, *self.notes, f"truth: {self.truth}"])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as a JSON object."""
        found = dataclasses.asdict(self)
        found["errors"] = [each._asdict() for each in self.errors]
        return {"headline": self.headline(), **found, "worst": self.worst._asdict()}


# ---------------------------------------------------------------------------------------- what fits


class _Judge:
    """Compares rotations with what was observed of some heads."""

    def __init__(self, observed: Observed, heads: list[int]) -> None:
        self.roundoff = observed.roundoff
        self.calls = [call._replace(output=call.output[heads]) for call in observed.calls]
        self.parts = []  # one head and one vector at some positions
        for positions, length, x, output in self.calls:
            tokens = positions.shape[-1]
            some = sorted({round(i * (tokens - 1) / 9) for i in range(10)})
            self.parts.append(Call(positions[:, some], length, x[:1, some], output[:1, :1, some]))
        self.units = observed.units

    def _compared(self, rotation: Rotation, call: Call) -> tuple[Tensor, Tensor]:
        """What the rotation gives, and the bound."""
        return rotation.apply(call), rotation.bound(call, self.roundoff)

    def sound(self, rotation: Rotation, call: Call) -> Tensor:
        """At which tokens the outputs are this rotation's: bool [tokens]."""
        expected, bound = self._compared(rotation, call)
        within = (call.output - expected).abs() <= bound
        return within.flatten(0, -3).all(-1).all(0)

    def _share(self, rotation: Rotation, call: Call) -> float:
        """The share of components within the bound, of those that tell rounded numbers from exact.

        Where a number is nearly a tie, a program may have rounded it to the other side.
        """
        expected, bound = self._compared(rotation, call)
        exact = dataclasses.replace(rotation, rounded="")
        telling = (exact.apply(call) - expected).abs() > bound
        within = (call.output - expected).abs() <= bound
        shares = (within.double().mean(), within[..., telling].double().mean())
        return float(min(shares))

    def fits(self, rotation: Rotation) -> bool:
        """Whether the outputs are this rotation's, those of unit vectors too."""
        if rotation.rounded:
            likely = all(self._share(rotation, part) > 0.5 for part in self.parts)
            return likely and all(self._share(rotation, call) > 0.95 for call in self.calls)
        calls = (*self.parts, *self.calls, *self.units)  # the parts refuse most rotations
        return all(bool(self.sound(rotation, call).all()) for call in calls)

    def differs(self, wrong: Rotation, truth: Rotation) -> str:
        """Whether outputs tell two rotations apart: "clearly", "unseen" within the bound, or ""."""
        largest, seen = 0.0, False
        for call in self.calls:
            expected, bound = self._compared(truth, call)
            error = (wrong.apply(call) - expected).abs()
            seen = seen or not bool((error <= bound).all())
            largest = max(largest, float(error.max()))
        return "clearly" if seen else "unseen" if largest > 1e-9 else ""

    def errors(self, rotation: Rotation) -> list[PositionError]:
        """The largest error at each position; where some exceed the bound, the largest of those."""
        rows = []
        for call in self.calls:
            expected, bound = self._compared(rotation, call)
            error = (call.output - expected).abs().nan_to_num(nan=math.inf).amax(0)
            beyond = torch.where(error <= bound, 0, error)
            chosen = torch.where(beyond.amax((0, -1), keepdim=True) > 0, beyond, error)
            places = chosen.transpose(0, 1).flatten(1).argmax(-1)
            for token, place in enumerate(places.tolist()):
                values = (t.transpose(0, 1).flatten(1)[token, place].item() for t in (error, bound))
                at = call.positions[:, token].tolist()
                rows.append(PositionError(at[0] if len(at) == 1 else tuple(at), *values))
        return rows


def _short_table(judge: _Judge, rotation: Rotation, caller: Caller | None) -> str | None:
    """The mistake of a table that is too short; None where it is not so.

    Outputs are right below a position, and from there on they are those of other positions.
    """
    call = judge.calls[-1]
    sound = judge.sound(rotation, call)
    places, order = call.positions.amax(0).sort(stable=True)
    count = int(sound[order].cumprod(0).sum())
    if len(judge.calls) > 1 or count < 4 or count == len(sound):
        return None
    good, bad = int(places[count - 1]), int(places[count])
    sizes = [good + 1, bad]
    if caller is not None:
        while bad - good > 1:
            at = torch.full((axes_of(rotation.spec), 1), (good + bad) // 2)
            right = bool(judge.sound(rotation, caller.at(at, call.length)).all())
            good, bad = (int(at[0]), bad) if right else (good, int(at[0]))
        sizes = [bad]
    for size in sizes:
        last = dataclasses.replace(rotation, rows=size, beyond="last")
        if judge.fits(last):
            return f"table too short: {size} rows, the last stands for later positions"
        if judge.fits(dataclasses.replace(rotation, rows=size, beyond="wrapped")):
            return f"table too short: {size} rows, which begin again for later positions"
    return None


class _Found(NamedTuple):
    """What fits outputs: nothing, no mistake, or mistakes."""

    verdict: str
    base: Rotation
    mistakes: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def _explained(
    judge: _Judge, base: Rotation, every: list[Mistake], caller: Caller | None
) -> tuple[tuple[str, ...], ...]:
    """The smallest sets of mistakes that give the outputs."""
    found: list[tuple[str, ...]] = []
    for count in (0, 1, 2):
        for chosen in together(every, count):
            wrong = made(base, chosen)
            if wrong is None:
                continue
            names = tuple(mistake.name for mistake in chosen)
            if count and judge.fits(wrong) and judge.differs(wrong, base) == "clearly":
                found.append(names)
            elif count < 2:
                short = _short_table(judge, wrong, caller)
                found += [] if short is None else [(*names, short)]
        if any(len(names) <= max(count, 1) for names in found):
            break
    fewest = min(map(len, found), default=0)
    return tuple(names for names in found if len(names) == fewest)


def _search(judge: _Judge, spec: RotarySpec, every: list[Mistake], caller: Caller | None) -> _Found:
    """What the outputs are; interleaved pairs may come out in halves, which leaves scores alike."""
    bases: list[tuple[Rotation, tuple[str, ...]]] = [(Rotation(spec), ())]
    if spec.interleaved:
        note = "order: pairs come out split in halves, which is right if query and key both do"
        bases.append((Rotation(spec, halves_out=True), (note,)))
    for base, notes in bases:
        if judge.fits(base):
            return _Found("right", base, (), notes)
    for base, notes in bases:
        mistakes = _explained(judge, base, every, caller)
        if mistakes:
            return _Found("wrong", base, mistakes, notes)
    return _Found("unknown", bases[0][0])


# ----------------------------------------------------------------------------------------- verdicts


def _groups(observed: Observed, spec: RotarySpec) -> list[list[int]]:
    """Heads with the same outputs."""
    groups: list[list[int]] = []
    bounds = [2 * Rotation(spec).bound(call, observed.roundoff) for call in observed.calls]
    outputs = [call.output.nan_to_num(nan=1e300) for call in observed.calls]
    for head in range(outputs[0].shape[0]):
        for group in groups:
            errors = [(output[head] - output[group[0]]).abs() for output in outputs]
            if all(bool((e <= bound).all()) for e, bound in zip(errors, bounds, strict=True)):
                group.append(head)
                break
        else:
            groups.append([head])
    return groups


def named(mistakes: Iterable[tuple[str, ...]]) -> str:
    """Mistakes in words: those of a set are together, the sets exclude one another."""
    return ", or ".join(" and ".join(names) for names in mistakes)


def _unseen(judge: _Judge, base: Rotation, every: list[Mistake]) -> list[str]:
    """Mistakes that these outputs would not show."""
    made_ = ((each.name, each.made(base)) for each in every if each.aspect != "rounding")
    hidden = [n for n, wrong in made_ if wrong and judge.differs(wrong, base) == "unseen"]
    return [f"not seen at these positions: {'; '.join(hidden)}"] if hidden else []


def _bound_in_words(judge: _Judge, base: Rotation) -> str:
    """The bound of components of size 1."""
    call = judge.calls[-1]
    size = base.spec.attention_factor * 2 * 4 * judge.roundoff
    ones = call._replace(x=torch.ones_like(call.x))
    most = float(base.bound(ones, judge.roundoff).max())
    last = call.positions.amax().item()
    return (
        f"bound, for components up to 1: {size:.1e} for the dtype, and that of float32 angles, up "
        f"to {most:.1e} at position {last}"
    )


def _judged(
    observed: Observed, spec: RotarySpec, others: dict[str, RotarySpec], caller: Caller | None
) -> tuple[list[tuple[list[int], _Found]], _Judge, list[Mistake], Sight]:
    """The finding for each group of heads."""
    sight = see(observed, spec)
    every = mistakes_of(spec, observed.calls[-1].length, sight.read, others)
    groups = _groups(observed, spec)
    if len(groups) > 1:  # unit vectors are spread over heads, which differ
        observed = observed._replace(units=[])
    judges = [_Judge(observed, heads) for heads in groups]
    alone = caller if len(groups) == 1 else None
    found = [_search(judge, spec, every, alone) for judge in judges]
    worst = next((at for at, each in enumerate(found) if each.verdict != "right"), 0)
    return list(zip(groups, found, strict=True)), judges[worst], every, sight


def _diagnosis(
    observed: Observed, truth: Any, caller: Caller | None, notes: list[str]
) -> Diagnosis:
    """The verdict on outputs."""
    findings, judge, every, sight = _judged(observed, truth.spec, truth.others, caller)
    found = next((f for _, f in findings if f.verdict != "right"), findings[0][1])
    verdict, mistakes = found.verdict, found.mistakes
    if observed.ends is not None:
        position, words = observed.ends
        short = f"table too short: position {position} raises {words}"
        verdict = "unknown" if verdict == "unknown" else "wrong"
        mistakes = (
            tuple((*names, short) for names in mistakes or ((),)) if verdict == "wrong" else ()
        )
        notes = [*notes, f"positions from {position} on are not compared: {words}"]
    heads = {}
    if len(findings) > 1:
        texts = ((group, named(each.mistakes) or each.verdict) for group, each in findings)
        heads = {head: text for group, text in texts for head in group}
    if verdict == "right":
        notes = [*notes, *_unseen(judge, found.base, every)]
    errors = judge.errors(found.base)
    beyond = [each for each in errors if not each.error <= each.bound]
    return Diagnosis(
        verdict=verdict,
        mistakes=mistakes,
        errors=tuple(errors),
        worst=max(beyond or errors, key=lambda each: each.error),
        heads=heads,
        notes=(*found.notes, *notes, _bound_in_words(judge, found.base)),
        read=sight.facts if verdict == "unknown" else {},
        truth=truth.source,
    )


def diagnose(
    program: Program | Recorded | Sequence[Recorded] | str | os.PathLike[str],
    config: Any,
    *,
    layer_type: str | None = None,
    layer: int | None = None,
    max_position: int | None = None,
    heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **reading: Unpack[Reading],
) -> Diagnosis:
    """Names what a program's rotation does wrong, beside what its model's file says.

    The program is called with random and with unit vectors, at positions up to the model's maximum
    and on both sides of each length at which a scaling changes. It is right where it is within a
    bound, which the result prints: four roundings of its dtype, and angles in float32. Otherwise
    all known mistakes, and all two of them, are made with the right rotation; those that give the
    program's outputs are named. If none does, the verdict is "unknown", with what was read.

    Args:
        program: Takes x [batch, heads, seq, head_dim] and positions, int64 [seq] or, for rotations
            with several axes, [axes, seq]; returns x rotated, or a tuple that begins with it. Or a
            path that :func:`posembed.diagnosis.programs.load` reads, or :class:`Recorded` tensors.
        config: As in :meth:`posembed.RotarySpec.from_huggingface`, or a specification.
        layer_type: As there.
        layer: The index of a layer, instead.
        max_position: The last position to test; default: that of the configuration.
        heads: Heads of x; default: as many as the configuration says, or two.
        dtype: Of x.
        device: Of x and positions.
        **reading: ``part``, ``interleaved``, ``base``, ``ignore``, ``read_module`` and
            ``trust_remote_code`` of :meth:`posembed.RotarySpec.from_huggingface`.

    Raises:
        ValueError: The configuration is refused, layers of this kind do not rotate, or the program
            returns another shape.
        TypeError: ``config`` is of another type, or ``dtype`` is not floating-point.

    Examples:
        A program with the base of Llama 2, for a model with that of Llama 3:

        >>> import posembed as pe
        >>> config = {"model_type": "llama", "head_dim": 128, "rope_theta": 500000.0}
        >>> rope = pe.RotaryEmbedding(128, base=10000.0, layout="bhsd")
        >>> found = pe.diagnose(lambda x, positions: rope(x, positions=positions), config)
        >>> found.mistakes
        (('theta ignored, 10,000 instead',),)
        >>> rope = pe.RotaryEmbedding(128, base=500000.0, layout="bhsd")
        >>> str(pe.diagnose(lambda x, positions: rope(x, positions=positions), config))[:8]
        'right to'
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating-point dtype, got {dtype}")
    check_options("diagnose", reading, READING)
    truth = truth_of(config, layer_type, layer, **reading)
    if isinstance(program, (str, os.PathLike)):
        program = programs.load(program, truth.spec, config, layer_type)
    if not callable(program):
        given = [program] if isinstance(program, Recorded) else list(program)
        observed = observe_recorded(given, truth.spec)
        tested = sum(call.positions.shape[-1] for call in observed.calls)
        notes = [f"compared: {tested} recorded positions up to {observed.calls[-1].length - 1}"]
        return _diagnosis(observed, truth, None, notes)
    longest, why = longest_of(truth.spec, truth.longest)
    if max_position is not None:
        longest, why = positive("max_position", max_position) + 1, "max_position"
    count = truth.heads if heads is None else positive("heads", heads)
    caller = Caller(program, truth.spec, count, dtype, device)
    observed = observe(caller, longest)
    tested = sum(call.positions.shape[-1] for call in observed.calls)
    lengths = " and ".join(str(call.length) for call in observed.calls)
    notes = [
        f"compared: {tested} positions, {count} heads, {str(dtype).removeprefix('torch.')}, "
        f"sequences of {lengths} tokens ({why})"
    ]
    return _diagnosis(observed, truth, caller, notes)
