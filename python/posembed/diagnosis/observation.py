"""What a program does: its outputs for random and for unit vectors, or those that were recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posembed.diagnosis.rotation import Call
from posembed.specifications import RotarySpec

# program(x [batch, heads, seq, head_dim], positions [seq] or [axes, seq]) -> x rotated
Program = Callable[[Tensor, Tensor], Any]
RANDOM = 2  # random vectors of each head


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Tensors of an engine, from before and after its rotation.

    ``x`` and ``output`` are [batch, heads, seq, head_dim], or have fewer leading dimensions;
    ``positions`` [seq], or [axes, seq].
    """

    x: Tensor
    positions: Tensor
    output: Tensor


class Observed(NamedTuple):
    """All calls, and where the program's table ends, if a call failed."""

    calls: list[Call]
    units: list[Call]  # of unit vectors, spread over the heads: x [head_dim, tokens, head_dim]
    roundoff: float
    ends: tuple[int, str] | None = None


def axes_of(spec: RotarySpec) -> int:
    """Axes of positions; 1 where there are no sections."""
    sections = spec.sections
    return 1 if sections is None else sections.axes or 1 + max(sections.axis_of_pair)


def changes_of(spec: RotarySpec) -> list[int]:
    """The lengths at which a scaling changes."""
    length = getattr(spec.scaling, "original_max_positions", None)
    return [] if length is None else [length]


def longest_of(spec: RotarySpec, stated: int | None) -> tuple[int, str]:
    """How many positions to test, and why: the configuration's maximum, or one of the scaling."""
    if stated is not None:
        return stated, "the configuration's maximum"
    changes = changes_of(spec)
    if changes:
        return int(max(changes) * max(2, getattr(spec.scaling, "factor", None) or 1)), "its scaling"
    picture = spec.sections is not None and spec.sections.restart
    return 128 if picture else 4096, "no maximum is stated"


def lengths_of(spec: RotarySpec, longest: int) -> list[int]:
    """Lengths of sequences to call with: on both sides of each at which frequencies change."""
    if not spec.is_dynamic:
        return [longest]
    (change,) = changes_of(spec)
    return sorted({n for n in (change, change + 1, 2 * change, longest) if n <= longest})


