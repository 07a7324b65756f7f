"""What unit vectors show without any model: partners, direction, amplitude and frequencies."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posembed.diagnosis.mistakes import Read, snapped
from posembed.diagnosis.observation import Observed, axes_of
from posembed.diagnosis.rotation import Call
from posembed.specifications import RotarySpec


class Sight(NamedTuple):
    """What was read, for people, and what it suggests."""

    facts: dict[str, Any]
    read: Read = Read()


def pairs_in(images: Tensor, roundoff: float) -> list[tuple[int, int]]:
    """Components that turn into one another, for images [tokens, out, in]."""
    off = images.abs().amax(0)
    off.fill_diagonal_(0)
    partner = off.argmax(0)
    partner[off.amax(0) <= 8 * roundoff] = -1
    return [(a, b) for a, b in enumerate(partner.tolist()) if a < b and int(partner[b]) == a]


def frequencies(places: list[int], angles: Tensor) -> Tensor:
    """Radians per position [pairs], from angles [tokens, pairs] at 0 and at powers of two.

    The angle of 2p is twice that of p, up to whole turns, so each power adds a bit.
    """
    begin, turn = angles[places.index(0)], torch.zeros(angles.shape[-1], dtype=torch.float64)
    power = 1
    while power in places:
        now = angles[places.index(power)] - begin
        turn = (now + 2 * math.pi * torch.round((turn * power - now) / (2 * math.pi))) / power
        power *= 2
    return turn


def _is_linear(observed: Observed, units: Call, images: Tensor) -> bool:
    """Whether outputs for random vectors are sums of those for unit vectors."""
    call = observed.calls[-1]
    told = units.positions[0].tolist()
    tokens = [at in told for at in call.positions[0].tolist()]
    x, output = call.x[:, tokens], call.output[..., tokens, :]
    expected = torch.einsum("toi,bti->bto", images, x)
    loose = 64 * observed.roundoff * x.abs().sum(-1, keepdim=True)
    return bool(((output - expected).abs() <= loose).all())


def form(pairs: list[tuple[int, int]]) -> str:
    """How pairs lie, in words."""
    gaps = {b - a for a, b in pairs}
    if gaps == {1}:
        return "interleaved"
    return f"(i, i + {gaps.pop()})" if len(gaps) == 1 else "in no usual order"


def _suggested(turns: Tensor, spec: RotarySpec, length: int) -> Read:
    """A base, and a ratio to the right frequencies, of round numbers."""
    right, width = spec.resolve(length).frequencies(), spec.rotary_dim
    if turns.shape != right.shape or width is None or width < 4 or not bool((turns > 0).all()):
        return Read()
    ratios = turns / right
    middle = float(ratios.median())
    even = bool(((ratios / middle - 1).abs() < 1e-3).all()) and abs(middle - 1) > 1e-3
    inverse = snapped(1 / middle) if middle < 1 else None
    ratio = None if not even else 1 / inverse if inverse else snapped(middle)
    base = float((turns[0] / turns[1]) ** (width / 2)) if spec.sections is None else math.nan
    return Read(snapped(base), ratio)


def see(observed: Observed, spec: RotarySpec) -> Sight:
    """Reads the images of unit vectors, if there are any."""
    if not observed.units or not bool(observed.units[-1].output.isfinite().all()):
        return Sight({})
    call = observed.units[-1]
    images = call.output[0].permute(1, 2, 0)  # [tokens, out, in]
    pairs = pairs_in(images, observed.roundoff)
    facts: dict[str, Any] = {}
    if not _is_linear(observed, call, images):
        facts["read"] = "outputs for random vectors are not sums of those for unit vectors"
    if not pairs:
        return Sight({**facts, "read pairs": "none"})
    first, second = torch.tensor(pairs).T
    cosines, sines = images[:, first, first], images[:, second, first]
    sizes = torch.hypot(cosines, sines)
    facts["read pairs"] = (
        f"{len(pairs)} {form(pairs)}, components {int(first.min())} to {int(second.max())}"
    )
    facts["read amplitude"] = f"{float(sizes.min()):.6g} to {float(sizes.max()):.6g}"
    if axes_of(spec) > 1:
        return Sight(facts)
    turns = frequencies(call.positions[0].tolist(), torch.atan2(sines, cosines))
    facts["read radians per position"] = ", ".join(f"{turn:.6g}" for turn in turns[:4].tolist())
    return Sight(facts, _suggested(turns.abs(), spec, call.length))
