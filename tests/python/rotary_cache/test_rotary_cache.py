"""Tests of rotary with paged caches beyond the shared tests of operators."""

import dataclasses
from typing import Any

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor

SPEC = pe.RotarySpec(16, rotary_dim=8, rotary_start=4, interleaved=True)
FLOAT8 = torch.float8_e4m3fn


def make(device: torch.device, dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None) -> dict[str, Any]:
    """Arguments for five tokens and pages with twelve slots in total."""
    torch.manual_seed(0)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    return {
        "query": torch.randn(5, 3, 16, **place),
        "key": torch.randn(5, 2, 16, **place),
        "value": torch.randn(5, 2, 16, **place),
        "key_cache": torch.zeros(3, 4, 2, 16, device=device, dtype=cache or dtype),
        "value_cache": torch.zeros(3, 4, 2, 16, device=device, dtype=cache or dtype),
        "slot_mapping": torch.tensor([7, -1, 0, 11, 3], device=device),
        "positions": torch.tensor([5, 6, -1, 100000, 2], device=device),
        "spec": SPEC,
    }


def float8(rows: Tensor, scale: float) -> Tensor:
    """PyTorch's conversion of numbers that do not overflow, as bytes."""
    scaled = rows.float() / torch.tensor(scale, dtype=torch.float32, device=rows.device)
    return scaled.clamp(-448, 448).to(FLOAT8).view(torch.uint8)


@pytest.mark.parametrize("dtype", FLOATING)
def test_equals_rotary_then_copy(dtype: torch.dtype, device: torch.device) -> None:
    given = make(device, dtype)
    query, key = pe.functional.rotary(given["query"], given["key"], given["positions"], spec=SPEC, layout="thd")
    pe.functional.rotary_cache_(**given)
    kept = given["slot_mapping"] >= 0
    slots = given["slot_mapping"][kept]
    assert torch.equal(given["query"], query)
    assert torch.equal(given["key_cache"].flatten(0, 1)[slots], key[kept])
    assert torch.equal(given["value_cache"].flatten(0, 1)[slots], given["value"][kept])


@pytest.mark.parametrize("head_dim", [128, 120, 64])
@pytest.mark.parametrize("dtype", FLOATING)
def test_rows_too_large_for_caches_are_the_same(dtype: torch.dtype, head_dim: int) -> None:
    """They are streamed if every row is aligned for it."""
    tokens = (8 << 20) // (4 * head_dim * dtype.itemsize) + 1
    spec = pe.RotarySpec(head_dim, rotary_dim=64)
    key, value = torch.randn(2, tokens, 4, head_dim).to(dtype).unbind()
    slots = torch.randperm(tokens + 3)[:tokens]
    slots[5] = -1
    caches = torch.zeros(2, 1, tokens + 3, 4, head_dim, dtype=dtype)
    query = torch.zeros_like(key)
    pe.functional.rotary_cache_(key, key.clone(), value, caches[0], caches[1], slots, spec=spec, query_out=query)
    rotated = key.clone()
    pe.functional.rotary_(rotated, spec=spec, layout="thd")
    kept = slots >= 0
    assert torch.equal(query, rotated)
    assert torch.equal(caches[0, 0, slots[kept]], rotated[kept])
    assert torch.equal(caches[1, 0, slots[kept]], value[kept])


