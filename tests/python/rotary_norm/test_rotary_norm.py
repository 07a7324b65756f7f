"""Tests of QK-norm and rotary beyond the shared tests of operators."""

from typing import Any

import posembed as pe
import pytest
import torch
from support.case import FLOATING, assert_close, decomposed
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor

SPEC = pe.RotarySpec(16, rotary_dim=8, rotary_start=4, interleaved=True)


def make(device: torch.device, dtype: torch.dtype = torch.float32, seq: int = 6) -> dict[str, Any]:
    torch.manual_seed(0)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    return {
        "query": torch.randn(2, seq, 4, 16, **place),
        "key": torch.randn(2, seq, 2, 16, **place),
        "query_weight": torch.randn(16, **place),
        "key_weight": torch.randn(16, **place),
    }


def test_equals_torch_norm_then_rotary(device: torch.device) -> None:
    given = make(device)
    query, key = (
        torch.nn.functional.rms_norm(given[name], (16,), given[f"{name}_weight"] + 1, 1e-5) for name in ("query", "key")
    )
    expected = pe.functional.rotary(query, key, spec=SPEC, offset=3)
    found = pe.functional.norm_rotary(**given, spec=SPEC, offset=3, eps=1e-5, weight_offset=1.0)
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, wanted, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype, device: torch.device) -> None:
    """The error is half a unit in the last place, plus that of float32 arithmetic."""
    given = make(device, dtype, seq=100)
    exact = {name: tensor.double() for name, tensor in given.items()}
    found = pe.functional.norm_rotary(**given, spec=SPEC)
    for actual, wanted in zip(found, decomposed("norm_rotary")(**exact, spec=SPEC.to_json()), strict=True):
        ulp = torch.finfo(dtype).eps * 2.0 ** wanted.abs().log2().floor()
        assert ((actual.double() - wanted).abs() <= 0.5 * ulp + 2e-6).all()


