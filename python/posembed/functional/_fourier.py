"""Functional Fourier features of coordinates."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._options import Device, FourierUnit, FourierWaves
from posembed.glue.gate import check_tensors, gated

_FOURIER_FEATURES = gated(torch.ops.posembed.fourier_features.default, sharded=True)
_FOURIER_BANDS = gated(torch.ops.posembed.fourier_bands.default)


def fourier_features(
    coordinates: Tensor,
    frequencies: Tensor,
    phases: Tensor | None = None,
    x: Tensor | None = None,
    *,
    unit: FourierUnit = "radian",
    waves: FourierWaves = "sin_cos",
    order: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sines and cosines of coordinates times frequencies plus phases, by exact angles.

    Angles are reduced to one turn in fixed point: float32 results are off by at most 2e-7 and
    float64 results by 2e-15 at any coordinate below 2 ** 63. Gradients of every order flow to
    floating coordinates, frequencies, phases and x.

    Args:
        coordinates: int32, int64, float32 or float64 [..., axes].
        frequencies: Floating [n]: each axis is multiplied by all of them. [axes, n]: an angle is
            the sum over axes. With "a" in ``order`` [parts, n]: each axis is multiplied by the sum
            over parts, which has more digits than a float64. Magnitudes of 2 ** 50 and more give
            NaN.
        phases: Floating [n], in radians.
        x: Floating [..., columns]: features are added to it.
        unit: What frequencies count: "radian", "half_turn" (multiples of pi) or "turn" (of 2 pi).
        waves: The columns of each frequency: "sin_cos", "cos_sin", "sin" or "cos".
        order: The columns from the slowest letter to the fastest: w(ave), f(requency) and, for
            frequencies [n], a(xis). Default: "waf" or "wf": all sines, then all cosines.
        dtype: Default: that of floating coordinates, otherwise float32; that of ``x``.

    Returns:
        [..., columns], where columns are waves times frequencies (times axes). NaN for coordinates
        that are not finite, or floating-point and at least 2 ** 63.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> seconds = torch.tensor([[1_700_000_000]])
        >>> day = torch.tensor([1.0]) / 86400
        >>> pe.functional.fourier_features(seconds, day, unit="turn").shape
        torch.Size([1, 2])
    """
    check_tensors(coordinates=coordinates, frequencies=frequencies)
    if order is None:
        order = "waf" if frequencies.dim() == 1 else "wf"
    frequencies = frequencies.unsqueeze(0) if frequencies.dim() == 1 else frequencies
    return features(coordinates, frequencies, phases, x, unit, waves, order, dtype)


def features(
    coordinates: Tensor,
    frequencies: Tensor,
    phases: Tensor | None,
    x: Tensor | None,
    unit: FourierUnit,
    waves: FourierWaves,
    order: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """:func:`fourier_features` of frequencies with two dimensions."""
    return _FOURIER_FEATURES(coordinates, frequencies, phases, x, unit, waves, order, 0, dtype)


def fourier_bands(first: float, last: float, count: int, *, device: Device | None = None) -> Tensor:
    """Linearly spaced frequencies, each as the sum of two float64 numbers.

    Args:
        first: The first frequency.
        last: The last one.
        count: Number of frequencies.
        device: Default: the CPU.

    Returns:
        float64 [2, count], for :func:`fourier_features` with "a" in ``order``.

    Raises:
        ValueError: A number is not finite, or there are no bands.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.fourier_bands(1.0, 112.0, 64).sum(0)[:3].tolist()
        [1.0, 2.761904761904762, 4.523809523809524]
    """
    return _FOURIER_BANDS(first, last, count, device)