@pytest.mark.parametrize("rotate_key", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
def test_float8_equals_torch_bit_for_bit(dtype: torch.dtype, rotate_key: bool, device: torch.device) -> None:
    given = make(device, dtype, FLOAT8)
    for name in ("key", "value"):
        given[name] *= 10.0 ** torch.randint(-4, 4, given[name].shape, device=device)
    _, key = pe.functional.rotary(given["query"], given["key"], given["positions"], spec=SPEC, layout="thd")
    pe.functional.rotary_cache_(**given, rotate_key=rotate_key, key_scale=0.7, value_scale=0.03)
    kept = given["slot_mapping"] >= 0
    slots = given["slot_mapping"][kept]
    for cache, rows, scale in (("key_cache", key, 0.7), ("value_cache", given["value"], 0.03)):
        found = given[cache].view(torch.uint8).flatten(0, 1)[slots]
        assert torch.equal(found, float8(rows[kept], scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float8_of_every_16_bit_number(dtype: torch.dtype, device: torch.device) -> None:
    """Includes NaN, whose sign a GPU's conversion drops, infinities and denormals."""
    every = torch.arange(-32768, 32768, dtype=torch.int16, device=device).view(dtype)
    value = every.view(256, 1, 256)
    cache = torch.zeros(256, 1, 1, 256, device=device).to(FLOAT8)
    key, key_cache = value[..., :2].clone(), cache[..., :2].clone()
    slots = torch.arange(256, device=device)
    pe.functional.rotary_cache_(
        key.clone(), key, value, key_cache, cache, slots, spec=pe.RotarySpec(2), value_scale=0.5
    )
    found, expected = cache.view(torch.uint8).view(256, 1, 256), float8(value, 0.5)
    nan = torch.tensor(0x7F, dtype=torch.uint8, device=device)
    assert torch.equal(*(torch.where(bits & nan == nan, nan, bits) for bits in (found, expected)))


def test_scale_is_a_number_or_a_tensor(device: torch.device) -> None:
    caches = []
    for scale in (0.37, torch.tensor([0.37], device=device)):
        given = make(device, torch.bfloat16, FLOAT8)
        pe.functional.rotary_cache_(**given, key_scale=scale, value_scale=scale)
        caches.append((given["key_cache"].view(torch.uint8), given["value_cache"].view(torch.uint8)))
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])


def test_query_into_other_memory(device: torch.device) -> None:
    given, plain = make(device), make(device)
    pe.functional.rotary_cache_(**plain)
    before = given["query"].clone()
    out = torch.empty_strided((5, 3, 16), (16, 80, 1), device=device)
    pe.functional.rotary_cache_(**given, query_out=out)
    assert torch.equal(given["query"], before)
    assert torch.equal(out, plain["query"])
    pe.functional.rotary_cache_(**given, query_out=given["query"])  # the same as in place
    assert torch.equal(given["query"], plain["query"])


def test_rotate_key(device: torch.device) -> None:
    given = make(device)
    versions = {name: given[name]._version for name in ("key", "value", "key_cache")}
    _, key = pe.functional.rotary(given["query"], given["key"], given["positions"], spec=SPEC, layout="thd")
    pe.functional.rotary_cache_(**given, rotate_key=True)
    assert torch.equal(given["key"], key)
    assert given["key"]._version == versions["key"] + 1
    assert given["key_cache"]._version == versions["key_cache"] + 1
    assert given["value"]._version == versions["value"]


@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
def test_views_of_packed_tensors(cache_layout: Any, device: torch.device) -> None:
    """Query, key and value of one projection; both caches in one tensor, pages apart."""
    given, plain = make(device), make(device)
    pe.functional.rotary_cache_(**plain)
    packed = torch.cat([given[name] for name in ("query", "key", "value")], 1)
    given["query"], given["key"], given["value"] = packed.split([3, 2, 2], 1)
    shape = (3, 2, 4, 2, 16) if cache_layout == "nhd" else (3, 2, 2, 4, 16)
    given["key_cache"], given["value_cache"] = torch.zeros(shape, device=device).unbind(1)
    pe.functional.rotary_cache_(**given, cache_layout=cache_layout)
    assert torch.equal(packed[:, :3], plain["query"])
    assert torch.equal(packed[:, 3:5], plain["key"])
    for name in ("key_cache", "value_cache"):
        cache = given[name] if cache_layout == "nhd" else given[name].transpose(1, 2)
        assert torch.equal(cache, plain[name])


def test_compiles_with_float8_and_a_query_elsewhere(device: torch.device) -> None:
    given, plain = make(device, cache=FLOAT8), make(device, cache=FLOAT8)
    out = torch.empty_like(given["query"])
    expected = torch.empty_like(out)
    scale = torch.tensor([0.5], device=device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(**given: Any) -> None:
        pe.functional.rotary_cache_(**given, key_scale=scale, value_scale=2.0)

    compiled(**given, query_out=out)
    pe.functional.rotary_cache_(**plain, query_out=expected, key_scale=scale, value_scale=2.0)
    assert torch.equal(out, expected)
    for name in ("key_cache", "value_cache"):
        assert torch.equal(given[name].view(torch.uint8), plain[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"key": torch.zeros(5, 2, 12)}, ValueError, "key: expected head_dim 16, or 8"),
        ({"value": torch.zeros(5, 3, 16)}, ValueError, "value: expected heads 2, got 3"),
        ({"value": torch.zeros(4, 2, 16)}, ValueError, "value: expected seq 5, got 4"),
        ({"value": torch.zeros(5, 2, 16).double()}, TypeError, "value: expected the dtype of"),
        ({"key_cache": torch.zeros(3, 4, 1, 16)}, ValueError, "key_cache: expected heads 2"),
        ({"key_cache": torch.zeros(3, 4, 2, 8)}, ValueError, "key_cache: expected head_dim 16"),
        ({"key_cache": torch.zeros(3, 4, 32)}, ValueError, "key_cache: expected .pages"),
        ({"key_cache": torch.zeros(3, 4, 2, 16).half()}, TypeError, "or float8_e4m3fn, got float16"),
        ({"value_cache": torch.zeros(2, 4, 2, 16)}, ValueError, "value_cache: expected pages 3"),
        ({"value_cache": torch.zeros(3, 5, 2, 16)}, ValueError, "value_cache: expected page_size"),
        ({"value_cache": torch.zeros(3, 4, 2, 16).to(FLOAT8)}, TypeError, "value_cache: expected the dtype of key_cache"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, ValueError, "slot_mapping: expected"),
        ({"slot_mapping": torch.zeros(5)}, TypeError, "slot_mapping: expected int32 or int64"),
        ({"cache_layout": "hdn"}, ValueError, "cache_layout: expected 'nhd' or 'hnd', got 'hdn'"),
        ({"key_scale": 2.0}, ValueError, "key_scale: expected 1 unless .* float8_e4m3fn, got 2"),
        ({"key_scale": torch.ones(1)}, ValueError, "key_scale: expected 1 unless .* got a tensor"),
        ({"key_scale": "1"}, TypeError, "key_scale: expected a float, got a str"),
        ({"value_scale": 0.0}, ValueError, "value_scale: expected a finite number above 0"),
        ({"query_out": torch.zeros(5, 3, 8)}, ValueError, "query_out: expected the shape of query"),
        ({"offset": 3}, ValueError, "offset: expected 0 where positions are given"),
        ({"spec": pe.RotarySpec(16, scaling=pe.XPosScaling())}, ValueError, "spec: expected no XPosScaling, which rotary_cache_"),
        ({"spec": pe.RotarySpec(16, numerics="float32_product")}, ValueError, "numerics: expected 'exact' for rotary_cache_, got 'float32_product'"),
        pytest.param({"positions": torch.tensor([0, 1, 2, 3, -5])}, IndexError, "got -5 at index 4", marks=AT_ONCE),
        pytest.param({"slot_mapping": torch.tensor([0, 1, 2, 3, 12])}, IndexError, "0 to 11.*got 12 at index 4", marks=AT_ONCE),
        pytest.param({"slot_mapping": torch.tensor([0, -2, 2, 3, 4])}, IndexError, "got -2 at index 1", marks=AT_ONCE),
    ],
)  # fmt: skip
def test_refusals_write_nothing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given = make(torch.device("cpu"))
    kept = {name: a.clone() for name, a in given.items() if isinstance(a, Tensor)}
    refused((lambda: pe.functional.rotary_cache_(**{**given, **change}), error, text))
    assert all(torch.equal(given[name], before) for name, before in kept.items())


