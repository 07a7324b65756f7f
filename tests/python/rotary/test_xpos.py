"""Tests xPos: amplitudes fade with distance and are exact wherever they are finite."""

import math

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.refusals import refused

SPEC = pe.RotarySpec(32, scaling=pe.XPosScaling(scale_base=512.0, center=100.0))

# Relative errors: in float32 as for the rotation without amplitude.
RELATIVE = {torch.float32: 3e-7, torch.float64: 1e-13}


def exact(tensor: torch.Tensor, position: int, sign: float, spec: pe.RotarySpec = SPEC) -> torch.Tensor:
    """The halves of one token in float64, from the paper's formula."""
    scaling = spec.scaling
    assert isinstance(scaling, pe.XPosScaling)
    zeta = (torch.arange(0, 32, 2, dtype=torch.float64) / 32 + 0.4) / 1.4
    size = torch.exp2(sign * (position - scaling.center) / scaling.scale_base * zeta.log2())
    plain = pe.functional.rotary(tensor.double(), spec=pe.RotarySpec(32), positions=torch.tensor([position]))
    return plain * torch.cat([size, size])


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
def test_amplitudes_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 4, 32, dtype=dtype, device=device).unbind(0)
    for position in (0, 1, 99, 100, 101, 511, 4096, 20_000, 30_000):
        positions = torch.tensor([position], device=device)
        rotated = pe.functional.rotary(query, key, positions, spec=SPEC)
        for found, tensor, sign in zip(rotated, (query, key), (1.0, -1.0), strict=True):
            wanted = exact(tensor.cpu(), position, sign)
            first, second = wanted.chunk(2, -1)
            length = torch.hypot(first, second).repeat(1, 1, 1, 2)
            normal = (length > torch.finfo(dtype).tiny * 1e8) & (length < torch.finfo(dtype).max)
            error = ((found.cpu().double() - wanted).abs() / length)[normal]
            assert error.numel() > 60
            assert float(error.max()) < RELATIVE[dtype]


def test_scores_depend_on_distance_alone(device: torch.device) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64, device=device).unbind(0)

    def score(query_position: int, key_position: int) -> float:
        places = [torch.tensor([p], device=device) for p in (query_position, key_position)]
        rotated_query = pe.functional.rotary(query, positions=places[0], spec=SPEC)
        rotated_key = pe.functional.rotary(key, positions=places[1], spec=SPEC.for_keys())
        return float((rotated_query * rotated_key).sum())

    for distance in (0, 1, 300):
        near = score(distance, 0)
        for start in (7, 1000, 50_000):
            assert score(start + distance, start) == pytest.approx(near, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("dtype", FLOATING)
def test_position_at_the_centre_multiplies_nothing(dtype: torch.dtype, device: torch.device) -> None:
    query = torch.randn(1, 1, 3, 32, dtype=dtype, device=device)
    plain = pe.functional.rotary(query, spec=pe.RotarySpec(32), offset=100)
    assert torch.equal(pe.functional.rotary(query, spec=SPEC, offset=100), plain)


@pytest.mark.parametrize("dtype", FLOATING)
def test_inverse_undoes_and_keys_alone_are_the_pairs_keys(dtype: torch.dtype, device: torch.device) -> None:
    query, key = torch.randn(2, 2, 5, 3, 32, dtype=dtype, device=device).unbind(0)
    rotated = pe.functional.rotary(query, key, spec=SPEC, offset=300)
    assert torch.equal(rotated[0], pe.functional.rotary(query, spec=SPEC, offset=300))
    assert torch.equal(rotated[1], pe.functional.rotary(key, spec=SPEC.for_keys(), offset=300))
    back = pe.functional.rotary(*rotated, spec=SPEC, offset=300, inverse=True)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(back, (query, key), rtol=0, atol=4 * tolerance)


def test_rerotated_keys_are_as_if_rotated_anew(device: torch.device) -> None:
    key = torch.randn(1, 6, 2, 32, dtype=torch.float64, device=device)
    old, new = torch.arange(6, device=device) + 400, torch.arange(6, device=device) + 17
    query = key.clone()
    cache = pe.functional.rotary(query, key, old, spec=SPEC)[1]
    pe.RotaryEmbedding(SPEC).rerotate_(cache, old, new)
    torch.testing.assert_close(cache, pe.functional.rotary(query, key, new, spec=SPEC)[1], rtol=1e-13, atol=1e-13)


def test_values() -> None:
    assert SPEC.for_keys().for_keys() == SPEC
    assert pe.RotarySpec(32).for_keys() == pe.RotarySpec(32)
    assert pe.RotarySpec.from_json(SPEC.to_json()) == SPEC
    assert "scaling=xpos(center=100)" in repr(pe.RotaryEmbedding(SPEC))
    assert "zeta" in SPEC.explain()
    text = SPEC.diff(pe.RotarySpec(32))
    assert '"type":"xpos"} against null' in text
    assert "amplitudes differ" in text
    for options, message in (
        ({"scale_base": 0}, "XPosScaling.scale_base: expected a finite number other than 0"),
        ({"center": math.inf}, "center: expected a finite number"),
    ):
        refused((lambda: pe.RotarySpec(32, scaling=pe.XPosScaling(**options)), ValueError, message))
