"""Tests conversion of weights to the other pairing: attention scores stay equal."""

import posembed as pe
import pytest
import torch
from support.case import assert_close
from support.refusals import refused
from torch import Tensor

HEAD_DIM, WIDTH, TOKENS = 16, 24, 9
WINDOWS = [{}, {"rotary_dim": 8}, {"rotary_dim": 6, "rotary_start": 10}]


def scores(query: Tensor, key: Tensor, spec: pe.RotarySpec) -> Tensor:
    """[tokens, heads * head_dim] each -> [heads, query, key], key heads shared by query heads."""
    q = query.view(1, TOKENS, -1, HEAD_DIM)
    k = key.view(1, TOKENS, -1, HEAD_DIM)
    q, k = pe.functional.rotary(q, k, spec=spec)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->hqk", q, k)


def specs(**window: int) -> tuple[pe.RotarySpec, pe.RotarySpec]:
    return (pe.RotarySpec(HEAD_DIM, **window), pe.RotarySpec(HEAD_DIM, interleaved=True, **window))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (6, 2), (4, 1)])
def test_projections_and_biases_with_grouped_queries(window: dict[str, int], query_heads: int, key_heads: int) -> None:
    torch.manual_seed(0)
    half, interleaved = specs(**window)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    results = []
    weights = {heads: torch.randn(heads * HEAD_DIM, WIDTH + 1).double() for heads in (query_heads, key_heads)}
    for spec in (half, interleaved):
        projected = []
        for heads in (query_heads, key_heads):
            weight, bias = weights[heads][:, :-1], weights[heads][:, -1]
            if spec.interleaved:
                weight = pe.permute_rotary_weight(weight, heads, to="interleaved", **window)
                bias = pe.permute_rotary_weight(bias, heads, to="interleaved", **window)
            projected.append(x @ weight.T + bias)
        results.append(scores(*projected, spec))
    assert_close(results[1], results[0], 1e-13)


def test_packed_projection_leaves_values() -> None:
    torch.manual_seed(1)
    query_heads, key_heads = 4, 2
    total = query_heads + 2 * key_heads
    half, interleaved = specs()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    weight = torch.randn(total * HEAD_DIM, WIDTH, dtype=torch.float64)
    permuted = pe.permute_rotary_weight(weight, total, to="interleaved", heads=range(query_heads + key_heads))
    sizes = [heads * HEAD_DIM for heads in (query_heads, key_heads, key_heads)]
    q, k, v = (x @ weight.T).split(sizes, -1)
    permuted_q, permuted_k, permuted_v = (x @ permuted.T).split(sizes, -1)
    assert torch.equal(permuted_v, v)
    assert_close(scores(permuted_q, permuted_k, interleaved), scores(q, k, half), 1e-13)


def test_query_and_key_norms() -> None:
    """A norm over a head has a weight per component, which moves with the component."""
    torch.manual_seed(2)
    half, interleaved = specs()
    x = torch.randn(TOKENS, 2 * HEAD_DIM, dtype=torch.float64)
    gain = torch.rand(HEAD_DIM, dtype=torch.float64)
    results = []
    for spec in (half, interleaved):
        weight = gain if spec is half else pe.permute_rotary_weight(gain, 1, to="interleaved")
        given = x if spec is half else pe.permute_rotary_weight(x.T, 2, to="interleaved").T
        normed = torch.nn.functional.rms_norm(given.reshape(TOKENS, 2, -1), [HEAD_DIM], weight)
        results.append(scores(normed.reshape(TOKENS, -1), normed.reshape(TOKENS, -1), spec))
    assert_close(results[1], results[0], 1e-13)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_there_and_back(window: dict[str, int]) -> None:
    weight = torch.randn(3 * HEAD_DIM, 5)
    there = pe.permute_rotary_weight(weight, 3, to="interleaved", **window)
    back = pe.permute_rotary_weight(there, 3, to="half_split", **window)
    assert not torch.equal(there, weight)
    assert torch.equal(back, weight)