def test_a_scale_tensor_must_be_one_float32() -> None:
    given = make(torch.device("cpu"), cache=FLOAT8)
    refused(
        (lambda: pe.functional.rotary_cache_(**given, key_scale=torch.ones(1).double()), TypeError, "key_scale: expected float32"),
        (lambda: pe.functional.rotary_cache_(**given, value_scale=torch.ones(2)), ValueError, "value_scale: expected one element"),
    )  # fmt: skip


def test_memory_of_other_dtypes_must_be_apart() -> None:
    bytes_ = torch.zeros(4096, dtype=torch.uint8)
    given = make(torch.device("cpu"), torch.bfloat16, FLOAT8)
    sizes = given["query"].numel() * 2, given["key_cache"].numel()
    for begin, free in ((sizes[0] - 1, False), (sizes[0], True)):
        given["query"] = bytes_[: sizes[0]].view(torch.bfloat16).view_as(given["query"])
        cache = bytes_[begin : begin + sizes[1]].view(FLOAT8)
        given["key_cache"] = cache.view_as(given["key_cache"])
        if free:
            pe.functional.rotary_cache_(**given)
            continue
        refused((lambda: pe.functional.rotary_cache_(**given), ValueError, "key_cache: expected memory apart from query's"))  # fmt: skip


