"""Tests of QK-norm and rotary beyond the shared tests of operators."""

from typing import Any

import posembed as pe
import pytest
import torch
from support.case import FLOATING, assert_close, decomposed
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

SPEC = pe.RotarySpec(32, rotary_dim=16, rotary_start=8, interleaved=True)
SIXTEEN = [torch.bfloat16, torch.float16]


def make(device: torch.device, dtype: torch.dtype = torch.float32, **sizes: int) -> dict[str, Any]:
    torch.manual_seed(0)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    dim, seq = sizes.get("dim", 32), sizes.get("seq", 7)
    return {
        "query": torch.randn(2, seq, 6, dim, **place),
        "key": torch.randn(2, seq, 3, dim, **place),
        "query_weight": torch.randn(dim, **place),
        "key_weight": torch.randn(dim, **place),
    }


def tables(seq: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables in which the components of a pair have different values at every other token."""
    angles = torch.outer(torch.arange(float(seq)), torch.rand(width // 2)).repeat(1, 2).to(device)
    angles[1::2, width // 2 :] += 0.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def assert_rounded_once(found: Any, exact: Any, arithmetic: float = 4e-6) -> None:
    """The error is half a unit in the last place, plus that of float32 arithmetic."""
    for actual, wanted in zip(found, exact, strict=True):
        ulp = torch.finfo(actual.dtype).eps * 2.0 ** wanted.abs().log2().floor()
        assert ((actual.double() - wanted).abs() <= 0.5 * ulp + arithmetic).all()


def test_equals_torch_norm_then_rotary(device: torch.device) -> None:
    given = make(device)
    query, key = (rms_norm(given[name], (32,), given[f"{name}_weight"] + 1, 1e-5) for name in ("query", "key"))
    expected = pe.functional.rotary(query, key, spec=SPEC, offset=3)
    found = pe.functional.norm_rotary(**given, spec=SPEC, offset=3, eps=1e-5, weight_offset=1.0)
    for actual, wanted in zip(found, expected, strict=True):
        assert_close(actual, wanted, 1e-6)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_rounds_once(dtype: torch.dtype, device: torch.device) -> None:
    given = make(device, dtype, seq=100)
    exact = {name: tensor.double() for name, tensor in given.items()}
    found = pe.functional.norm_rotary(**given, spec=SPEC)
    assert_rounded_once(found, decomposed("norm_rotary")(**exact, spec=SPEC.to_json()), 2e-6)


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


def gradients(given: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    query, key = pe.functional.norm_rotary(**leaves, spec=SPEC, **options)
    return torch.autograd.grad([query.sum(), key.sum()], list(leaves.values()))


def test_weights_accumulate_in_float32(device: torch.device) -> None:
    """Adds four thousand equal contributions; bfloat16 sums would stop at two hundred."""
    ones = torch.ones(1, 4096, 1, 32, device=device, dtype=torch.bfloat16)
    weight = torch.ones(32, device=device, dtype=torch.bfloat16)
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
    assert sorted(kept) == sorted([*arguments, (2, 7, 6), (2, 7, 3)])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spec": pe.RotarySpec(32, numerics="float32")}, "numerics: expected 'exact' for"),
        ({"query_weight": torch.ones(1)}, "query_weight: expected head_dim 32, got 1"),
    ],
)  # fmt: skip
def test_tangents_are_refused_alike(change: dict[str, Any], text: str) -> None:
    given = {**make(torch.device("cpu")), "spec": SPEC, **change}

    def norm(query: Tensor) -> Tensor:
        return pe.functional.norm_rotary(**{**given, "query": query})[0]

    refused((lambda: torch.func.jvp(norm, (given["query"],), (given["query"],)), ValueError, text))


# ------------------------------------------------- norms over all heads, LayerNorm and given tables


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtype", FLOATING)
def test_tables_have_the_roundings_of_a_program(dtype: torch.dtype, before: bool, device: torch.device) -> None:
    """Only the order of the sum of squares differs, which moves a rounding here and there."""
    given = make(device, dtype, dim=128, seq=40)
    cos, sin = tables(40, 128, device, dtype)
    found = pe.functional.norm_rotary(**given, cos=cos, sin=sin, round_before_weight=before)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, actual in zip(("query", "key"), found, strict=True):
        x, weight = given[name].to(wide), given[f"{name}_weight"]
        rows = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        rows = rows.to(dtype) * weight if before else (rows * weight.to(wide)).to(dtype)
        expected = rows * cos[:, None] + rotate_half(rows) * sin[:, None]
        differs = actual != expected
        few = 0.001 if dtype.itemsize == 2 else 0.5  # of float32, the norm alone has more bits
        assert differs.float().mean() <= few
        assert_close(actual, expected, 4 * torch.finfo(dtype).eps)


def test_products_with_wider_tables_are_not_rounded(device: torch.device) -> None:
    given = make(device, torch.bfloat16, dim=128, seq=40)
    cos, sin = tables(40, 128, device, torch.float32)
    found, _ = pe.functional.norm_rotary(**given, cos=cos, sin=sin)
    x = given["query"].float()
    rows = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    rows = (rows * given["query_weight"]).float()
    expected = (rows * cos[:, None] + rotate_half(rows) * sin[:, None]).bfloat16()
    assert (found != expected).float().mean() <= 0.001


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_tables_in_one_rounding(dtype: torch.dtype, device: torch.device) -> None:
    given = make(device, dtype, seq=50)
    cos, sin = tables(50, 32, device, torch.float32)
    options: dict[str, Any] = {"numerics": "float32_product", "cos": cos, "sin": sin}
    found = pe.functional.norm_rotary(**given, **options)
    exact = {name: tensor.double() for name, tensor in given.items()}
    options |= {"cos": cos.double(), "sin": sin.double()}
    assert_rounded_once(found, decomposed("norm_rotary")(**exact, **options, spec='{"head_dim":32}'))


def test_half_width_and_complex_tables_are_the_same(device: torch.device) -> None:
    given = make(device)
    spec = pe.RotarySpec(32, rotary_dim=16, rotary_start=8)
    half = {name: torch.rand(7, 8, device=device) for name in ("cos", "sin")}
    whole = {name: table.repeat(1, 2) for name, table in half.items()}
    expected = pe.functional.norm_rotary(**given, **whole, spec=spec)
    freqs = torch.complex(half["cos"], half["sin"])[None].expand(2, -1, -1)
    for others in (half, {"cos": freqs}):
        found = pe.functional.norm_rotary(**given, **others, spec=spec)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("spec", [SPEC, pe.RotarySpec(64), pe.RotarySpec(32)])
def test_weights_in_float32(spec: pe.RotarySpec, dtype: torch.dtype, device: torch.device) -> None:
    """The result is rounded once, and gradients of the weights are not rounded."""
    given = make(device, dtype, dim=spec.head_dim)
    weights = {name: torch.randn(spec.head_dim, device=device) for name in ("query", "key")}
    given |= {f"{name}_weight": weight for name, weight in weights.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    found = pe.functional.norm_rotary(**leaves, spec=spec, eps=1e-5)
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    wanted = decomposed("norm_rotary")(**exact, spec=spec.to_json(), eps=1e-5)
    assert_rounded_once(found, wanted)
    upstream = [torch.randn_like(x) for x in found]
    gradients = torch.autograd.grad(found, list(leaves.values()), upstream)
    expected_gradients = torch.autograd.grad(wanted, list(exact.values()), [x.double() for x in upstream])
    assert [x.dtype for x in gradients] == [dtype, dtype, torch.float32, torch.float32]
    for actual, expected in zip(gradients[2:], expected_gradients[2:], strict=True):
        assert_close(actual.double(), expected, 1e-5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_a_query_alone(layout: Any, device: torch.device) -> None:
    given = make(device)
    query, key = given["query"], given["key"]
    if layout == "bhsd":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    if layout == "thd":
        query, key = query[0], key[0]
    weight = given["query_weight"]
    for options in ({}, {"over": "all_heads"}, {"norm": "layer"}):
        weights = [weight, weight]
        if options.get("over"):
            weights = [weight.repeat(6), weight.repeat(3)]
        call: dict[str, Any] = {"spec": SPEC, "layout": layout, "offset": 2, **options}
        expected, _ = pe.functional.norm_rotary(query, key, *weights, **call)
        leaf = query.clone().requires_grad_()
        found = pe.functional.norm_rotary(leaf, None, weights[0], **call)
        assert torch.equal(found, expected)
        found.sum().backward()
        assert leaf.grad is not None
        copy = query.clone()
        assert pe.functional.norm_rotary_(copy, None, weights[0], **call) is copy
        assert torch.equal(copy, expected)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_one_norm_over_all_heads(norm: Any, layout: Any, device: torch.device) -> None:
    given = make(device)
    spec = pe.RotarySpec(32)
    places = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    results = {}
    for name in ("query", "key"):
        rows = given[name].flatten(-2)
        width = rows.shape[-1]
        given[f"{name}_weight"] = torch.randn(width, device=device)
        weight = given[f"{name}_weight"]
        if norm == "rms":
            rows = rms_norm(rows, (width,), weight, 1e-5)
        else:
            given[f"{name}_bias"] = torch.randn(width, device=device)
            rows = layer_norm(rows, (width,), weight, given[f"{name}_bias"], 1e-5)
        results[name] = rows.unflatten(-1, (-1, 32))
    rotated = pe.functional.rotary(results["query"], results["key"], spec=spec)
    moved = {name: given[name].permute(places) for name in ("query", "key")}
    found = pe.functional.norm_rotary(
        **{**given, **moved}, spec=spec, eps=1e-5, norm=norm, over="all_heads", layout=layout
    )
    for actual, expected in zip(found, rotated, strict=True):
        assert_close(actual.permute(places), expected, 1e-6)


@pytest.mark.parametrize("over", ["head", "all_heads"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_packed_projection_in_place(over: Any, dtype: torch.dtype, device: torch.device) -> None:
    heads, dim = (6, 2, 2), 64
    packed = torch.randn(2, 9, sum(heads) * dim, device=device).to(dtype)
    query, key, value = packed.unflatten(-1, (-1, dim)).split(heads, dim=2)
    weights = [torch.randn((h if over == "all_heads" else 1) * dim, device=device).to(dtype) for h in heads[:2]]
    options: dict[str, Any] = {"spec": pe.RotarySpec(dim), "over": over}
    expected = pe.functional.norm_rotary(query, key, *weights, **options)
    before = value.clone()
    pe.functional.norm_rotary_(query, key, *weights, **options)
    found = packed.unflatten(-1, (-1, dim)).split(heads, dim=2)
    assert all(torch.equal(a, b) for a, b in zip(found, (*expected, before), strict=True))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query_weight": torch.ones(8)}, ValueError, "query_weight: expected head_dim 32, got 8"),
        ({"key_weight": torch.ones(1, 32)}, ValueError, r"key_weight: expected \[head_dim\]"),
        ({"key": torch.ones(2, 7, 1, 8)}, ValueError, "key: expected head_dim 32, got 8"),
        ({"eps": "0"}, TypeError, "eps: expected a float, got a str"),
        ({"layout": "hsbd"}, ValueError, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number of at least 0, got -1"),
        ({"weight_offset": float("nan")}, ValueError, "weight_offset: expected a finite number"),
        pytest.param({"positions": torch.full((7,), -2)}, IndexError, "positions: expected -1", marks=AT_ONCE),
        ({"spec": pe.RotarySpec(2048, rotary_dim=16)}, ValueError, "query: expected head_dim 2048, got 32"),
        ({"spec": pe.RotarySpec(32, scaling=pe.XPosScaling())}, ValueError, "spec: expected no XPosScaling, which norm_rotary"),
        ({"spec": pe.RotarySpec(32, numerics="float32")}, ValueError, "numerics: expected 'exact' for norm_rotary, got 'float32'"),
        ({"query": torch.ones(1, 1, 1, 1026), "key": None, "query_weight": None, "key_weight": None, "spec": pe.RotarySpec(1026, rotary_dim=16)}, ValueError, "head_dim: expected at most 1024, got 1026"),
        ({"norm": "batch"}, ValueError, "norm: expected 'rms' or 'layer', got 'batch'"),
        ({"over": "heads"}, ValueError, "over: expected 'head' or 'all_heads', got 'heads'"),
        ({"over": "all_heads"}, ValueError, r"query_weight: expected heads \* head_dim 192"),
        ({"query_bias": torch.ones(32)}, ValueError, "query_bias: expected none without LayerNorm"),
        ({"key_weight": torch.ones(32).double()}, TypeError, "key_weight: expected the dtype of"),
        ({"key": None}, ValueError, "key_weight: expected None without a key, got a tensor"),
        ({"sin": torch.ones(7, 32)}, ValueError, "cos: expected a tensor beside sin"),
        ({"cos": torch.ones(7, 16)}, ValueError, "sin: expected a tensor beside a real cos"),
        ({"cos": torch.ones(7, 32), "sin": torch.ones(7, 32)}, ValueError, "cos: expected rotary_dim / 2 = 8 columns"),
        ({"cos": torch.ones(7, 1, 16), "sin": torch.ones(7, 1, 16)}, ValueError, "cos: expected seq 7, got 1"),
        ({"cos": torch.ones(7, 16), "sin": torch.ones(7, 16), "offset": 3}, ValueError, "offset: expected 0 where cos is given, got 3"),
        ({"cos": torch.ones(7, 16), "sin": torch.ones(7, 16), "numerics": "exact"}, ValueError, "numerics: expected 'float32' or 'float32_product'"),
        ({"query_weight": None, "key_weight": None, "weight_offset": 1.0}, ValueError, "weight_offset: expected 0 without weights, got 1"),
        ({"spec": None}, TypeError, "spec: expected a RotarySpec, got NoneType"),
    ],
)  # fmt: skip
def test_refusals_write_nothing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = make(torch.device("cpu"))
    query = given["query"].clone()
    refused((lambda: pe.functional.norm_rotary_(**{**given, "spec": SPEC, **change}), error, text))
    assert torch.equal(given["query"], query)
