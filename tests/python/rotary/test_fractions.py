"""Tests of rotations at floating positions, with fractions and below zero."""

import math
from typing import Any

import mpmath
import posembed as pe
import pytest
import torch
from support.case import FLOATING, TOLERANCE, assert_close
from support.halves import CUDA_ON_CPU
from support.refusals import refused
from support.rotary import rotate
from torch import Tensor

WHOLE = torch.tensor([[0, 5, 131071, 1 << 30], [3, 2, 1, 0]])
FRACTIONS = torch.tensor([[0.5, -0.25, 7.125, -1.0], [3.1, 1e-3, -40.7, 0.0]], dtype=torch.float64)
XPOS = pe.RotarySpec(16, scaling=pe.XPosScaling(scale_base=16.0))
SPECS = [
    pe.RotarySpec(16),
    pe.RotarySpec(16, rotary_dim=8, rotary_start=4, interleaved=True, reverse=True),
    # Several turns from one whole position to the next, and negative ones, as for pixels.
    pe.RotarySpec(16, custom_frequencies=[math.pi * k for k in (1, 2.5, 4, 11, -1, -7, 0.1, 0)]),
    pe.RotarySpec(16, numerics="float32"),
]


def tensors(dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 3, 16, dtype=torch.float64)
    key = torch.randn(2, 4, 2, 16, dtype=torch.float64)
    return query.to(device, dtype), key.to(device, dtype)


def expected(x: Tensor, spec: pe.RotarySpec, positions: Tensor) -> Tensor:
    frequencies = spec.frequencies().to(x.device)
    return rotate(x.double(), spec.text, positions, frequencies=frequencies)


