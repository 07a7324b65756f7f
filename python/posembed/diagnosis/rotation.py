"""A rotation as a program may compute it: a specification, and what else went wrong.

Su et al., "RoFormer", arXiv:2104.09864. All is float64: it predicts outputs, models never call it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posembed.specifications import RotarySpec

FLOAT32_ROUNDOFF = 2.0**-24


class Call(NamedTuple):
    """A call of a program, whose frequencies may depend on the length."""

    positions: Tensor  # int64 [axes, tokens]
    length: int
    x: Tensor  # float64 [batch, tokens, head_dim]
    output: Tensor  # float64 [heads, batch, tokens, head_dim]


@functools.lru_cache(maxsize=64)
def components(spec: RotarySpec) -> tuple[Tensor, Tensor]:
    """The first and the second component of each pair: int64 [pairs] each."""
    assert spec.rotary_dim is not None
    start, pairs = spec.rotary_start, spec.rotary_dim // 2
    if spec.interleaved:
        first = start + 2 * torch.arange(pairs)
        return first, first + 1
    runs = [pairs]
    if spec.sections is not None and spec.sections.within_axes:
        runs = [len(list(run)) for _, run in itertools.groupby(spec.sections.axis_of_pair)]
    ends = itertools.accumulate(runs, initial=0)
    windows = [(start + 2 * end, size) for end, size in zip(ends, runs, strict=False)]
    first = torch.cat([torch.arange(begin, begin + size) for begin, size in windows])
    return first, first + torch.tensor(runs).repeat_interleave(torch.tensor(runs))


@dataclasses.dataclass(frozen=True)
class Rotation:
    """What a program computes.

    Args:
        spec: What it would be without the rest.
        times: How often it rotates.
        shift: Added to positions.
        axes: The axis of the given positions that serves as each axis; (): its own.
        rounded: What is rounded to ``precision``.
        precision: A dtype of 16 bits.
        table: The number of rows, 0 for no limit, and what stands for later positions.
        length: The sequence length that decides frequencies: that of the call, or a rule.
        halves_out: Interleaved pairs come out as first and second components, which leaves scores
            as they are.
    """

    spec: RotarySpec
    times: int = 1
    shift: int = 0
    axes: tuple[int, ...] = ()
    rounded: Literal["", "frequencies", "positions", "angles", "tables"] = ""
    precision: torch.dtype = torch.float64
    rows: int = 0
    beyond: Literal["", "last", "wrapped"] = ""
    length: Literal["call", "original", "longest", "late", "early"] = "call"
    longest: int = 0
    halves_out: bool = False

    def spec_at(self, length: int) -> RotarySpec:
        """The specification for a call with this many positions."""
        chosen = {
            "call": length,
            "original": 1,
            "longest": self.longest,
            "late": length - 1,
            "early": length + 1,
        }
        return self.spec.resolve(chosen[self.length])

    def places(self, positions: Tensor) -> Tensor:
        """The positions that the program takes for [axes, tokens]: float64 [tokens, pairs or 1]."""
        at = positions.double() + self.shift
        if self.beyond == "last":
            at = at.clamp(max=self.rows - 1)
        elif self.beyond == "wrapped":
            at = at % self.rows
        if self.axes:
            at = at[list(self.axes)]
        sections = self.spec.sections
        return at[:1].T if sections is None else at[list(sections.axis_of_pair)].T

    def _short(self, value: Tensor, *kinds: str) -> Tensor:
        """The value, rounded if that is what the program rounds."""
        return value.to(self.precision).double() if self.rounded in kinds else value

    def apply(self, call: Call) -> Tensor:
        """The call's x as the program would rotate it."""
        spec = self.spec_at(call.length)
        first, second = components(spec)
        places = self._short(self.places(call.positions), "positions", "angles")
        frequencies = self._short(spec.frequencies(), "frequencies", "angles")
        angles = self._short(places * frequencies, "angles") * (-1 if spec.reverse else 1)
        cosines, sines = (
            self._short(table, "tables", "angles") * spec.attention_factor
            for table in (angles.cos(), angles.sin())
        )
        x = call.x
        for _ in range(self.times):
            a, b = x[..., first], x[..., second]
            x = x.clone()
            x[..., first], x[..., second] = a * cosines - b * sines, b * cosines + a * sines
        if self.halves_out:
            window = torch.cat((x[..., first], x[..., second]), -1)
            x = x.clone()
            x[..., torch.cat((first, second)).sort().values] = window
        return x

    def bound(self, call: Call, roundoff: float) -> Tensor:
        """How far a sound program may be from :meth:`apply`, for each component of the result.

        The program rounds cosine, factor, product and sum to ``roundoff``, and has the angle as the
        product of a float32 position and a float32 frequency. That has about six roundings, and
        those of its logarithm, or two for each pair before it if it is a running product
        (llama.cpp).
        """
        spec = self.spec_at(call.length)
        first, second = components(spec)
        frequencies = spec.frequencies().abs()
        logarithms = frequencies.clamp(min=1e-300).log().abs()
        roundings = 6 + 2 * torch.maximum(logarithms, torch.arange(len(frequencies)))
        angles = self.places(call.positions).abs() * (frequencies * roundings * FLOAT32_ROUNDOFF)
        share = spec.attention_factor * (angles.clamp(max=2) + 4 * roundoff)
        x = call.x.abs()
        found = x * roundoff
        size = max(1, self.times) * share * (x[..., first] + x[..., second])
        found[..., first] = found[..., second] = size
        if self.halves_out:
            found[..., torch.cat((first, second)).sort().values] = torch.cat((size, size), -1)
        return found
