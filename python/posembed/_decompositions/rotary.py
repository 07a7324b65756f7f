"""Rotations of query and key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from posembed._decompositions.shared import (
    consecutive,
    cosines_and_sines,
    fields,
    frequencies_of,
    scalar,
    wide,
)


def rotary_cosines_and_sines(
    places: Tensor,
    numbers: dict[str, Any],
    spec: str,
    frequencies: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., pairs]; with float32 angles if the specification says so."""
    device = places.device
    if frequencies is not None and frequencies.dim() > 1:
        return cosines_and_sines(turns_by_head(places, frequencies), dtype)
    if frequencies is None:
        operator = torch.ops.posembed.rotary_frequencies.default
        turns = frequencies_of(operator, spec, device)
    else:
        turns = frequencies.double() * scalar(0.5 / math.pi, device)
    if numbers["numerics"] == "exact":
        return cosines_and_sines(places.double() * turns, dtype)
    angles = places.float() * (turns * scalar(2 * math.pi, device)).float()
    return angles.cos(), angles.sin()


def turns_by_head(places: Tensor, frequencies: Tensor) -> Tensor:
    """Turns [(batch,) seq, heads, pairs] for frequencies [heads, pairs] or [axes, heads, pairs]."""
    turns = frequencies.double() * scalar(0.5 / math.pi, places.device)
    if frequencies.dim() == 2:
        return places.double().unsqueeze(-2) * turns
    axes = (places[..., axis, None, None].double() * turns[axis] for axis in range(len(turns)))
    return sum(axes, torch.zeros((), dtype=torch.float64, device=places.device))


def amplitude(positions: Tensor, numbers: dict[str, Any], is_key: bool) -> Tensor | float:
    """The factor of rotated pairs: xPos's, by position, or the same for all."""
    scaling = numbers["scaling"]
    if scaling is None or scaling["type"] != "xpos":
        return 1.0
    dim = numbers["rotary_dim"]
    device = positions.device
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    zeta = (steps + scalar(0.4, device)) / scalar(1.4, device)
    distance = (positions.double() - scaling["center"]) / scaling["scale_base"]
    return torch.pow(zeta, -distance if is_key else distance)


def of_tokens(table: Tensor, layout: str, by_head: bool = False) -> Tensor:
    """Reshapes tables [(batch,) seq, (heads,) pairs] to broadcast with tensors of a layout."""
    if by_head:
        if layout == "bhsd":
            return table.transpose(-3, -2)
        if layout == "sbhd":
            return table.transpose(0, 1) if table.dim() == 4 else table.unsqueeze(1)
        return table.squeeze(0) if layout == "thd" and table.dim() == 4 else table
    if layout == "bhsd":
        return table if table.dim() == 2 else table.unsqueeze(1)
    if layout == "sbhd":
        table = table.unsqueeze(1) if table.dim() == 2 else table.transpose(0, 1)
    return table.unsqueeze(-2)


def components(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second components of the pairs in the last dimension."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The reverse of :func:`components`."""
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def placed(window: Tensor, x: Tensor, start: int) -> Tensor:
    """``x`` with other components from ``start`` on."""
    end = start + window.shape[-1]
    if end - start == x.shape[-1]:
        return window
    return torch.cat([x[..., :start], window, x[..., end:]], -1)


def turn(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    start: int,
    dim: int,
    interleaved: bool,
    windows: Sequence[int] = (),
) -> Tensor:
    """Rotates the components from ``start`` to ``start + dim`` of the last dimension.

    ``windows``: numbers of pairs of windows that are split in halves each, if there are several.
    """
    window = x[..., start : start + dim].to(cosines.dtype)
    if windows:
        split = torch.split(window, [2 * size for size in windows], -1)
        tables = (torch.split(table, list(windows), -1) for table in (cosines, sines))
        parts = zip(split, *tables, strict=True)
        turned = [turn(part, cos, sin, 0, part.shape[-1], False) for part, cos, sin in parts]
        return torch.cat(
            [x[..., :start], *(t.to(x.dtype) for t in turned), x[..., start + dim :]], -1
        )
    first, second = components(window, interleaved)
    halves = (first * cosines - second * sines, second * cosines + first * sines)
    return placed(joined(*halves, interleaved).to(x.dtype), x, start)


def windows_of(numbers: dict[str, Any]) -> list[int]:
    """The number of pairs of each axis, if pairs lie within axes."""
    sections = numbers["sections"]
    if sections is None or not sections.get("within_axes"):
        return []
    return [len(list(run)) for _, run in itertools.groupby(sections["axis_of_pair"])]


def tokens_in(x: Tensor, layout: str) -> Any:
    return x.shape[{"bshd": 1, "bhsd": 2, "sbhd": 0, "thd": 0}[layout]]


def rotate(
    x: Tensor,
    is_key: bool,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    inverse: bool,
    cu_seqlens: Tensor | None,
    frequencies: Tensor | None,
    transpose: bool,
) -> Tensor:
    numbers = fields(torch.ops.posembed.rotary_specification.default, spec)
    if positions is None:
        positions = consecutive(tokens_in(x, layout), offset, x.device)
    if cu_seqlens is not None:
        index = consecutive(tokens_in(x, layout), 0, x.device).unsqueeze(-1)
        document = (index >= cu_seqlens[1:-1]).sum(-1)
        positions = positions - cu_seqlens[document]
    of_axes = numbers["sections"] is not None and positions.dim() == (2 if layout == "thd" else 3)
    mixed = frequencies is not None and frequencies.dim() == 3
    # [(batch,) seq, pairs or 1], or axes where they are summed
    if mixed:
        places = positions.movedim(0, -1)
        untouched = (places < 0).all(-1, keepdim=True)
    elif of_axes:
        axes = positions.unbind(0)
        places = torch.stack([axes[axis] for axis in numbers["sections"]["axis_of_pair"]], -1)
        untouched = (positions < 0).all(0).unsqueeze(-1)
    else:
        places = positions.unsqueeze(-1)
        untouched = places < 0
    dtype = wide(x.dtype)
    cosines, sines = rotary_cosines_and_sines(places, numbers, spec, frequencies, dtype)
    with _disable_current_modes():
        factor = torch.ops.posembed.rotary_attention_factor.default(spec)
    by_head = frequencies is not None and frequencies.dim() > 1
    size = 1 / factor if inverse else factor
    if not by_head:
        size = amplitude(places, numbers, is_key != inverse) * size
    if (inverse != transpose) != numbers["reverse"]:
        sines = -sines
    cosines, sines = (
        of_tokens((table * size).to(dtype), layout, by_head) for table in (cosines, sines)
    )
    start, dim = numbers["rotary_start"], numbers["rotary_dim"]
    if x.shape[-1] != numbers["head_dim"]:  # only the window
        start = 0
    rotated = turn(x, cosines, sines, start, dim, numbers["interleaved"], windows_of(numbers))
    if positions.is_floating_point():
        return rotated
    return torch.where(of_tokens(untouched, layout), x, rotated)


def rotary(query: Tensor, *given: Any) -> Tensor:
    return rotate(query, False, *given)


def rotary_pair(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return rotate(query, False, *given), rotate(key, True, *given)