@pytest.mark.parametrize("spec", [*SPECS, XPOS], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", FLOATING)
def test_whole_numbers_give_the_bits_of_integers(
    dtype: torch.dtype, kind: torch.dtype, spec: pe.RotarySpec, device: torch.device
) -> None:
    query, key = tensors(dtype, device)
    positions = WHOLE.to(device).clamp(max=1 << 24)
    for found, wanted in zip(
        pe.functional.rotary(query, key, positions.to(kind), spec=spec),
        pe.functional.rotary(query, key, positions, spec=spec),
        strict=True,
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
@pytest.mark.parametrize("dtype", FLOATING)
def test_fractions_agree_with_float64(dtype: torch.dtype, spec: pe.RotarySpec, device: torch.device) -> None:
    query, key = tensors(dtype, device)
    positions = FRACTIONS.to(device)
    rotated = pe.functional.rotary(query, key, positions, spec=spec)
    tolerance = max(TOLERANCE[dtype], 1e-12)  # the reference rounds angles to float64
    assert_close(rotated[0], expected(query, spec, positions), tolerance)
    assert_close(rotated[1], expected(key, spec, positions), tolerance)
    out = torch.empty_like(query), torch.empty_like(key)
    pe.functional.rotary(query, key, positions, spec=spec, out=out)
    pe.functional.rotary_(query, key, positions, spec=spec)
    for given in (out, (query, key)):
        assert torch.equal(given[0], rotated[0])
        assert torch.equal(given[1], rotated[1])


@pytest.mark.parametrize("frequency", [1.0, 1e-4, 40.5, -3.0])
@pytest.mark.parametrize("position", [1e6 + 0.1, -(2**20) - 1 / 3, 1e-9])
def test_fractions_are_as_exact_as_whole_numbers(position: float, frequency: float) -> None:
    spec = pe.RotarySpec(2, custom_frequencies=[frequency])
    one = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    positions = torch.tensor([position], dtype=torch.float64)
    with mpmath.workprec(200):
        angle = mpmath.mpf(position) * mpmath.mpf(frequency)
        waves = [float(mpmath.cos(angle)), float(mpmath.sin(angle))]
    wanted = torch.tensor(waves, dtype=torch.float64)
    for dtype, bound in ((torch.float64, 1e-15), (torch.float32, 1.5e-7)):
        found = pe.functional.rotary(one.to(dtype), positions=positions, spec=spec)
        assert (found.double() - wanted).abs().max() < bound


def test_negative_positions_rotate_backwards(device: torch.device) -> None:
    query, _ = tensors(torch.float64, device)
    rope = pe.RotaryEmbedding(16)
    positions = torch.tensor([-1.0, -2.0, -3.5, -1e6], device=device)
    found = rope(query, positions=positions)
    assert_close(found, rope(query, positions=-positions, inverse=True), 1e-15)
    assert not torch.equal(found[:, 0], query[:, 0])
    marked = rope(query, positions=torch.tensor([-1, 0, 0, 0], device=device))
    assert torch.equal(marked[:, 0], query[:, 0])


def test_positions_that_are_none_give_nan(device: torch.device) -> None:
    query, _ = tensors(torch.float32, device)
    positions = torch.tensor([1.5, float("nan"), float("inf"), 2.0], device=device)
    rope = pe.RotaryEmbedding(16)
    if device.type == "cpu" and not CUDA_ON_CPU:
        for wrong in (positions, positions.double(), positions[[0, 2, 0, 0]]):
            with pytest.raises(IndexError, match=r"positions: expected finite positions, got (nan|inf)"):
                rope(query, positions=wrong)
        return
    found = rope(query, positions=positions)
    assert found.isnan().all(-1).all(-1)[0].tolist() == [False, True, True, False]
    assert not found[:, [0, 3]].isnan().any()


def test_learned_frequencies_have_gradients(device: torch.device) -> None:
    query, key = tensors(torch.float64, device)
    spec, positions = pe.RotarySpec(16), FRACTIONS.to(device)
    frequencies = torch.linspace(-8, 8, 8, dtype=torch.float64, device=device)

    def rotated(q: Tensor, k: Tensor, learned: Tensor) -> Any:
        return pe.functional.rotary(q, k, positions, spec=spec, frequencies=learned)

    inputs = [x.requires_grad_() for x in (query, key, frequencies)]
    assert torch.autograd.gradcheck(rotated, inputs, check_forward_ad=True)
    assert_close(rotated(*inputs)[0], rotate(query, spec.text, positions, frequencies=frequencies), 1e-13)


def test_fused_operators_take_them(device: torch.device) -> None:
    query, key = tensors(torch.float32, device)
    spec, positions = pe.RotarySpec(16), FRACTIONS.to(device)
    weight = torch.ones(16, device=device)
    normed = [torch.nn.functional.rms_norm(x, (16,), eps=1e-6) for x in (query, key)]
    wanted = pe.functional.rotary(*normed, positions, spec=spec)
    found = pe.functional.norm_rotary(query, key, weight, weight, positions, spec=spec)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-5)  # the two roundings of a norm apart


def test_in_compiled_functions(device: torch.device) -> None:
    query, _ = tensors(torch.float32, device)
    spec = pe.RotarySpec(16)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        return pe.functional.rotary(x, positions=positions / 3, spec=spec)

    compiled = torch.compile(rotated, fullgraph=True, dynamic=True, backend="aot_eager")
    positions = torch.arange(4.0, device=device) - 2
    assert torch.equal(compiled(query, positions), rotated(query, positions))


def test_what_is_refused(device: torch.device) -> None:
    query, _ = tensors(torch.float32, device)
    rope = pe.RotaryEmbedding(16)
    refused(
        (lambda: rope(query, positions=torch.zeros(4, dtype=torch.bfloat16, device=device)), TypeError, "positions: expected int32, int64, float32 or float64"),
        (lambda: rope(query, positions=torch.zeros(4, device=device, requires_grad=True)), ValueError, "positions: requires grad"),
    )  # fmt: skip
    with torch.no_grad():
        rope(query, positions=torch.zeros(4, device=device, requires_grad=True))
