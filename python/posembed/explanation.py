"""A rotary specification in words: what it does to which pairs, and how two differ."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from posembed.scaling import RotaryScaling, XPosScaling
from posembed.specification import RotarySpec

# Angles that differ by more than this are told apart: about what bfloat16 keeps of a cosine.
TOLERANCE = 1e-3
PAIRS_SHOWN = 16


def trained_length(scaling: RotaryScaling | None) -> int | None:
    """The context that a scaling is made for, where it says."""
    original = getattr(scaling, "original_max_positions", None)
    if original is None:
        return None
    return int(original * (getattr(scaling, "factor", None) or 1.0))


def float32_error(frequencies: Tensor, position: int) -> float:
    """The largest error of an angle that is a product of float32 numbers, in radians."""
    exact = frequencies.double() * position
    product = frequencies.float() * torch.tensor(position, dtype=torch.float32)
    return float((product.double() - exact).abs().max()) if exact.numel() else 0.0


def shown_pairs(pairs: int) -> list[int]:
    """All pairs, or as many evenly spread ones as fit a screen."""
    if pairs <= PAIRS_SHOWN:
        return list(range(pairs))
    return [round(i * (pairs - 1) / (PAIRS_SHOWN - 1)) for i in range(PAIRS_SHOWN)]


def explain(spec: RotarySpec, seq_len: int | None = None) -> str:
    """See :meth:`RotarySpec.explain`."""
    resolved = spec if seq_len is None else spec.resolve(seq_len)
    frequencies = resolved.frequencies()
    pairs = frequencies.numel()
    width = spec.rotary_dim or 0
    pairing = "neighbours (2i, 2i + 1)" if spec.interleaved else f"halves (i, i + {pairs})"
    lines = [
        resolved.describe(),
        f"{pairs} pairs of {pairing} in components {spec.rotary_start} to "
        f"{spec.rotary_start + width - 1} of {spec.head_dim}; attention factor "
        f"{resolved.attention_factor:.6g}",
    ]
    if spec.text != resolved.text:
        lines.append(f"resolved for sequences of {seq_len} positions")
    if isinstance(spec.scaling, XPosScaling):
        lines.append(amplitudes(spec.scaling, pairs))
    length = trained_length(spec.scaling) or seq_len
    if length:
        error = float32_error(frequencies, length)
        lines.append(f"float32 angles at position {length} would be off by up to {error:.2g} rad")
    lines.append("pair  axis  radians/position    wavelength  stretched  half a turn from position")
    plain = dataclasses.replace(spec, scaling=None).frequencies()
    axes = spec.sections.axis_of_pair if spec.sections else (0,) * pairs
    for pair in shown_pairs(pairs):
        lines.append(row(pair, axes[pair], float(frequencies[pair]), float(plain[pair])))
    return "\n".join(lines)


def amplitudes(scaling: XPosScaling, pairs: int) -> str:
    """What xPos does, in a line."""
    return (
        f"a query is multiplied by zeta ** ((position - {scaling.center:g}) / "
        f"{scaling.scale_base:g}), a key by the inverse; zeta from {0.4 / 1.4:.3f} (pair 0) to "
        f"{((pairs - 1) / max(pairs, 1) + 0.4) / 1.4:.3f}"
    )


def row(pair: int, axis: int, frequency: float, plain: float) -> str:
    """One pair of the table."""
    if frequency == 0.0:
        return f"{pair:4}  {axis:4}  stands still"
    half = math.ceil(math.pi / abs(frequency))
    return (
        f"{pair:4}  {axis:4}  {frequency:16.8g}  {2 * math.pi / abs(frequency):12.2f}  "
        f"{plain / frequency:8.4g}x  {half}"
    )


def first_difference(a: Tensor, b: Tensor) -> int | None:
    """The first position at which an angle differs by more than TOLERANCE."""
    widest = float((a - b).abs().max()) if a.numel() else 0.0
    return None if widest == 0.0 else math.ceil(TOLERANCE / widest)


def diff(a: RotarySpec, b: RotarySpec) -> str:
    """See :meth:`RotarySpec.diff`."""
    if a == b:
        return "equal"
    lines = []
    for field in dataclasses.fields(RotarySpec):
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        if field.compare and ours != theirs:
            lines.append(f"{field.name}: {ours} against {theirs}")
    if a.attention_factor != b.attention_factor:
        lines.append(f"attention factor: {a.attention_factor:.6g} against {b.attention_factor:.6g}")
    window = ("head_dim", "rotary_dim", "rotary_start", "interleaved", "reverse", "sections")
    if any(getattr(a, name) != getattr(b, name) for name in window):
        lines.append("other components turn, or the other way: results differ from position 1 on")
        return "\n".join(lines)
    xpos = [scaling for scaling in (a.scaling, b.scaling) if isinstance(scaling, XPosScaling)]
    if xpos and a.scaling != b.scaling:
        lines.append("amplitudes differ: they grow or fade with position")
    position = first_difference(a.frequencies(), b.frequencies())
    if position is None:
        lines.append("angles are equal within the original context")
    else:
        lines.append(f"angles differ by more than {TOLERANCE} rad from position {position} on")
    return "\n".join(lines)
