"""Compares angles with 60-digit arithmetic at near and far positions, as the README claims."""

import functools
from collections.abc import Callable
from typing import Any

import mpmath
import posembed as pe
import pytest
import torch

HEAD_DIM = 128
BASES = [1e4, 5e5, 1e6, 1e7]
POSITIONS = [0, 1, 255, 4095, 131_071, 999_999, 2**20, 2**24 + 1, 2**31 - 1]


def geometric(base: float) -> list[mpmath.mpf]:
    return [mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def dynamic_ntk(factor: int, length: int, seq_len: int) -> list[mpmath.mpf]:
    stretch = mpmath.mpf(factor) * seq_len / length - (factor - 1)
    return geometric(10000 * stretch ** (mpmath.mpf(HEAD_DIM) / (HEAD_DIM - 2)))


def yarn(factor: int, length: int) -> list[mpmath.mpf]:
    """Frequencies with beta_fast 32 and beta_slow 1, without rounding to whole pairs."""
    begin, end = (
        HEAD_DIM * mpmath.log(length / (turns * 2 * mpmath.pi)) / (2 * mpmath.log(10000)) for turns in (32, 1)
    )
    parts = [min(max((pair - begin) / (end - begin), 0), 1) for pair in range(HEAD_DIM // 2)]
    return [
        frequency * (1 - part) + frequency / factor * part
        for frequency, part in zip(geometric(10000), parts, strict=True)
    ]


def exact(frequencies: Callable[[], list[mpmath.mpf]], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency: float64 [positions, pairs], each rounded once."""
    with mpmath.workdps(60):
        angles = [[position * frequency for frequency in frequencies()] for position in positions]
        cosines = [[float(mpmath.cos(angle)) for angle in row] for row in angles]
        sines = [[float(mpmath.sin(angle)) for angle in row] for row in angles]
    return torch.tensor(cosines, dtype=torch.float64), torch.tensor(sines, dtype=torch.float64)


def rotated_units(spec: pe.RotarySpec, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates (1, 0) in every pair, which gives (cosine, sine)."""
    units = torch.zeros(len(POSITIONS), 1, HEAD_DIM, dtype=dtype, device=device)
    units[..., : HEAD_DIM // 2] = 1
    positions = torch.tensor(POSITIONS, device=device)
    turned = pe.RotaryEmbedding(spec, layout="thd")(units, positions=positions)
    return turned.squeeze(1).double().cpu().chunk(2, -1)


SPECS = [
    *((pe.RotarySpec(HEAD_DIM, base=base), functools.partial(geometric, base)) for base in BASES),
    (pe.RotarySpec(HEAD_DIM, scaling=pe.DynamicNtkScaling(2.0, 2048)).resolve(9000), functools.partial(dynamic_ntk, 2, 2048, 9000)),
    (pe.RotarySpec(HEAD_DIM, scaling=pe.YarnScaling(4.0, 4096, truncate=False, attention_factor=1.0)), functools.partial(yarn, 4, 4096)),
]  # fmt: skip
EACH = pytest.mark.parametrize(("spec", "frequencies"), SPECS, ids=[*map(str, BASES), "dynamic NTK", "YaRN"])


@EACH
def test_float32_angles(spec: pe.RotarySpec, frequencies: Any, device: torch.device) -> None:
    for found, wanted in zip(rotated_units(spec, torch.float32, device), exact(frequencies, POSITIONS), strict=True):
        assert float((found - wanted).abs().max()) <= 1.5e-7


@EACH
def test_float64_angles(spec: pe.RotarySpec, frequencies: Any, device: torch.device) -> None:
    near = torch.tensor([position <= 2**20 for position in POSITIONS])
    for found, wanted in zip(rotated_units(spec, torch.float64, device), exact(frequencies, POSITIONS), strict=True):
        assert float((found - wanted)[near].abs().max()) <= 1e-15
        assert float((found - wanted).abs().max()) <= 1e-13