def positions_of(spec: RotarySpec, length: int) -> Tensor:
    """Positions below ``length``: int64 [axes, tokens], small ones, powers of two, and the last.

    Odd ones beside each power show what has 8 or 11 bits.
    """
    powers = [2**bits for bits in range(length.bit_length())]
    near = [n for power in powers for n in (power - 1, power, power + power // 2 + 1)]
    near += [n + d for n in changes_of(spec) for d in (-1, 0, 1)]
    chosen = sorted({n for n in (*near, length - 1) if n < length})
    orders = [list(range(len(chosen)))]
    for axis in range(1, axes_of(spec)):  # every axis has all of them, in another order
        generator = torch.Generator().manual_seed(axis)
        orders.append(torch.randperm(len(chosen), generator=generator).tolist())
    return torch.tensor([[chosen[place] for place in order] for order in orders])


def random_vectors(spec: RotarySpec, batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Numbers between -1 and 1 that the dtype has: [batch, 1, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 1, tokens, spec.head_dim)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(dtype)


class Caller:
    """Calls a program with tensors of one dtype on one device."""

    def __init__(
        self, program: Program, spec: RotarySpec, heads: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.program, self.spec, self.heads = program, spec, heads
        self.dtype, self.device, self.roundoff = dtype, device, torch.finfo(dtype).eps / 2

    def call(self, x: Tensor, positions: Tensor) -> Tensor:
        """The output for x [batch, heads, tokens, head_dim] at positions [axes, tokens]."""
        places = positions[0] if axes_of(self.spec) == 1 else positions
        with torch.no_grad():
            copy = x.clone(memory_format=torch.contiguous_format)  # some rotate in place
            found = self.program(copy.to(self.device), places.to(self.device))
        found = torch.as_tensor(found[0] if isinstance(found, (tuple, list)) else found)
        if found.shape != x.shape:
            raise ValueError(
                f"program: expected an output of shape {list(x.shape)} like its input, got "
                f"{list(found.shape)}"
            )
        if found.is_floating_point():
            self.roundoff = max(self.roundoff, torch.finfo(found.dtype).eps / 2)
        return found.detach().cpu()

    def at(self, positions: Tensor, length: int) -> Call:
        """Random vectors, the same for each head."""
        x = random_vectors(self.spec, RANDOM, positions.shape[-1], self.dtype)
        output = self.call(x.expand(-1, self.heads, -1, -1), positions)
        return Call(positions, length, x[:, 0].double(), output.transpose(0, 1).double())

    def units(self, call: Call) -> Call:
        """Unit vectors, which are spread over the heads, at some positions of a call."""
        told = {0, call.length - 1, *(2**bits for bits in range(call.length.bit_length()))}
        positions = call.positions[:, [at in told for at in call.positions[0].tolist()]]
        size, tokens = self.spec.head_dim, positions.shape[-1]
        batch = -(-size // self.heads)
        unit = torch.eye(size, dtype=self.dtype)
        spread = torch.cat((unit, unit[: batch * self.heads - size]))
        shape = (batch, self.heads, tokens, size)
        x = spread.view(batch, self.heads, 1, size).expand(shape)
        images = self.call(x, positions).flatten(0, 1)[:size].double()
        return Call(positions, call.length, unit.double()[:, None].expand_as(images), images[None])

    def works_to(self, position: int) -> bool:
        """Whether the program takes this position."""
        last = torch.full((axes_of(self.spec), 1), position)
        positions = torch.cat((torch.zeros_like(last), last), 1)
        try:
            self.at(positions, position + 1)
        except Exception:  # whatever the program raises
            return False
        return True


def table_end(caller: Caller, longest: int, error: Exception) -> tuple[int, str]:
    """The first position that a program refuses, and its words."""
    good, bad = 0, longest - 1
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    if not caller.works_to(good) or caller.works_to(bad):
        raise ValueError(f"program: expected rotated x, but it raises {words}") from error
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if caller.works_to(middle) else (good, middle)
    return bad, words


def observe(caller: Caller, longest: int) -> Observed:
    """Calls the program at all lengths and positions that count."""
    spec, ends = caller.spec, None
    calls: list[Call] = []
    units: list[Call] = []
    for length in lengths_of(spec, longest):
        try:
            calls.append(caller.at(positions_of(spec, length), length))
        except Exception as error:  # whatever the program raises
            if isinstance(error, ValueError) and str(error).startswith("program: "):
                raise
            ends = table_end(caller, length, error)
            if not calls:
                calls.append(caller.at(positions_of(spec, ends[0]), ends[0]))
        units.append(caller.units(calls[-1]))
        if ends is not None:
            break
    return Observed(calls, units, caller.roundoff, ends)


def _recorded_call(recorded: Recorded, spec: RotarySpec) -> Call:
    """Recorded tensors in the order of their positions."""
    x, output, positions = recorded.x, recorded.output, recorded.positions
    axes = axes_of(spec)
    if x.shape != output.shape or x.dim() < 2 or x.shape[-1] != spec.head_dim:
        raise ValueError(
            f"x: expected [batch, heads, seq, {spec.head_dim}], and an output of its shape, got "
            f"{list(x.shape)} and {list(output.shape)}"
        )
    expected = [x.shape[-2]] if axes == 1 else [axes, x.shape[-2]]
    if list(positions.shape) != expected:
        raise ValueError(f"positions: expected {expected}, got {list(positions.shape)}")
    places = positions.view(axes, -1).long()
    order = places.amax(0).argsort(stable=True)
    flat = (t.double().reshape(-1, *t.shape[-2:])[:, order] for t in (x, output))
    x, output = flat
    return Call(places[:, order], int(places.max()) + 1, x, output[None])


def observe_recorded(recorded: Sequence[Recorded], spec: RotarySpec) -> Observed:
    """The same of recorded tensors, which have no unit vectors."""
    dtypes = {tensor.dtype for each in recorded for tensor in (each.x, each.output)}
    calls = [_recorded_call(each, spec) for each in recorded]
    calls.sort(key=lambda call: call.length)
    return Observed(calls, [], max(torch.finfo(dtype).eps / 2 for dtype in dtypes))
