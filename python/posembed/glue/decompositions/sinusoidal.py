"""Sinusoidal encodings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from posembed.glue.decompositions.shared import (
    consecutive,
    exact_cosines_and_sines,
    fields,
    frequencies_of,
    wide,
)


def encodings(
    positions: Tensor, spec: str, order: int, dtype: torch.dtype, signed: bool = True
) -> Tensor:
    """Sinusoidal encodings of a specification, with its scale: [..., embedding_dim].

    Not ``signed``: positions are known not to be negative.
    """
    numbers = fields(torch.ops.posembed.sinusoidal_specification.default, spec)
    dim, preset = numbers["embedding_dim"], numbers["preset"]
    operator = torch.ops.posembed.sinusoidal_frequencies.default
    frequencies = frequencies_of(operator, spec, positions.device)
    padding = numbers["padding_idx"]
    if padding is None:
        padding = 1 if preset == "fairseq" else -1
    places = positions
    times = numbers["position_scale"]
    if times != 1:  # float64 has the digits of the products
        places = places.to(torch.float64 if places.is_floating_point() else torch.int64) * times
    places = places if padding < 0 else places + (padding + 1)
    cosines, sines = exact_cosines_and_sines(places, frequencies, dtype, signed)
    for _ in range(order % 4):
        cosines, sines = -sines, cosines
    if order:
        factor = ((frequencies * (2 * math.pi * times)) ** order).to(dtype)
        cosines, sines = cosines * factor, sines * factor
    pairs = (cosines, sines) if numbers["cos_first"] else (sines, cosines)
    interleaved = preset == "vaswani"
    columns = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    if columns.shape[-1] < dim:
        columns = torch.nn.functional.pad(columns, (0, dim - columns.shape[-1]))
    columns = columns[..., :dim]
    if numbers["scale"] != 1:
        columns = columns * numbers["scale"]
    if padding < 0 or not signed:
        return columns
    return torch.where((positions == -1).unsqueeze(-1), 0.0, columns)


def sinusoidal_encode(
    positions: Tensor, spec: str, scale: Tensor | None, order: int, dtype: torch.dtype | None
) -> Tensor:
    if dtype is None:
        dtype = positions.dtype if positions.is_floating_point() else torch.float32
    result = encodings(positions, spec, order, wide(dtype))
    return (result if scale is None else result * scale).to(dtype)


def sinusoidal_add(
    x: Tensor, spec: str, positions: Tensor | None, offset: Any, scale: Tensor | None
) -> Tensor:
    signed = positions is not None or not isinstance(offset, int) or offset < 0
    if positions is None:
        positions = consecutive(x.shape[-2], offset, x.device)
    with _disable_current_modes():
        axes, blocks = torch.ops.posembed.sinusoidal_blocks.default(spec)
    if len(axes) == 1:
        positions = positions.unsqueeze(0)
    added = torch.cat(
        [
            encodings(positions[axis], block, 0, wide(x.dtype), signed)
            for axis, block in zip(axes, blocks, strict=True)
        ],
        -1,
    )
    return (x + (added if scale is None else added * scale)).to(x.dtype)