def test_memory_that_is_written_must_be_apart(device: torch.device) -> None:
    given = make(device)
    given["value_cache"] = given["key_cache"]
    refused((lambda: pe.functional.rotary_cache_(**given), ValueError, "value_cache: expected memory apart from key_cache"))  # fmt: skip
    given = make(device)
    given["key_cache"] = given["key_cache"][:1].expand(3, 4, 2, 16)
    refused((lambda: pe.functional.rotary_cache_(**given), ValueError, "key_cache: expected elements that do not share memory"))  # fmt: skip
    given = make(device)
    refused((lambda: pe.functional.rotary_cache_(**given, query_out=given["query"].view(3, 5, 16).transpose(0, 1)), ValueError, "query_out: expected query itself or memory apart"))  # fmt: skip
    given = make(device)
    given["query"] = given["key_cache"].flatten()[:240].view(5, 3, 16)
    refused((lambda: pe.functional.rotary_cache_(**given, query_out=torch.empty_like(given["query"])), ValueError, "query: expected memory apart from key_cache's"))  # fmt: skip
    given = make(device)
    given["query"], given["key"] = given["query"][:, :2], given["query"][:, 1:]
    options = {"query_out": torch.empty_like(given["key"]), "rotate_key": True}
    refused((lambda: pe.functional.rotary_cache_(**given, **options), ValueError, "key: expected memory apart from query's"))  # fmt: skip


def test_packed_views_may_have_the_query_elsewhere(device: torch.device) -> None:
    """Heads of query and key alternate and share no element."""
    given, plain = make(device), make(device)
    packed = torch.zeros(5, 6, 16, device=device)
    for name, heads in (("query", packed[:, ::2]), ("key", packed[:, 1::2][:, :2])):
        given[name] = heads.copy_(given[name])
    given["query_out"] = torch.empty_like(plain["query"])
    pe.functional.rotary_cache_(**given, rotate_key=True)
    pe.functional.rotary_cache_(**plain, rotate_key=True)
    assert torch.equal(given["query_out"], plain["query"])
    assert torch.equal(given["key"], plain["key"])
    assert torch.equal(given["key_cache"], plain["key_cache"])


@pytest.mark.parametrize("axes", [1, 2])
def test_positions_as_rotary_takes_them(axes: int, device: torch.device) -> None:
    sections = pe.Sections((2, 2)) if axes == 2 else None
    given = make(device) | {"spec": dataclasses.replace(SPEC, sections=sections)}
    if axes == 2:
        given["positions"] = torch.stack([given["positions"], given["positions"].flip(0)])
    rotation = {name: given[name] for name in ("positions", "spec")}
    query, key = pe.functional.rotary(given["query"], given["key"], layout="thd", **rotation)
    pe.functional.rotary_cache_(**given)
    kept = given["slot_mapping"] >= 0
    assert torch.equal(given["query"], query)
    assert torch.equal(given["key_cache"].flatten(0, 1)[given["slot_mapping"][kept]], key[kept])


