"""Tests learned frequencies: exact angles, gradients, and a parameter that casts do not narrow."""

import copy
import decimal
import math

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor, nn

PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494")


def learned(**options: object) -> pe.RotaryEmbedding:
    return pe.RotaryEmbedding(16, learned_frequencies=True, **options)


def angle(position: int, frequency: float) -> float:
    """The exact product, whole turns dropped."""
    with decimal.localcontext(prec=60):
        product = position * decimal.Decimal(frequency)
        return float(product - 2 * PI * (product / (2 * PI)).to_integral_value())


def test_starts_as_the_specification(device: torch.device) -> None:
    query = torch.randn(1, 6, 2, 16, device=device)
    scaling = pe.LinearScaling(4.0)
    rope = learned(scaling=scaling, device=device)
    assert torch.equal(rope.frequencies.cpu(), rope.spec.frequencies().float())
    found, expected = rope(query), pe.RotaryEmbedding(16, scaling=scaling)(query)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_angles_are_exact(wide: torch.dtype, device: torch.device) -> None:
    frequencies = torch.tensor([1.0, -0.1, 1e-7, 12345.678, 0.0, 1e-40, 3.0, 1e9], dtype=wide)
    for position in (1, 1000, 2**31 - 1):
        query = torch.zeros(1, 1, 1, 16, dtype=torch.float64, device=device)
        query[..., :8] = 1
        rotated = pe.functional.rotary(
            query, spec=pe.RotarySpec(16), offset=position, frequencies=frequencies.to(device)
        ).flatten()
        for pair, frequency in enumerate(frequencies.tolist()):
            expected = angle(position, frequency)
            assert abs(float(rotated[pair]) - math.cos(expected)) <= 1e-15
            assert abs(float(rotated[pair + 8]) - math.sin(expected)) <= 1e-15


def test_nothing_rotated_is_kept_unless_frequencies_learn(device: torch.device) -> None:
    query, key = torch.randn(2, 1, 6, 2, 16, device=device, requires_grad=True).unbind()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    rope = learned(device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for given in ((query,), (query, key)):
            rope.frequencies.requires_grad_(True)
            rope(*given)
            assert sorted(tensor.dim() for tensor in kept) == [1, *[4] * len(given)]
            kept.clear()
            rope.frequencies.requires_grad_(False)
            rope(*given)
            assert [tensor.dim() for tensor in kept] == [1]
            kept.clear()
            pe.RotaryEmbedding(16)(*given)
            assert kept == []


def test_scores_do_not_depend_on_the_start(device: torch.device) -> None:
    """Nor do the frequencies' gradients, although each side's grows with position."""
    query, key = torch.randn(2, 1, 6, 2, 16, device=device, dtype=torch.float64)
    rope = learned(device=device, dtype=torch.float64)
    gradients = []
    for offset in (0, 100_000):
        scores = torch.einsum("bqhd,bkhd->bhqk", *rope(query, key, offset=offset))
        gradients += torch.autograd.grad(scores.sin().sum(), rope.frequencies)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_leave_frequencies_alone(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"rope": learned(base=300.0)}))
    before = model[1]["rope"].frequencies.detach().clone()
    for cast in (
        copy.deepcopy(model).to(dtype),
        copy.deepcopy(model).to("cpu", dtype),
        copy.deepcopy(model).bfloat16().half(),
        copy.deepcopy(model).double().float(),
    ):
        after = cast[1]["rope"].frequencies
        assert isinstance(after, nn.Parameter)
        assert after.dtype == torch.float32
        assert torch.equal(after, before)
    assert model.double()[1]["rope"].frequencies.dtype == torch.float64
    moved = learned().to(device="meta", dtype=dtype)
    assert (moved.frequencies.device.type, moved.frequencies.dtype) == ("meta", torch.float32)
    assert learned(dtype=dtype).frequencies.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoints_in_16_bits_leave_frequencies_wide(dtype: torch.dtype, assign: bool) -> None:
    model = nn.ModuleDict({"rope": learned()})
    narrow = {"rope.frequencies": learned(base=300.0).frequencies.to(dtype)}
    model.load_state_dict(narrow, assign=assign)
    found = model["rope"].frequencies
    assert isinstance(found, nn.Parameter)
    assert found.is_leaf
    assert found.requires_grad
    assert torch.equal(found, narrow["rope.frequencies"].float())
    model["rope"](torch.randn(1, 6, 2, 16)).sum().backward()
    assert narrow["rope.frequencies"].dtype == dtype


def test_bound_modules_say_that_a_cast_has_narrowed_them() -> None:
    """Python casts a C++ module's tensors without its knowledge."""
    rope = pe.cpp.RotaryEmbedding(16, learned_frequencies=True).bfloat16()
    refused((lambda: rope.forward(torch.randn(1, 6, 2, 16)), TypeError, "frequencies: expected float32 or float64, got bfloat16"))  # fmt: skip


def test_cached_keys_move_by_learned_frequencies() -> None:
    rope = learned(base=300.0)
    with torch.no_grad():
        rope.frequencies.mul_(1.25)
    key, old, new = torch.randn(1, 6, 2, 16), torch.arange(6) + 50, torch.arange(6)
    cached = rope(key, positions=old).detach()
    twin = pe.cpp.RotaryEmbedding(16, base=300.0, learned_frequencies=True)
    twin.load_state_dict(rope.state_dict())
    moved = cached.clone()
    twin.rerotate_(moved, old, new)
    rope.rerotate_(cached, old, new)
    assert torch.equal(moved, cached)
    assert torch.allclose(cached, rope(key, positions=new), atol=1e-6)
    rope.rerotate_(cached, new, old, new_spec=pe.RotarySpec(16))
    assert torch.allclose(cached, pe.RotaryEmbedding(16)(key, positions=old), atol=1e-6)


def test_resolving_shares_what_is_learned() -> None:
    """Learned frequencies do not depend on a length, so a loop over modules may resolve all."""
    query = torch.randn(1, 6, 2, 16)
    for rope in (learned(), pe.cpp.RotaryEmbedding(16, learned_frequencies=True)):
        resolved = rope.resolve(100)
        assert repr(resolved) == repr(rope)
        with torch.no_grad():
            rope.frequencies.mul_(2)
        assert torch.equal(resolved.forward(query), rope.forward(query))
        assert not torch.equal(resolved.forward(query), pe.RotaryEmbedding(16)(query))


def test_a_dynamic_specification_starts_them_once_resolved() -> None:
    spec = pe.RotarySpec(4, scaling=pe.LongRopeScaling([1.0, 2.0], [1.0, 8.0], 64))
    assert spec.is_dynamic
    for kind in (pe.RotaryEmbedding, pe.cpp.RotaryEmbedding):
        refused((lambda: kind(spec, learned_frequencies=True), ValueError, "pass spec.resolve(seq_len)"))  # fmt: skip
        rope = kind(spec.resolve(65), learned_frequencies=True)
        assert torch.equal(rope.frequencies, spec.frequencies(65).float())
