"""Tests of RotaryEmbedding and RotarySpec beyond the shared tests of operators."""

import re
from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor


def make(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
    torch.manual_seed(0)
    query = torch.randn(2, 6, 4, 16, dtype=dtype, device=device)
    key = torch.randn(2, 6, 2, 16, dtype=dtype, device=device)
    return query, key


def test_views_of_a_large_packed_tensor(device: torch.device) -> None:
    """Values between them are prefetched, but neither read nor written."""
    heads = (32, 8, 8)
    packed = torch.randn(2, 300, sum(heads), 128, device=device)
    values = packed[:, :, 40:].clone()
    query, key, _ = packed.split(heads, 2)
    spec = pe.RotarySpec(128)
    expected = pe.functional.rotary(query.contiguous(), key.contiguous(), spec=spec)
    rotated = pe.functional.rotary(query, key, spec=spec)
    pe.functional.rotary_(query, key, spec=spec)
    for result in (rotated, (query, key)):
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])
    assert torch.equal(packed[:, :, 40:], values)


@pytest.mark.parametrize("rotary_dim", [128, 64, 32, 24])
@pytest.mark.parametrize(("parts", "beside"), [(3, 0), (2, 0), (1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_with_gaps_between_the_heads_of_a_large_tensor(
    dtype: torch.dtype, parts: int, beside: int, rotary_dim: int, device: torch.device
) -> None:
    """Heads of query, key and value alternate, or have unrotated columns between them."""
    packed = torch.randn(2, 10000 // (parts * dtype.itemsize), 17, parts, 128 + beside).to(dtype)
    packed = packed.to(device)
    original = packed.clone()
    query = packed[..., 0, beside:]
    spec = pe.RotarySpec(128, rotary_dim=rotary_dim)
    heads = [pe.functional.rotary(head.contiguous(), spec=spec) for head in query.split(1, 2)]
    expected = torch.cat(heads, 2)
    assert torch.equal(pe.functional.rotary(query, spec=spec), expected)
    pe.functional.rotary_(query, spec=spec)
    assert torch.equal(query, expected)
    assert torch.equal(packed[..., 1:, :], original[..., 1:, :])
    assert torch.equal(packed[..., :beside], original[..., :beside])


@pytest.mark.parametrize("rows", [(), (2,), (1,)], ids=str)
def test_positions_of_each_axis(rows: tuple[int, ...], device: torch.device) -> None:
    """Pairs of an axis rotate as if its positions were the only ones; a batch of 1 is broadcast."""
    query, _ = make(device=device)
    rope = pe.RotaryEmbedding(16, sections=pe.Sections((3, 5)))
    if not rows:
        positions = torch.tensor([[0, 1, 2, 3, 4, 5], [9, 7, 5, 3, 1, 800]], device=device)
        places = positions.unsqueeze(1).expand(2, 2, 6)
        found = pe.RotaryEmbedding(16, sections=pe.Sections((3, 5)), layout="thd")(
            query.flatten(0, 1), positions=positions.repeat(1, 2)
        ).view_as(query)
    else:
        positions = torch.randint(0, 1000, (2, *rows, 6), device=device)
        places = positions.expand(2, 2, 6)
        found = rope(query, positions=positions)
    wanted = torch.empty_like(query)
    for axis, pairs in enumerate(([0, 1, 2], [3, 4, 5, 6, 7])):
        components = pairs + [pair + 8 for pair in pairs]
        alone = pe.RotaryEmbedding(16)(query, positions=places[axis].contiguous())
        wanted[..., components] = alone[..., components]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("numerics", ["exact", "float32"])
@pytest.mark.parametrize("sizes", [(3, 5, 0), (8, 0, 0), (8, 0), (3, 5, 0, 0), (0, 8, 0)], ids=str)
def test_axes_without_a_pair(sizes: tuple[int, ...], numerics: str, device: torch.device) -> None:
    """Positions may have them, or leave out those after the last in use."""
    query, key = make(device=device)
    rope = pe.RotaryEmbedding(16, sections=pe.Sections(sizes), numerics=numerics)
    positions = torch.randint(0, 1000, (len(sizes), 2, 6), device=device)
    used = 1 + max(axis for axis, size in enumerate(sizes) if size)
    if used == 1:
        plain = pe.RotaryEmbedding(16, numerics=numerics)
        expected = plain(query, key, positions[0])
    else:
        expected = rope(query, key, positions[:used])
    for axes in range(max(2, used), len(sizes) + 1):
        for found, wanted in zip(rope(query, key, positions[:axes]), expected, strict=True):
            assert torch.equal(found, wanted)
    thd = pe.RotaryEmbedding(16, sections=pe.Sections(sizes), numerics=numerics, layout="thd")
    flat = thd(query.flatten(0, 1), positions=positions.flatten(1))
    assert torch.equal(flat.view_as(query), expected[0])
    positions[:, 1, 2] = -1
    assert torch.equal(rope(query, positions=positions)[1, 2], query[1, 2])
    refused((lambda: rope(query, positions=positions.repeat(3, 1, 1)), ValueError, "positions: expected axes"))  # fmt: skip


def test_one_row_of_positions_serves_the_batch(device: torch.device) -> None:
    query, key = make(device=device)
    positions = torch.tensor([7, 5, 3, -1, 0, 900], device=device)
    rope = pe.RotaryEmbedding(16)
    for found, wanted in zip(rope(query, key, positions.unsqueeze(0)), rope(query, key, positions), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda rope, q, k: pe.functional.rotary(q, spec=16), TypeError, "spec: expected a RotarySpec, got int"),
        (lambda rope, q, k: pe.functional.rotary(q, spec=rope.spec, layout="hsbd"), ValueError, "layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got 'hsbd'"),
        (lambda rope, q, k: rope(q, k[:1]), ValueError, "key: expected batch 2, got 1"),
        (lambda rope, q, k: rope(q, k.to("meta")), ValueError, "key: expected the device of query, .*, got meta"),
        (lambda rope, q, k: rope(q, positions=torch.zeros(3, 6).long()), ValueError, "positions: expected batch 1 or 2, got 3"),
        (lambda rope, q, k: rope(q[:1], positions=torch.zeros(3, 6).long()), ValueError, "positions: expected batch 1, got 3"),
        (lambda rope, q, k: rope(q, positions=torch.zeros(1, 2, 6).long()), ValueError, r"positions: expected \[seq\] or \[batch, seq\], got \[1, 2, 6\]"),
        (lambda rope, q, k: rope(q, offset=-1), ValueError, "offset: expected 0 or more, got -1"),
        (lambda rope, q, k: rope(q[:1], cu_seqlens=torch.tensor([[0, 6]])), ValueError, r"cu_seqlens: expected \[documents \+ 1\], got \[1, 2\]"),
        (lambda rope, q, k: rope(q, cu_seqlens=torch.tensor([0, 6])), ValueError, "cu_seqlens: expected layout 'thd' or batch 1, got batch 2"),
        (lambda rope, q, k: rope(q[:1], cu_seqlens=torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens: expected int32 or int64, got float32"),
        (lambda rope, q, k: rope(q[:1], cu_seqlens=torch.tensor([], dtype=torch.int32)), ValueError, r"cu_seqlens: expected \[documents \+ 1\], got \[0\]"),
        pytest.param(lambda rope, q, k: rope.rotate_(q[:1], cu_seqlens=torch.tensor([1, 6])), ValueError, "cu_seqlens: expected 0 first, got 1", marks=AT_ONCE),
        pytest.param(lambda rope, q, k: rope.rotate_(q[:1], cu_seqlens=torch.tensor([0, 5])), ValueError, "cu_seqlens: expected the number of tokens, 6, last, got 5", marks=AT_ONCE),
        pytest.param(lambda rope, q, k: rope.rotate_(q[:1], cu_seqlens=torch.tensor([0, 4, 3, 6])), ValueError, "cu_seqlens: expected numbers that do not decrease, got 4 and 3 at index 2", marks=AT_ONCE),
        (lambda rope, q, k: rope(q[:1], positions=torch.arange(6), cu_seqlens=torch.tensor([0, 6])), ValueError, "cu_seqlens: expected none where positions are given"),
        (lambda rope, q, k: pe.functional.rotary(q, spec=rope.spec, frequencies=torch.ones(7)), ValueError, "frequencies: expected rotary_dim / 2 8, got 7"),
        (lambda rope, q, k: pe.functional.rotary(q, spec=rope.spec, frequencies=torch.ones(1, 8)), ValueError, "frequencies: expected heads 4, got 1"),
        (lambda rope, q, k: pe.functional.rotary(q, spec=rope.spec, frequencies=torch.ones(1, 1, 4, 8)), ValueError, r"frequencies: expected \[rotary_dim / 2\], \[heads, rotary_dim / 2\] or \[axes, heads, rotary_dim / 2\], got \[1, 1, 4, 8\]"),
        (lambda rope, q, k: pe.functional.rotary(q, spec=rope.spec, frequencies=torch.ones(8).half()), TypeError, "frequencies: expected float32 or float64, got float16"),
        (lambda rope, q, k: pe.functional.rotary(q, spec=rope.spec, frequencies=torch.ones(8, device="meta")), ValueError, "frequencies: expected the device of query, cpu, got meta"),
        (lambda rope, q, k: pe.RotaryEmbedding(16, learned_frequencies=True).rotate_(q), ValueError, "frequencies: requires grad"),
        (lambda rope, q, k: rope.rotate_(q.requires_grad_(), k), ValueError, "no history; use rotary or torch.no_grad"),
        (lambda rope, q, k: pe.RotaryEmbedding(16, scaling=pe.DynamicNtkScaling(2.0, 32), learned_frequencies=True), ValueError, "learned_frequencies: expected a specification whose frequencies do not depend"),
        (lambda rope, q, k: pe.RotaryEmbedding(16, numerics="float32", learned_frequencies=True), ValueError, "numerics: expected 'exact' for learned frequencies, got 'float32'"),
        (lambda rope, q, k: pe.cpp.RotaryEmbedding(16, numerics="float32", learned_frequencies=True), ValueError, "numerics: expected 'exact' for learned frequencies, got 'float32'"),
        (lambda rope, q, k: rope.rerotate_(q[0], torch.arange(6), torch.arange(6)), ValueError, r"key: expected \[batch, seq, heads"),
        (lambda rope, q, k: rope.rerotate_(q, torch.arange(5), torch.arange(6)), ValueError, "old_positions: expected seq 6, got 5"),
        (lambda rope, q, k: rope.rerotate_(q, torch.arange(6), torch.arange(6.0).half()), TypeError, "new_positions: expected int32, int64, float32 or float64, got float16"),
        (lambda rope, q, k: rope.rerotate_(q, torch.arange(6), torch.arange(-3, 3)), IndexError, "new_positions: expected -1 .*, got -3 at index 0"),
        pytest.param(lambda rope, q, k: rope(q, positions=torch.tensor([0, 1, 2, -2, 4, 5])), IndexError, r"positions: expected -1 \(leave the token as it is\) or more, got -2 at index 3", marks=AT_ONCE),
        (lambda rope, q, k: rope.rotate_(q.transpose(-1, -2).contiguous().transpose(-1, -2)), ValueError, "query: expected a contiguous last dimension"),
        (lambda rope, q, k: rope.rotate_(q, q), ValueError, "key: expected memory apart from query's"),
        (lambda rope, q, k: rope.rotate_(q[:, :1].expand(-1, 6, -1, -1)), ValueError, "query: expected elements that do not share memory"),
        (lambda rope, q, k: pe.RotaryEmbedding(16, learned_frequencies="no"), ValueError, "learned_frequencies: expected True or False, got 'no'"),
        (lambda rope, q, k: pe.RotaryEmbedding(0), ValueError, "head_dim: expected a positive number, got 0"),
        (lambda rope, q, k: pe.RotarySpec(8.5), ValueError, "head_dim: expected a whole number, got 8.5"),
        (lambda rope, q, k: pe.RotarySpec(8, rotary_start=2**63 - 2, rotary_dim=8), ValueError, "expected at most head_dim"),
        (lambda rope, q, k: pe.RotarySpec.from_json('{"head_dim":16,"theta":1}'), ValueError, "unknown key 'theta'"),
        (lambda rope, q, k: pe.RotarySpec.from_json("[]"), ValueError, "RotarySpec: expected a JSON object"),
        (lambda rope, q, k: pe.RotarySpec.from_json("{"), ValueError, "RotarySpec: expected JSON text"),
    ],
)  # fmt: skip
def test_errors(call, error, text) -> None:
    query, key = make()
    before = query.clone()
    refused((call, error, text), given=(pe.RotaryEmbedding(16), query, key))
    assert torch.equal(query, before)


@pytest.mark.gpu
def test_bad_position_on_cuda_is_raised_later(cuda: torch.device) -> None:
    query = make(device=cuda)[0][:1]  # rows share positions, so any of them may report first
    rope = pe.RotaryEmbedding(16)
    rotated = rope(query, positions=torch.tensor([0, 1, -7, 3, 4, 5], device=cuda))
    refused((pe.check_errors, IndexError, "position -7 at index 2"))
    assert torch.equal(rotated[:, 2], query[:, 2])
    pe.check_errors()
    assert torch.ones(8, 8, device=cuda).matmul(torch.ones(8, 8, device=cuda)).sum() == 512


def test_module_tells_its_head_dim() -> None:
    assert pe.RotaryEmbedding(16).head_dim == 16
    assert pe.RotaryEmbedding(pe.RotarySpec(32, rotary_dim=8)).head_dim == 32


def test_strides_that_empty_like_would_reorder(device: torch.device) -> None:
    """The result's last dimension is contiguous for any strides of the input."""
    windows = torch.randn(10, device=device).unfold(0, 8, 1)[None, :, None, :]
    turned = torch.randn(2, 5, 8, 3, device=device).transpose(2, 3)
    for query in (windows, turned):
        rope = pe.RotaryEmbedding(8)
        rotated = rope(query)
        assert torch.equal(rotated, rope(query.contiguous()))
        assert rotated.stride(-1) == 1
        shape_only = torch.ops.posembed.rotary(query.to("meta"), spec=rope.spec.text)
        assert shape_only.stride() == rotated.stride()


def test_in_place_refuses_tangents() -> None:
    query, _ = make()
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        refused((lambda: pe.RotaryEmbedding(16).rotate_(dual), ValueError, "query: has a forward-mode tangent"))  # fmt: skip


def ranges(call: Callable[[], Any]) -> set[str]:
    """The names of ranges with which a call tells a profiler its way."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events() if re.match(r"(norm_)?rotary: ", event.name)}


# 8 MiB leave the caches; tokens of less than a page have one order on all processors.
LARGE = torch.zeros(1, 4096, 8, 64)
SMALL = LARGE[:, :6]


@pytest.mark.parametrize(
    ("name", "query", "options", "call"),
    [
        ("in order", SMALL, {}, {}),
        ("in order, streamed", LARGE, {}, {}),
        ("in order, streamed from a buffer", LARGE, {"rotary_dim": 20}, {}),
        ("in order, heads first", SMALL.transpose(1, 2).contiguous(), {}, {"layout": "bhsd"}),
        ("shared tiles", SMALL.expand(3, -1, -1, -1), {}, {}),
        ("in order", SMALL.expand(3, -1, -1, -1), {}, {"positions": torch.arange(18).view(3, 6)}),
        ("pieces", SMALL, {}, {"frequencies": torch.ones(8, 32)}),
        ("pieces, streamed", LARGE, {}, {"frequencies": torch.ones(8, 32)}),
    ],
)
def test_a_profile_names_the_way_of_a_call(
    name: str, query: Tensor, options: dict[str, Any], call: dict[str, Any]
) -> None:
    spec = pe.RotarySpec(64, **options)
    assert ranges(lambda: pe.functional.rotary(query, spec=spec, **call)) == {f"rotary: {name}"}


@pytest.mark.parametrize(("name", "options"), [("fused", {}), ("general", {"norm": "layer"})])
def test_a_profile_names_the_kernel_of_a_norm(name: str, options: dict[str, Any]) -> None:
    spec, weight = pe.RotarySpec(64), torch.ones(64)
    found = ranges(lambda: pe.functional.norm_rotary(SMALL, SMALL, weight, weight, spec=spec, **options))
    assert found == {f"norm_rotary: {name}"}