@pytest.mark.parametrize(("start", "rotary_dim"), [(0, 128), (0, 64), (32, 64), (16, 32), (0, 18)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
def test_results_too_large_for_caches_are_the_same(
    dtype: torch.dtype, interleaved: bool, start: int, rotary_dim: int
) -> None:
    """Results in new memory are streamed; results in place are not."""
    spec = pe.RotarySpec(128, rotary_start=start, rotary_dim=rotary_dim, interleaved=interleaved)
    query = torch.randn(1, (8 << 20) // (32 * 128 * dtype.itemsize) + 1, 32, 128).to(dtype)
    key, weight = query[:, :, :3].contiguous(), torch.rand(128).to(dtype)
    found = pe.functional.norm_rotary(query, key, weight, weight, spec=spec)
    pe.functional.norm_rotary_(query, key, weight, weight, spec=spec)
    assert torch.equal(found[0], query)
    assert torch.equal(found[1], key)


@pytest.mark.parametrize("heads", [19, 2])
@pytest.mark.parametrize("dtype", FLOATING)
def test_heads_first_in_memory(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Tokens of a head are neighbours; data too large for caches are normed tile by tile."""
    batch, seq = 2, (8 << 20) // (2 * 19 * 128 * dtype.itemsize) + 5
    spec = pe.RotarySpec(128, rotary_dim=96)
    query = torch.randn(batch, seq, heads, 128, device=device).to(dtype)
    key, weight = query[:, :, :1], torch.rand(128, device=device).to(dtype)
    positions = torch.arange(batch * seq, device=device).reshape(batch, seq)
    positions[1, 7:90:8] = -1
    given = {"query_weight": weight, "key_weight": weight, "positions": positions, "spec": spec}
    expected = pe.functional.norm_rotary(query, key, **given)
    moved = query.transpose(1, 2).contiguous().transpose(1, 2)
    for memory in ((moved, moved[:, :, :1]), (moved, key), (query, moved[:, :, :1])):
        found = pe.functional.norm_rotary(*memory, **given)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("rotary_dim", [128, 32])
@pytest.mark.parametrize("dtype", FLOATING)
def test_gradients_too_large_for_caches_are_the_same(dtype: torch.dtype, rotary_dim: int) -> None:
    spec = pe.RotarySpec(128, rotary_dim=rotary_dim, interleaved=False)
    tokens = (8 << 20) // (32 * 128 * dtype.itemsize) + 1
    query, weight = torch.randn(1, tokens, 32, 128).to(dtype), torch.rand(128).to(dtype)
    upstream = torch.randn_like(query)

    def gradient(part: slice) -> Tensor:
        leaf = query[:, part].requires_grad_()
        result, _ = pe.functional.norm_rotary(leaf, leaf[:, :, :1], weight, weight, spec=spec, offset=part.start)
        return torch.autograd.grad(result, leaf, upstream[:, part])[0]

    half = tokens // 2
    parts = [gradient(slice(0, half)), gradient(slice(half, tokens))]
    assert torch.equal(gradient(slice(0, tokens)), torch.cat(parts, dim=1))


def test_a_token_at_minus_one_is_normed_and_not_rotated(device: torch.device) -> None:
    given = make(device)
    positions = torch.full((6,), -1, device=device)
    query, _ = pe.functional.norm_rotary(**given, positions=positions, spec=SPEC, eps=0.0)
    expected = torch.nn.functional.rms_norm(given["query"], (16,), given["query_weight"], 0.0)
    assert_close(query, expected, 1e-6)


def gradients(given: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    query, key = pe.functional.norm_rotary(**leaves, spec=SPEC, **options)
    return torch.autograd.grad([query.sum(), key.sum()], list(leaves.values()))


def test_weights_accumulate_in_float32(device: torch.device) -> None:
    """Adds four thousand equal contributions; bfloat16 sums would stop at two hundred."""
    ones = torch.ones(1, 4096, 1, 16, device=device, dtype=torch.bfloat16)
    weight = torch.ones(16, device=device, dtype=torch.bfloat16)
    given = {"query": ones, "key": ones, "query_weight": weight, "key_weight": weight}
    positions = torch.full((4096,), -1, device=device)
    found = gradients(given, positions=positions, eps=0.0)
    assert torch.equal(found[2], torch.full_like(weight, 4096))
    assert torch.equal(found[3], torch.full_like(weight, 4096))


def test_one_gradient_alone(device: torch.device) -> None:
    given = {name: tensor.requires_grad_() for name, tensor in make(device).items()}
    query, _ = pe.functional.norm_rotary(**given, spec=SPEC)
    found = torch.autograd.grad(query.sum(), list(given.values()))
    assert all(torch.isfinite(gradient).all() for gradient in found)
    assert found[0].count_nonzero() > 0
    assert found[1].count_nonzero() == found[3].count_nonzero() == 0


def test_keeps_only_its_arguments_and_rstd(device: torch.device) -> None:
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    given = {name: tensor.requires_grad_() for name, tensor in make(device).items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pe.functional.norm_rotary(**given, spec=SPEC)
    arguments = [tuple(tensor.shape) for tensor in given.values()]
    assert sorted(kept) == sorted([*arguments, (2, 6, 4), (2, 6, 2)])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query_weight": torch.ones(8)}, ValueError, "query_weight: expected head_dim 16, got 8"),
        ({"key_weight": torch.ones(1, 16)}, ValueError, r"key_weight: expected \[head_dim\]"),
        ({"key_weight": torch.ones(16).half()}, TypeError, "key_weight: expected the dtype of"),
        ({"key": torch.ones(2, 6, 1, 8)}, ValueError, "key: expected head_dim 16, got 8"),
        ({"eps": "0"}, TypeError, "eps: expected a float, got a str"),
        ({"layout": "hsbd"}, ValueError, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number of at least 0, got -1"),
        ({"weight_offset": float("nan")}, ValueError, "weight_offset: expected a finite number"),
        pytest.param({"positions": torch.full((6,), -2)}, IndexError, "positions: expected -1", marks=AT_ONCE),
        ({"spec": pe.RotarySpec(2048, rotary_dim=16)}, ValueError, "query: expected head_dim 2048, got 16"),
        ({"spec": pe.RotarySpec(16, scaling=pe.XPosScaling())}, ValueError, "spec: expected no XPosScaling, which norm_rotary"),
        ({"spec": pe.RotarySpec(16, numerics="float32")}, ValueError, "numerics: expected 'exact' for norm_rotary, got 'float32'"),
    ],
)  # fmt: skip
def test_refusals_write_nothing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = make(torch.device("cpu"))
    query = given["query"].clone()
    refused((lambda: pe.functional.norm_rotary_(**{**given, "spec": SPEC, **change}), error, text))
    assert torch.equal(given["query"], query)


def test_heads_have_at_most_1024_components() -> None:
    x, weight = torch.ones(1, 1, 1, 1026), torch.ones(1026)
    refused((lambda: pe.functional.norm_rotary(x, x, weight, weight, spec=pe.RotarySpec(1026, rotary_dim=16)), ValueError, "head_dim: expected at most 1024, got 1026"))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spec": pe.RotarySpec(16, numerics="float32")}, "numerics: expected 'exact' for"),
        ({"query_weight": torch.ones(1)}, "query_weight: expected head_dim 16, got 1"),
    ],
)  # fmt: skip
def test_tangents_are_refused_alike(change: dict[str, Any], text: str) -> None:
    given = {**make(torch.device("cpu")), "spec": SPEC, **change}

    def norm(query: Tensor) -> Tensor:
        return pe.functional.norm_rotary(**{**given, "query": query})[0]

    refused((lambda: torch.func.jvp(norm, (given["query"],), (given["query"],)), ValueError, text))
