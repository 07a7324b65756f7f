"""Angles against 60-digit arithmetic at positions near and far: the README's claim."""

from __future__ import annotations

import mpmath
import posembed as pe
import pytest
import torch

HEAD_DIM = 128
POSITIONS = [0, 1, 255, 4095, 131_071, 999_999, 2**20, 2**24 + 1, 2**31 - 1]


def exact(base: float, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency: float64 [positions, pairs], each rounded once."""
    with mpmath.workdps(60):
        frequencies = [
            mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / HEAD_DIM) for i in range(HEAD_DIM // 2)
        ]
        angles = [[position * frequency for frequency in frequencies] for position in positions]
        cosines = [[float(mpmath.cos(angle)) for angle in row] for row in angles]
        sines = [[float(mpmath.sin(angle)) for angle in row] for row in angles]
    return torch.tensor(cosines, dtype=torch.float64), torch.tensor(sines, dtype=torch.float64)


def rotated_units(
    base: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, 0) turned in every pair gives (cosine, sine)."""
    units = torch.zeros(len(POSITIONS), 1, HEAD_DIM, dtype=dtype, device=device)
    units[..., : HEAD_DIM // 2] = 1
    positions = torch.tensor(POSITIONS, device=device)
    turned = pe.RotaryEmbedding(HEAD_DIM, base=base, layout="thd")(units, positions=positions)
    return turned.squeeze(1).double().cpu().chunk(2, -1)


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6, 1e7])
def test_float32_angles(base: float, device: torch.device) -> None:
    for found, wanted in zip(
        rotated_units(base, torch.float32, device), exact(base, POSITIONS), strict=True
    ):
        assert float((found - wanted).abs().max()) <= 1.5e-7


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6, 1e7])
def test_float64_angles(base: float, device: torch.device) -> None:
    near = torch.tensor([position <= 2**20 for position in POSITIONS])
    for found, wanted in zip(
        rotated_units(base, torch.float64, device), exact(base, POSITIONS), strict=True
    ):
        assert float((found - wanted)[near].abs().max()) <= 1e-15
        assert float((found - wanted).abs().max()) <= 1e-13


def test_float32_products_are_not_exact() -> None:
    """What reference code computes, at the position that the README names."""
    inverse = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    places = list(range(131_064, 131_072))
    cosines = torch.outer(torch.tensor(places).float(), inverse).cos().double()
    error = float((cosines - exact(1e4, places)[0]).abs().max())
    assert 3e-3 < error < 1e-2
