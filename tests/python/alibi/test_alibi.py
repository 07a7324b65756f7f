"""ALiBi beyond what all operators are tested for."""

from __future__ import annotations

import copy
import math
import pickle

import posembed as pe
import pytest
import torch
import torch._dynamo
from support.alibi import add, bias
from support.case import FLOATING, TOLERANCE, assert_close
from torch.nn.attention.flex_attention import flex_attention


def paper_slopes(heads: int) -> list[float]:
    """As the paper's own code makes them."""

    def power_of_two(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    below = 2 ** math.floor(math.log2(heads))
    return power_of_two(below) + paper_slopes(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 25, 32, 71, 112])
def test_press_slopes_are_the_papers(heads: int, device: torch.device) -> None:
    slopes = pe.ALiBi(heads, device=device).slopes
    assert slopes.dtype == torch.float32
    assert slopes.device.type == device.type
    assert_close(slopes, torch.tensor(paper_slopes(heads), dtype=torch.float64), 6e-8)


def test_geometric_slopes() -> None:
    expected = 2.0 ** (-4.0 * torch.arange(1, 13, dtype=torch.float64) / 12)
    slopes = pe.functional.alibi_slopes(12, kind="geometric", max_bias=4.0)
    assert torch.equal(slopes, expected.float())


def test_shards_have_the_slopes_of_the_whole_model() -> None:
    whole = pe.ALiBi(12)
    shards = [pe.ALiBi(4, total_heads=12, head_start=start) for start in (0, 4, 8)]
    assert torch.equal(torch.cat([shard.slopes for shard in shards]), whole.slopes)
    given = torch.rand(2, 12)
    part = pe.ALiBi(5, slopes=given, total_heads=12, head_start=3)
    assert torch.equal(part.slopes, given[:, 3:8])


@pytest.mark.parametrize("dtype", FLOATING)
def test_bias_is_relative_and_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """Neighbours of a query a million keys in: slope * key position would have lost everything."""
    alibi = pe.ALiBi(8, device=device, dtype=dtype)
    found = alibi(3, 7, query_offset=4)
    assert found.dtype == dtype
    assert_close(found, bias(alibi.slopes.double(), 3, 7, query_offset=4), TOLERANCE[dtype])
    far = alibi(1, 1_000_001)[:, :, -5:]
    assert torch.equal(far, alibi(1, 5))


def test_ends_are_aligned_by_default(device: torch.device) -> None:
    alibi = pe.ALiBi(4, device=device)
    whole = alibi(9)
    assert torch.equal(alibi(2, 9), whole[:, -2:])
    assert torch.equal(alibi(1, 9), whole[:, -1:])
    assert torch.equal(alibi(4, 6, query_offset=2), whole[:, 2:6, :6])


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("causal", [True, False])
def test_add_in_place(dtype: torch.dtype, causal: bool, device: torch.device) -> None:
    alibi = pe.ALiBi(4, causal=causal, slopes=torch.rand(2, 4), device=device)
    scores = torch.randn(2, 4, 3, 5, dtype=dtype, device=device)
    expected = add(scores.double(), alibi.slopes.double(), causal=causal)
    alibi.add_(scores)
    assert_close(scores, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [True, False])