@pytest.mark.parametrize(
    ("rows", "heads", "options", "message"),
    [
        (48, 5, {"to": "interleaved"}, "num_heads: expected a divisor"),
        (48, 3, {"to": "neox"}, "to: expected 'interleaved' or 'half_split'"),
        (48, 3, {"to": "interleaved", "rotary_dim": 7}, "rotary_dim: expected an even number"),
        (48, 3, {"to": "interleaved", "rotary_dim": 8, "rotary_start": 9}, "rotary_dim: expected"),
        (48, 3, {"to": "interleaved", "heads": [2, 0, 2]}, "heads: expected each once, got 2 again"),
        (48, 3, {"to": "interleaved", "heads": [3]}, "heads: expected 0 to 2, got 3"),
    ],
)  # fmt: skip
def test_refusals(rows: int, heads: int, options: dict, message: str) -> None:
    refused((lambda: pe.permute_rotary_weight(torch.zeros(rows, 2), heads, **options), ValueError, message))  # fmt: skip


# ------------------------------------------------------------------------------------- cached keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_keys_moved_by_a_shift(dtype: torch.dtype, device: torch.device) -> None:
    """Equals a new rotation, up to the rounding of the cache and one more."""
    torch.manual_seed(4)
    spec = pe.RotarySpec(64, base=500000.0, scaling=pe.YarnScaling(4.0, 4096))
    key = torch.randn(1, 12, 2, 64, dtype=torch.float64, device=device)
    old = torch.tensor([100_000 + i for i in range(11)] + [-1], device=device)
    new = torch.tensor([i * 3 for i in range(11)] + [5], device=device)
    cache = pe.functional.rotary(key, positions=old, spec=spec).to(dtype)
    pe.functional.rerotate_(cache, old, new, spec=spec)
    expected = pe.functional.rotary(key, positions=new, spec=spec)
    # float32 rotations err by 1.5e-7 in addition to rounding; here both steps are float64.
    assert_close(cache, expected, {torch.float64: 1e-12}.get(dtype, 2 * torch.finfo(dtype).eps))


def test_moved_keys_are_as_good_as_rotated_ones(device: torch.device) -> None:
    """float32 has at most the error of one float32 rotation; bfloat16 has two roundings."""
    torch.manual_seed(6)
    spec = pe.RotarySpec(128, base=500000.0)
    longer = pe.RotarySpec(128, base=500000.0, scaling=pe.Llama3Scaling(8, 1, 4, 8192))
    key = torch.randn(1, 64, 4, 128, dtype=torch.float64, device=device)
    old, new = torch.randint(0, 131072, (2, 64), device=device)
    truth = pe.functional.rotary(key, positions=new, spec=longer)

    def error(found: Tensor) -> float:
        return float((found.double() - truth).abs().max())

    rotated = pe.functional.rotary(key.float(), positions=new, spec=longer)
    moved = pe.functional.rotary(key, positions=old, spec=spec).float()
    pe.functional.rerotate_(moved, old, new, spec=spec, new_spec=longer)
    assert error(moved) <= error(rotated)

    # A cache in bfloat16 has been rounded once; moving it rounds once more, each by half a step of
    # 2^-8 relative to a pair's length.
    length = float(truth.unflatten(-1, (2, 64)).norm(dim=-2).max())
    cache = pe.functional.rotary(key, positions=old, spec=spec).bfloat16()
    pe.functional.rerotate_(cache, old, new, spec=spec, new_spec=longer)
    assert error(cache) <= 2 * 2**-8 * length
    assert error(cache) > error(truth.bfloat16())


