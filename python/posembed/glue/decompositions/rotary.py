"""Rotations of query and key."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from posembed.glue.decompositions.shared import (
    TARGET,
    consecutive,
    cosines_and_sines,
    exact_cosines_and_sines,
    fields,
    frequencies_of,
    product,
    scalar,
    whole_numbers,
    wide,
)


def rotary_cosines_and_sines(
    positions: Tensor,
    numbers: dict[str, Any],
    spec: str,
    frequencies: Tensor | None,
    dtype: torch.dtype,
    axis_of_pair: list[int] | None,
    signed: bool,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., pairs]; with float32 angles if the specification says so."""
    device = positions.device
    if frequencies is None:
        operator = torch.ops.posembed.rotary_frequencies.default
        turns = frequencies_of(operator, spec, device)
    else:
        turns = frequencies.double() * scalar(0.5 / math.pi, device)
    if turns.dim() > 1:
        return cosines_and_sines(turns_by_head(positions, turns, axis_of_pair), dtype)

    def of(positions: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        if numbers["numerics"] != "exact":
            radians = turns * scalar(2 * math.pi, device)
            angles = positions.float().unsqueeze(-1) * radians.float()
            return angles.cos(), angles.sin()
        if frequencies is not None:
            return cosines_and_sines(positions.double().unsqueeze(-1) * turns, dtype)
        return exact_cosines_and_sines(positions, turns, dtype, signed)

    if axis_of_pair is None:
        return of(positions, turns)
    order = sorted(range(len(axis_of_pair)), key=axis_of_pair.__getitem__)
    parts = [
        of(positions[axis], turns.index_select(0, whole_numbers(list(pairs), device)))
        for axis, pairs in itertools.groupby(order, axis_of_pair.__getitem__)
    ]
    cosines, sines = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    if order == sorted(order):
        return cosines, sines
    places = whole_numbers(sorted(order, key=order.__getitem__), device)
    return cosines.index_select(-1, places), sines.index_select(-1, places)


def turns_by_head(positions: Tensor, turns: Tensor, axis_of_pair: list[int] | None) -> Tensor:
    """Turns [(batch,) seq, heads, pairs] for ``turns`` [heads, pairs] or [axes, heads, pairs]."""
    places = positions.double()
    if turns.dim() == 3:
        each = (places[axis, ..., None, None] * turns[axis] for axis in range(turns.shape[0]))
        return functools.reduce(torch.add, each)
    return by_pair(places, axis_of_pair).unsqueeze(-2) * turns


def by_pair(positions: Tensor, axis_of_pair: list[int] | None) -> Tensor:
    """Positions [..., pairs], or [..., 1] if they have no axes."""
    if axis_of_pair is None:
        return positions.unsqueeze(-1)
    return torch.stack([positions[axis] for axis in axis_of_pair], -1)


def amplitude(
    positions: Tensor,
    axis_of_pair: list[int] | None,
    numbers: dict[str, Any],
    is_key: bool,
    dtype: torch.dtype,
) -> Tensor | float:
    """The factor of rotated pairs: xPos's, by position, or the same for all."""
    scaling = numbers["scaling"]
    if scaling is None or scaling["type"] != "xpos":
        return 1.0
    dim = numbers["rotary_dim"]
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    decay = ((steps + 0.4) / 1.4).log() / scaling["scale_base"]
    distance = (by_pair(positions, axis_of_pair) - scaling["center"]).to(dtype)
    return torch.exp((-distance if is_key else distance) * decay.to(dtype))


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
    if TARGET.get() == "onnx" and cosines.dtype == torch.float32:
        rotated = turn_by_onnx(window, cosines, sines, interleaved)
    else:
        rotated = joined(*product(*components(window, interleaved), cosines, sines), interleaved)
    return placed(rotated.to(x.dtype), x, start)


def turn_by_onnx(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """The same by ONNX's rotation of [batch, heads, seq, dim] or [batch, seq, heads * dim].

    Tables broadcast with ``x``; a dimension of one says where the heads are.
    """
    sizes = cosines.shape
    tables = [cosines, sines]
    of_tokens: Sequence[Any]
    if x.dim() == 4 and (len(sizes) == 2 or (len(sizes) == 4 and is_one(sizes[1]))):
        heads, rows, of_tokens = x.shape[1], x, (x.shape[0], x.shape[2])
        tables = [table.squeeze(1) if len(sizes) == 4 else table for table in tables]
    elif is_one(sizes[-2]):
        heads, rows, of_tokens = x.shape[-2], x.flatten(-2), x.shape[:-2]
        tables = [table.squeeze(-2) for table in tables]
    else:  # each head has its own rows
        heads, rows, of_tokens = 1, x.flatten(0, -2), x.shape[:-1]
    tables = [table.expand(*of_tokens, sizes[-1]) for table in tables]
    if rows.dim() == 2:
        rows, tables = rows.unsqueeze(0), [table.flatten(0, -2).unsqueeze(0) for table in tables]
    turned = torch.onnx.ops.rotary_embedding(
        rows, *tables, interleaved=interleaved, num_heads=heads
    )
    return turned.reshape(x.shape)


def is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


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
    all_turn = positions is None or positions.is_floating_point()
    if positions is None:
        positions = consecutive(tokens_in(x, layout), offset, x.device)
    if cu_seqlens is not None:
        index = consecutive(tokens_in(x, layout), 0, x.device).unsqueeze(-1)
        document = (index >= cu_seqlens[1:-1]).sum(-1)
        positions = positions - cu_seqlens[document]
    sections = numbers["sections"]
    of_axes = sections is not None and positions.dim() == (2 if layout == "thd" else 3)
    axis_of_pair = sections["axis_of_pair"] if of_axes else None
    mixed = frequencies is not None and frequencies.dim() == 3
    if not all_turn:  # at position 0, angles are 0
        untouched = (positions < 0).all(0) if of_axes or mixed else positions < 0
        positions = torch.where(untouched, 0, positions)
    dtype = wide(x.dtype)
    signed = of_axes or positions.is_floating_point()
    cosines, sines = rotary_cosines_and_sines(
        positions, numbers, spec, frequencies, dtype, axis_of_pair, signed
    )
    by_head = frequencies is not None and frequencies.dim() > 1
    if (inverse != transpose) != numbers["reverse"]:
        sines = -sines
    size = amplitude(positions, axis_of_pair, numbers, is_key != inverse, dtype)
    with _disable_current_modes():
        factor = torch.ops.posembed.rotary_attention_factor.default(spec)
    size = size * (1 / factor if inverse else factor)
    if isinstance(size, Tensor) or size != 1:
        cosines, sines = cosines * size, sines * size
        if not all_turn and TARGET.get() == "onnx":
            still = untouched[(..., *(None,) * (cosines.dim() - untouched.dim()))]
            cosines, sines = torch.where(still, 1.0, cosines), torch.where(still, 0.0, sines)
    cosines, sines = (of_tokens(table.to(dtype), layout, by_head) for table in (cosines, sines))
    start, dim = numbers["rotary_start"], numbers["rotary_dim"]
    if x.shape[-1] != numbers["head_dim"]:  # only the window
        start = 0
    rotated = turn(x, cosines, sines, start, dim, numbers["interleaved"], windows_of(numbers))
    if all_turn or TARGET.get() == "onnx":
        return rotated
    return torch.where(of_tokens(untouched.unsqueeze(-1), layout), x, rotated)


def rotary(query: Tensor, *given: Any) -> Tensor:
    return rotate(query, False, *given)


def rotary_pair(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return rotate(query, False, *given), rotate(key, True, *given)


def rotary_packed_pair(
    qkv: Tensor, heads: int, key_heads: int, order: str, *given: Any
) -> tuple[Tensor, Tensor]:
    groups = key_heads if order == "groups" else 1
    queries, keys = heads // groups, key_heads // groups
    rows = torch.unflatten(qkv, -1, (groups, queries + 2 * keys, -1))
    parts = rows.split_with_sizes((queries, keys, keys), -2)
    query, key, _ = (part.flatten(-3, -2) for part in parts)
    if given[2] == "bhsd":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    return rotary_pair(query, key, *given)


def mla_rotary(
    query: Tensor,
    key_rope: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    given = (spec, positions, layout, offset, inverse, None, None, False)
    heads = {"bhsd": 1}.get(layout, -2)
    lacks_heads = key_rope.dim() < query.dim()
    key = key_rope.unsqueeze(heads) if lacks_heads else key_rope
    key = rotate(key, True, *given)
    return rotate(query, False, *given), key.squeeze(heads) if lacks_heads else key