def test_add_in_place_to_a_view(causal: bool, device: torch.device) -> None:
    memory = torch.randn(3, 2, 4, 8, device=device)
    scores, kept = memory.transpose(0, 1)[..., 1:6], memory.clone()
    expected = add(scores.double(), pe.ALiBi(3).slopes.double().to(device), causal=causal)
    pe.ALiBi(3, causal=causal, device=device).add_(scores)
    assert_close(scores, expected, TOLERANCE[torch.float32])
    assert torch.equal(memory[..., 0], kept[..., 0])
    assert torch.equal(memory[..., 6:], kept[..., 6:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sides", [(), (2,)])
def test_flex_attention_makes_the_same_bias(causal: bool, sides: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    alibi = pe.ALiBi(4, slopes=torch.rand(*sides, 4), causal=causal)
    query, key, value = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    query = query[:, :, 2:]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, alibi(4, 6, dtype=torch.float64)
    )
    found = flex_attention(query, key, value, score_mod=alibi.score_mod(query_offset=2))
    assert_close(found, expected, 4e-7)  # slope * distance is a float32 product there


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention(key_heads: int, device: torch.device) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 3, 8, device=device)
    key, value = torch.randn(2, 2, key_heads, 6, 8, device=device)
    alibi = pe.ALiBi(4, device=device)
    repeated = [x.double().repeat_interleave(4 // key_heads, 1) for x in (key, value)]
    scores = query.double() @ repeated[0].transpose(-1, -2) / math.sqrt(8)
    weights = (scores + alibi(3, 6, dtype=torch.float64)).softmax(-1)
    assert_close(alibi.attention(query, key, value), weights @ repeated[1], 1e-5)


def test_learned_slopes_train(device: torch.device) -> None:
    """Slopes find those that made the target."""
    target = pe.ALiBi(4, causal=False, slopes=torch.tensor([0.9, 0.5, 0.2, 0.05]), device=device)(8)
    alibi = pe.ALiBi(4, causal=False, learned=True, device=device)
    assert list(alibi.state_dict()) == ["slopes"]
    optimizer = torch.optim.SGD(alibi.parameters(), lr=0.02)
    for _ in range(50):
        optimizer.zero_grad()
        loss = (alibi(8) - target).square().mean((1, 2)).sum()
        loss.backward()
        optimizer.step()
    assert_close(alibi.slopes, torch.tensor([0.9, 0.5, 0.2, 0.05]), 1e-4)


def test_slope_gradients_are_the_same_for_any_thread_count() -> None:
    torch.manual_seed(0)
    slopes = torch.rand(5, requires_grad=True)
    weight = torch.randn(5, 200, 300)
    gradients = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            result = pe.functional.alibi_bias(slopes, 200, 300, causal=False)
            gradients += torch.autograd.grad((result * weight).sum(), slopes)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_module_compiles_for_every_length() -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    alibi = pe.ALiBi(4, causal=False, learned=True)

    @torch.compile(backend=graphs, fullgraph=True, dynamic=True)
    def biased(scores: torch.Tensor) -> torch.Tensor:
        return scores + alibi(scores.shape[-2], scores.shape[-1])

    for queries, keys in ((11, 13), (17, 23), (5, 29)):
        scores = torch.randn(2, 4, queries, keys)
        found = biased(scores)
        assert torch.equal(found, scores + alibi(queries, keys))
        found.sum().backward()
    assert graphs.frame_count == 1


def test_module_without_state_compiles() -> None:
    alibi = pe.ALiBi(4)
    query, key, value = torch.randn(3, 1, 4, 6, 8)
    compiled = torch.compile(alibi.attention, backend="aot_eager", fullgraph=True)
    assert_close(compiled(query, key, value), alibi.attention(query, key, value), 1e-6)


def test_module_holds_nothing_that_can_rot() -> None:
    alibi = pe.ALiBi(12, max_bias=6.0)
    expected = alibi.slopes
    for changed in (
        copy.deepcopy(alibi).bfloat16(),
        copy.deepcopy(alibi).half(),
        pickle.loads(pickle.dumps(alibi)),
        copy.deepcopy(alibi).to("meta").to_empty(device="cpu"),
    ):
        assert changed.state_dict() == {}
        assert torch.equal(changed.slopes, expected)
    assert pe.ALiBi(12).bfloat16()(4).dtype == torch.bfloat16
    assert pe.ALiBi(12, device="meta")(4).device.type == "meta"


def test_learned_slopes_survive_copies() -> None:
    alibi = pe.ALiBi(4, learned=True, dtype=torch.float64)
    with torch.no_grad():
        alibi.slopes.mul_(3)
    other = pe.ALiBi(4, learned=True, dtype=torch.float64)
    other.load_state_dict(alibi.state_dict())
    for changed in (copy.deepcopy(alibi), pickle.loads(pickle.dumps(alibi)), other):
        assert torch.equal(changed(5, 7), alibi(5, 7))
        assert changed.slopes.requires_grad
    halved = {"slopes": alibi.slopes / 2}
    assert torch.equal(torch.func.functional_call(alibi, halved, (5,)), alibi(5) / 2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: pe.ALiBi(0), ValueError, "num_heads: expected a positive number, got 0"),
        (lambda s: pe.ALiBi(-3), ValueError, "num_heads: expected a positive number, got -3"),
        (lambda s: pe.ALiBi(4, total_heads=3), ValueError, "head_start: expected heads within total_heads, 3, got head_start 0 and num_heads 4"),
        (lambda s: pe.ALiBi(4, total_heads=6, head_start=3), ValueError, "head_start: expected heads within total_heads, 6, got head_start 3"),
        (lambda s: pe.ALiBi(4, head_start=-1), ValueError, "head_start: expected heads within"),
        (lambda s: pe.ALiBi(4, max_bias=0), ValueError, "max_bias: expected a positive number, got 0"),
        (lambda s: pe.ALiBi(4, slopes="linear"), ValueError, "slopes: expected 'press', 'geometric' or a tensor, got 'linear'"),
        (lambda s: pe.ALiBi(4, slopes=torch.rand(3)), ValueError, r"slopes: expected \[4\] or \[2, 4\], got \[3\]"),
        (lambda s: pe.functional.alibi_slopes(4, values=[1.0]), ValueError, "values: expected none, or one or two for each of total_heads 4, got 1"),
        (lambda s: pe.ALiBi(4)(-1), ValueError, "query_length: expected 0 or more, got -1"),
        (lambda s: pe.ALiBi(4)(3, 2**31), ValueError, "key_length: expected up to 2147483647"),
        (lambda s: pe.ALiBi(4)(3, 3, query_offset=2**31 - 3), ValueError, "query_offset: expected distances between queries and keys up to 2147483647"),
        (lambda s: pe.ALiBi(4)(3, dtype=torch.int32), TypeError, "dtype: expected float32, float64, bfloat16 or float16, got Int"),
        (lambda s: pe.ALiBi(4).add_(s), ValueError, "slopes: expected heads 2, got 4"),
        (lambda s: pe.ALiBi(2).add_(s[0, 0]), ValueError, r"scores: expected \[batch, heads, query_length, key_length\] or .* got \[3, 5\]"),
        (lambda s: pe.ALiBi(2).add_(s.int()), TypeError, "scores: expected float32, float64, bfloat16 or float16, got Int"),
        (lambda s: pe.ALiBi(2).add_(s.transpose(-1, -2)), ValueError, "scores: expected a contiguous last dimension"),
        (lambda s: pe.ALiBi(2).add_(s[:, :1].expand(-1, 2, -1, -1)), ValueError, "scores: expected elements that do not share memory"),
        (lambda s: pe.functional.alibi_add(s, torch.rand(1, 2)), ValueError, r"slopes: expected \[heads\] or \[2, heads\], got \[1, 2\]"),
        (lambda s: pe.functional.alibi_add(s, torch.rand(2, device="meta")), ValueError, "slopes: expected the device of scores, cpu, got meta"),
        (lambda s: pe.ALiBi(2, learned=True).add_(s), ValueError, "slopes: requires grad"),
    ],
)  # fmt: skip
def test_errors(call, error, text) -> None:
    scores = torch.randn(2, 2, 3, 5)
    before = scores.clone()
    with pytest.raises(error, match=text):
        call(scores)
    assert torch.equal(scores, before)


def test_attention_compiles_for_every_length() -> None:
    torch._dynamo.reset()
    module = pe.ALiBi(4)
    compiled = torch.compile(
        lambda q: module.attention(q, q, q), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (5, 9):
        query = torch.randn(2, 4, length, 8)
        assert_close(compiled(query), module.attention(query, query, query), 1e-6)


def test_learned_slopes_start_anew_after_meta() -> None:
    module = pe.ALiBi(4, learned=True, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    assert torch.equal(module.slopes, pe.ALiBi(4).slopes)


def test_slopes_may_be_a_list() -> None:
    assert torch.equal(pe.ALiBi(2, slopes=[0.5, 0.25]).slopes, torch.tensor([0.5, 0.25]))
    with pytest.raises(ValueError, match="slopes: expected 'press', 'geometric' or a tensor"):
        pe.ALiBi(2, slopes="steep")
