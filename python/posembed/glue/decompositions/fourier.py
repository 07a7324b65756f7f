"""Fourier features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posembed.glue.decompositions.shared import cosines_and_sines, scalar, wide


def fourier_features(
    coordinates: Tensor,
    frequencies: Tensor,
    phases: Tensor | None,
    x: Tensor | None,
    unit: str,
    waves: str,
    order: str,
    derivative: int,
    dtype: torch.dtype | None,
) -> Tensor:
    if x is not None:
        dtype = x.dtype
    elif dtype is None:
        dtype = coordinates.dtype if coordinates.is_floating_point() else torch.float32
    radian = scalar(0.5 / math.pi, coordinates.device)
    turns = frequencies.double()
    turns = turns * radian if unit == "radian" else turns / (2 if unit == "half_turn" else 1)
    places, letters = coordinates.double(), "fw"
    if "a" in order:
        places, turns, letters = places.unsqueeze(-1), turns.sum(0, keepdim=True), "afw"
    angles = (places.unsqueeze(-2) @ turns).squeeze(-2)
    if phases is not None:
        angles = angles + phases.double() * radian
    cosine, sine = cosines_and_sines(angles, wide(dtype))
    for _ in range(derivative % 4):
        cosine, sine = -sine, cosine
    values = {"cos": cosine, "sin": sine}
    features = torch.stack([values[wave] for wave in waves.split("_")], -1)
    leading = range(features.dim() - len(letters))
    dims = [len(leading) + letters.index(letter) for letter in order]
    features = features.permute(*leading, *dims).flatten(len(leading))
    return (features if x is None else features + x).to(dtype)