def test_pages_of_a_float8_cache_are_moved(device: torch.device) -> None:
    """Rotations are linear, so the scale of the cache stays; what exceeds 448 of it saturates."""
    spec, scale = pe.RotarySpec(64), 0.02
    pages, old = torch.zeros(2, 5, 4, 2, 64, device=device), torch.arange(8, device=device) + 100
    key_cache, value_cache = pages.to(torch.float8_e4m3fn).unbind()
    key, slots = torch.randn(8, 2, 64, device=device), torch.arange(4, 12, device=device)
    pe.functional.rotary_cache_(key.clone(), key, key, key_cache, value_cache, slots, old, spec=spec, key_scale=scale)
    before = key_cache.float()
    places = torch.full((5, 4), -1, device=device)
    places[1:3] = old.view(2, 4)
    moved = torch.where(places < 0, -1, places - 93)
    pe.functional.rerotate_(key_cache, places, moved, spec=spec)
    back = pe.functional.rotary(before.double(), positions=places, spec=spec, inverse=True)
    wanted = pe.functional.rotary(back, positions=moved, spec=spec)
    assert torch.equal(key_cache.float(), wanted.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(key_cache[3].float(), before[3])
    largest = torch.full((1, 1, 1, 64), 448.0, device=device).to(torch.float8_e4m3fn)
    pe.functional.rerotate_(largest, old[:1], old[:1] + 40, spec=spec)
    assert largest.float().abs().max() == 448
    refused((lambda: pe.functional.rerotate_(largest.float().to(torch.float8_e5m2), old[:1], old[:1], spec=spec), TypeError, "key: expected .* or float8_e4m3fn, got Float8_e5m2"))  # fmt: skip


def test_moving_back_and_forth_leaves_padding_alone(device: torch.device) -> None:
    spec = pe.RotarySpec(64)
    places = torch.tensor([-1, 3, 4], device=device)
    keys = torch.randn(1, 3, 2, 64, device=device)
    moved = keys.clone()
    pe.functional.rerotate_(moved, places, torch.tensor([-1, 70_003, 4], device=device), spec=spec)
    assert torch.equal(moved[:, 0], keys[:, 0])
    assert not torch.allclose(moved[:, 1], keys[:, 1], atol=1e-2)
    assert_close(moved[:, 2], keys[:, 2].double(), 2e-7)


def test_moving_refuses_what_needs_a_history() -> None:
    keys, places = torch.randn(1, 3, 2, 64, requires_grad=True), torch.arange(3)
    refused(
        (lambda: pe.functional.rerotate_(keys, places, places, spec=pe.RotarySpec(64)), ValueError, "key: requires grad"),
        (lambda: pe.functional.rerotate_(keys.int(), places, places, spec=pe.RotarySpec(64)), TypeError, "key: expected float32"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["old_positions", "new_positions"])
def test_moving_names_what_is_on_another_device(name: str) -> None:
    keys, spec = torch.randn(1, 3, 2, 64), pe.RotarySpec(64)
    given = {"old_positions": torch.arange(3), "new_positions": torch.arange(3)}
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: expected the device of key, cpu, got meta"):
        pe.functional.rerotate_(keys, **given, spec=spec)


def test_keys_moved_by_a_compiled_program() -> None:
    spec = pe.RotarySpec(64)
    keys, old, new = torch.randn(1, 5, 3, 64), torch.arange(5), torch.arange(5) + 11
    moved = keys.clone()
    torch.compile(pe.functional.rerotate_, fullgraph=True, backend="aot_eager")(moved, old, new, spec=spec)
    pe.functional.rerotate_(keys, old, new, spec=spec)
    assert torch.equal(moved, keys)


def test_keys_moved_to_another_specification(device: torch.device) -> None:
    torch.manual_seed(5)
    factors = [1.0 + i / 8 for i in range(16)]
    dynamic = pe.RotarySpec(32, scaling=pe.LongRopeScaling([1.0] * 16, factors, 64, factor=4.0))
    short, long = dynamic.resolve(64), dynamic.resolve(65)
    key = torch.randn(1, 8, 2, 32, dtype=torch.float64, device=device)
    places = torch.arange(56, 64, device=device)
    cache = pe.functional.rotary(key, positions=places, spec=short)
    pe.RotaryEmbedding(dynamic).rerotate_(cache, places, places, seq_len=64, new_spec=long)
    assert_close(cache, pe.functional.rotary(key, positions=places, spec=long), 1e-13)