@pytest.mark.gpu
def test_a_slot_outside_the_cache_is_raised_later_on_cuda(cuda: torch.device) -> None:
    given = make(cuda)
    given["slot_mapping"][3] = 12
    pe.functional.rotary_cache_(**given)
    refused((pe.check_errors, IndexError, "slot 12 at index 3 .* -1 .skip the token. or 0 to 11"))
    assert given["key_cache"].count_nonzero() == 3 * 2 * 16


@pytest.mark.gpu
def test_one_graph_serves_every_slot(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs are CUDA's")
    given, plain = make(device), make(device)
    pe.functional.rotary_cache_(**{**given, "query": given["query"].clone()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pe.functional.rotary_cache_(**given)
    for name in ("slot_mapping", "positions"):
        plain[name] = plain[name].flip(0)
        given[name].copy_(plain[name])
    given["key_cache"].zero_()
    given["query"].copy_(plain["query"])
    graph.replay()
    pe.functional.rotary_cache_(**plain)
    assert torch.equal(given["query"], plain["query"])
    assert torch.equal(given["key_cache"], plain["key_cache"])


MLA = pe.RotarySpec(24, rotary_dim=8, rotary_start=16, interleaved=True)


@pytest.mark.parametrize("with_head", [False, True])
def test_latent_attention(with_head: bool, device: torch.device) -> None:
    query, latent = torch.randn(3, 4, 24, device=device), torch.randn(3, 10, device=device)
    key_rope, slots = torch.randn(3, 8, device=device), torch.tensor([5, -1, 2], device=device)
    if with_head:
        latent, key_rope = latent.unsqueeze(1), key_rope.unsqueeze(1)
    rope = pe.RotarySpec(8, interleaved=True)  # of the window only
    keys = pe.functional.rotary(key_rope.view(3, 1, 8), spec=rope, layout="thd", offset=9)
    rotated = pe.functional.rotary(query[..., 16:], spec=rope, layout="thd", offset=9)
    expected = torch.cat([query[..., :16], rotated], -1)
    options: dict[str, Any] = {"spec": MLA, "layout": "thd", "offset": 9}
    found = pe.functional.mla_rotary(query, key_rope, **options)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], keys.view(key_rope.shape))
    cache = torch.zeros(2, 4, 18, device=device)
    pe.functional.mla_rotary_cache_(query, latent, key_rope, cache, slots, **options)
    assert torch.equal(query, expected)
    rows = torch.cat([latent.view(3, 10), keys.view(3, 8)], -1)
    assert torch.equal(cache.view(8, 18)[[5, 2]], rows[[0, 2]])
    assert cache.count_nonzero() == 2 * 18


def test_latent_attention_in_float8(device: torch.device) -> None:
    query, latent = torch.randn(3, 4, 24, device=device), torch.randn(3, 10, device=device)
    key_rope, slots = torch.randn(3, 8, device=device), torch.arange(3, device=device)
    _, keys = pe.functional.mla_rotary(query, key_rope, spec=MLA, layout="thd")
    cache = torch.zeros(1, 4, 18, device=device).to(FLOAT8)
    pe.functional.mla_rotary_cache_(query, latent, key_rope, cache, slots, spec=MLA, scale=0.1)
    assert torch.equal(cache[0, :3].view(torch.uint8), float8(torch.cat([latent, keys], -1), 0.1))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_latent_attention_in_batched_layouts(layout: Any, device: torch.device) -> None:
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    query, key_rope = torch.randn(2, 3, 4, 24, device=device), torch.randn(2, 3, 8, device=device)
    latent, slots = torch.randn(2, 3, 10, device=device), torch.arange(6, device=device).view(2, 3)
    expected = pe.functional.mla_rotary(query, key_rope, spec=MLA, offset=9)
    options: dict[str, Any] = {"spec": MLA, "layout": layout, "offset": 9}
    given = query.permute(order), key_rope.unsqueeze(2).permute(order)
    found = pe.functional.mla_rotary(*given, **options)
    assert torch.equal(found[0], expected[0].permute(order))
    assert torch.equal(found[1], expected[1].unsqueeze(2).permute(order))
    back = pe.functional.mla_rotary(*found, **options, inverse=True)
    for undone, before in zip(back, given, strict=True):
        assert torch.allclose(undone, before, atol=1e-6)
    cache = torch.zeros(2, 4, 18, device=device)
    latent_in_order = latent.unsqueeze(2).permute(order)
    pe.functional.mla_rotary_cache_(given[0], latent_in_order, given[1], cache, slots, **options)
    assert torch.equal(query, expected[0])
    assert torch.equal(cache.view(8, 18)[:6], torch.cat([latent, expected[1]], -1).view(6, 18))
    without_heads = key_rope.transpose(0, 1) if layout == "sbhd" else key_rope
    found = pe.functional.mla_rotary(given[0], without_heads, **options)[1]
    assert torch.equal(found, expected[1].transpose(0, 1) if layout == "sbhd" else expected[1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"latent": torch.zeros(3, 2, 10)}, "latent: expected heads 1, got 2"),
        ({"latent": torch.zeros(2, 10)}, "latent: expected seq 3, got 2"),
        ({"key_rope": torch.zeros(3, 6)}, "key_rope: expected rotary_dim 8, got 6"),
        ({"key_rope": torch.zeros(3, 24)}, "key_rope: expected rotary_dim 8, got 24"),
        ({"key_rope": torch.zeros(2, 8)}, "key_rope: expected seq 3, got 2"),
        ({"key_rope": torch.zeros(3, 8).requires_grad_()}, "key_rope: requires grad"),
        ({"query": torch.zeros(3, 4, 8)}, "query: expected head_dim 24, got 8"),
        ({"cache": torch.zeros(2, 4, 17)}, "cache: expected latent_dim . rotary_dim 18, got 17"),
        ({"cache": torch.zeros(1, 4, 18).expand(2, 4, 18)}, "cache: expected elements that do not"),
        ({"scale": 2.0}, "scale: expected 1 unless .*, got 2"),
        ({"cache": torch.zeros(2, 4, 1, 18)}, "cache: expected .pages, page_size"),
        ({"spec": pe.RotarySpec(24)}, "key_rope: expected rotary_dim 24, got 8"),
        ({"spec": dataclasses.replace(MLA, numerics="float32")}, "numerics: expected 'exact' for mla_rotary_cache_"),
    ],
)  # fmt: skip
def test_latent_attention_refuses(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {
        "query": torch.zeros(3, 4, 24),
        "latent": torch.zeros(3, 10),
        "key_rope": torch.zeros(3, 8),
        "cache": torch.zeros(2, 4, 18),
        "slot_mapping": torch.arange(3),
        "spec": MLA,
    }
    refused((lambda: pe.functional.mla_rotary_cache_(**{**given, **change}), ValueError, text))


@pytest.mark.parametrize(
    ("query", "key_rope", "text"),
    [
        (torch.zeros(3, 4, 24), torch.zeros(3, 24), "key_rope: expected rotary_dim 8, got 24"),
        (torch.zeros(3, 4, 24), torch.zeros(2, 8), "key_rope: expected seq 3, got 2"),
        (torch.zeros(3, 4, 8), torch.zeros(3, 8), "query: expected head_dim 24, got 8"),
    ],
)  # fmt: skip
def test_latent_rotation_refuses(query: Tensor, key_rope: Tensor, text: str) -> None:
    refused((lambda: pe.functional.mla_rotary(query, key_rope, spec=MLA, layout="thd"), ValueError, text))  # fmt: skip
