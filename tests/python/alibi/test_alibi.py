"""Tests of ALiBi beyond the shared tests of operators."""

from typing import Any

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.alibi import bias, mask_of, paper_slopes, softmax
from support.case import FLOATING, TOLERANCE, assert_close
from support.halves import AT_ONCE
from support.refusals import refused
from torch.nn.attention.flex_attention import flex_attention


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 25, 32, 71, 112])
def test_the_slopes_are_the_papers(heads: int, device: torch.device) -> None:
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
    part = pe.ALiBi(5, slopes=given, causal=False, total_heads=12, head_start=3)
    assert torch.equal(part.slopes, given[:, 3:8])


@pytest.mark.parametrize(("start", "own"), [(0, 9), (54, 9), (63, 3)])
def test_the_last_shard_is_padded(start: int, own: int) -> None:
    """66 heads as 8 x 9; padding has no bias, so its heads attend to all keys alike."""
    given = torch.rand(2, 66)
    for slopes, whole in (("paper", pe.ALiBi(66).slopes), (given, given)):
        shard = pe.ALiBi(9, slopes=slopes, causal=False, total_heads=66, head_start=start)
        expected = torch.nn.functional.pad(whole[..., start : start + own], (0, 9 - own))
        assert torch.equal(shard.slopes, expected)
    scores = torch.randn(1, 9, 4, 4)
    weights = pe.ALiBi(9, total_heads=66, head_start=start).softmax(scores)
    hidden = torch.ones(4, 4).triu(1).bool()
    plain = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    assert_close(weights[:, own:], plain[:, own:], 1e-6)


@pytest.mark.parametrize("dtype", FLOATING)
def test_bias_is_relative_and_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """Near a query at position one million, slope * key position would lose all precision."""
    alibi = pe.ALiBi(8, device=device, dtype=dtype)
    found = alibi(3, 7, query_offset=4)
    assert found.dtype == dtype
    assert_close(found, bias(alibi.slopes.double(), 3, 7, query_offset=4), TOLERANCE[dtype])
    far = alibi(1, 1_000_001)[:, :, -5:]
    assert torch.equal(far, alibi(1, 5))


@pytest.mark.parametrize("dtype", FLOATING)
def test_bias_into_existing_memory(dtype: torch.dtype, device: torch.device) -> None:
    """With and without a batch, in memory of any strides."""
    alibi = pe.ALiBi(3, device=device)
    memory = torch.full((3, 4, 9), 7.0, device=device, dtype=dtype)
    out = memory[..., 1:8]
    assert alibi(4, 7, out=out) is out
    assert torch.equal(out, alibi(4, 7, dtype=dtype))
    assert torch.equal(memory[..., 0], torch.full_like(memory[..., 0], 7.0))
    mask = mask_of(2, 7, device=device)
    batched = torch.empty(3, 2, 4, 7, device=device, dtype=dtype).transpose(0, 1)
    alibi(4, 7, out=batched, attention_mask=mask)
    assert torch.equal(batched, alibi(4, 7, dtype=dtype, attention_mask=mask))


def test_ends_are_aligned_by_default(device: torch.device) -> None:
    alibi = pe.ALiBi(4, device=device)
    whole = alibi(9)
    assert torch.equal(alibi(2, 9), whole[:, -2:])
    assert torch.equal(alibi(1, 9), whole[:, -1:])
    assert torch.equal(alibi(4, 6, query_offset=2), whole[:, 2:6, :6])


@pytest.mark.parametrize(("causal", "sides"), [(True, ()), (False, ()), (False, (2,))])
def test_flex_attention_makes_the_same_bias(causal: bool, sides: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    alibi = pe.ALiBi(4, slopes=torch.rand(*sides, 4), causal=causal)
    query, key, value = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    query = query[:, :, 2:]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, alibi(4, 6, dtype=torch.float64))
    found = flex_attention(query, key, value, score_mod=alibi.score_mod(query_offset=2))
    assert_close(found, expected, 4e-7)  # SDPA's slope * distance is a float32 product


def check_attention(key_heads: int, queries: int, head_dim: int, options, device) -> None:
    torch.manual_seed(0)
    if "slopes" in options:
        options = {**options, "slopes": torch.rand(2, 4)}
    query = torch.randn(2, 4, queries, head_dim, device=device)
    key, value = torch.randn(2, 2, key_heads, 6, head_dim, device=device)
    alibi = pe.ALiBi(4, device=device, **options)
    repeated = [x.double().repeat_interleave(4 // key_heads, 1) for x in (key, value)]
    scores = query.double() @ repeated[0].transpose(-1, -2)
    for scale in (None, 0.3):
        exact = scores * (head_dim**-0.5 if scale is None else scale) + alibi(queries, 6, dtype=torch.float64)
        found = alibi.attention(query, key, value, scale=scale)
        assert_close(found, exact.softmax(-1) @ repeated[1], 1e-5)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("queries", [3, 1])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"slopes": "two", "causal": False}])
def test_attention(key_heads: int, queries: int, options, device: torch.device) -> None:
    check_attention(key_heads, queries, 8, options, device)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("options", [{}, {"slopes": "two", "causal": False}])
def test_attention_by_flex_attention(key_heads: int, options) -> None:
    query = torch.empty(1, 4, 3, 64, device="cuda")
    assert pe.ALiBi(4, device="cuda").attention_backend(query, query) == "flex"
    check_attention(key_heads, 3, 64, options, "cuda")


@pytest.mark.parametrize("module", [pe.ALiBi, pe.cpp.ALiBi])
def test_attention_of_an_empty_batch(module: Any) -> None:
    query, key = torch.zeros(0, 4, 3, 8), torch.zeros(0, 2, 5, 8)
    assert module(4).attention(query, key, key).shape == (0, 4, 3, 8)


def test_attention_says_how_it_computes() -> None:
    query, key = torch.randn(2, 1, 4, 3, 8)
    assert pe.ALiBi(4).attention_backend(query, key) == "fused"
    mask = torch.ones(1, 3)
    assert pe.ALiBi(4).attention_backend(query, key, attention_mask=mask) == "fused"
    refused(
        (lambda: pe.ALiBi(4).attention(query, key, key, backend="x"), ValueError, "backend: expected 'flash', 'flex' or 'fused', got 'x'"),
        (lambda: pe.ALiBi(4).attention(query, key[:, :3], key[:, :3]), ValueError, "key: expected heads that divide those of query, 4, got 3"),
    )  # fmt: skip


def test_attention_drops_weights() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, 50, 8)
    value = torch.ones(1, 4, 50, 8)
    found = pe.ALiBi(4).attention(query, key, value, dropout=0.5)
    assert not torch.equal(found, torch.ones_like(found))
    assert abs(float(found.mean()) - 1) < 0.2
    assert torch.equal(pe.ALiBi(4).attention(query, key, value, dropout=1.0), torch.zeros(1, 4, 50, 8))


@pytest.mark.parametrize("module", [pe.ALiBi, pe.cpp.ALiBi])
@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (ValueError, r"query: expected \[batch, num_heads, seq, head_dim\], got \[4, 3, 8\]", lambda q, k, v: (q[0], k, v)),
        (ValueError, r"key: expected \[batch, heads, keys, head_dim\], got \[2, 5, 8\]", lambda q, k, v: (q, k[0], v)),
        (ValueError, r"value: expected \[batch, heads, keys, value_dim\], got \[2, 5, 6\]", lambda q, k, v: (q, k, v[0])),
        (TypeError, "key: expected the dtype of query, .*, got .*", lambda q, k, v: (q, k.half(), v)),
        (TypeError, "value: expected the dtype of query, .*, got .*", lambda q, k, v: (q, k, v.half())),
        (ValueError, "key: expected batch 2, got 1", lambda q, k, v: (q, k[:1], v)),
        (ValueError, "key: expected head_dim 8, got 4", lambda q, k, v: (q, k[..., :4], v)),
        (ValueError, "value: expected batch 2, got 1", lambda q, k, v: (q, k, v[:1])),
        (ValueError, "value: expected heads 2, got 1", lambda q, k, v: (q, k, v[:, :1])),
        (ValueError, "value: expected keys 5, got 1", lambda q, k, v: (q, k, v[:, :, :1])),
        (ValueError, "key: expected heads that divide those of query, 4, got 0", lambda q, k, v: (q, k[:, :0], v[:, :0])),
        (ValueError, "dropout: expected 0 to 1, got 2", lambda q, k, v: (q, k, v, 2)),
        (ValueError, "query: expected [batch, heads, seq, head_dim] with 4 heads, got [2, 2, 3, 8]", lambda q, k, v: (q[:, :2], k, v)),
    ],
)  # fmt: skip
def test_attention_refuses(module: Any, error: type[Exception], text: str, change: Any) -> None:
    """Arguments that matrix products would accept, or refuse without naming them."""
    given = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
    query, key, value, *dropout = change(*given)
    refused((lambda: module(4).attention(query, key, value, dropout=dropout[0] if dropout else 0.0), error, text))  # fmt: skip


def test_attention_under_autocast_takes_other_dtypes() -> None:
    query, key, value = torch.randn(3, 1, 4, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pe.ALiBi(4).attention(query.bfloat16(), key, value)
    assert found.dtype == torch.bfloat16
    assert_close(found, pe.ALiBi(4).attention(query, key, value), 2e-2)


def test_attention_inside_function_transforms() -> None:
    """Scores are not overwritten where one cannot see whether they require grad."""
    alibi = pe.ALiBi(2)
    given = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64)

    def attention(query: torch.Tensor) -> torch.Tensor:
        return alibi.attention(query, query, query)

    def reference(query: torch.Tensor) -> torch.Tensor:
        bias = alibi(4, dtype=torch.float64)
        scores = query @ query.mT / 8**0.5 + bias
        return scores.softmax(-1) @ query

    def grad(function):
        mapped = torch.func.vmap(function)
        return torch.func.grad(lambda query: mapped(query).square().sum())(given)

    assert_close(torch.func.vmap(attention)(given), torch.func.vmap(reference)(given), 1e-13)
    leaf = given.clone().requires_grad_()
    assert_close(torch.func.vmap(attention)(leaf).detach(), torch.func.vmap(reference)(given), 1e-13)
    assert_close(grad(attention), grad(reference), 1e-13)
    tangents = [torch.func.jvp(f, (given[0],), (given[1],))[1] for f in (attention, reference)]
    assert_close(*tangents, 1e-13)


def test_slopes_follow_a_model_out_of_meta() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), pe.ALiBi(2))
    scores = torch.zeros(1, 2, 3, 3)
    expected = pe.ALiBi(2).softmax(scores)
    assert torch.equal(model[1].softmax(scores), expected)
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict(), assign=True)
    assert torch.equal(model[1].softmax(scores), expected)
    assert model[1](3).device.type == "cpu"


def test_slopes_follow_the_data_of_a_replica() -> None:
    """DataParallel's replicas share everything except parameters and buffers."""
    model = torch.nn.Sequential(pe.ALiBi(8))
    ours, other = (replica[0] for replica in torch.nn.parallel.replicate(model, [0, 1]))
    scores = torch.randn(1, 8, 2, 3)
    assert torch.equal(ours.softmax(scores), model[0].softmax(scores))
    assert other.softmax(scores.to("meta")).is_meta
    other.add_(scores.to("meta"))
    query = torch.empty(1, 8, 2, 4, device="meta")
    assert other.attention(query, query, query).is_meta
    refused((lambda: model[0].softmax(scores.to("meta")), ValueError, "slopes: expected the device of scores"))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_data_parallel() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alibi = pe.ALiBi(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alibi.softmax(x) + self.alibi(x.shape[-2], x.shape[-1]).exp()

    model, x = Model().cuda(), torch.randn(4, 8, 3, 3, device="cuda")
    assert torch.equal(torch.nn.DataParallel(model, [0, 1])(x), model(x))


def test_attention_trains_learned_slopes(device: torch.device) -> None:
    torch.manual_seed(0)
    alibi = pe.ALiBi(4, learned=True, device=device)
    query, key, value = torch.randn(3, 2, 4, 5, 8, device=device, requires_grad=True)
    alibi.attention(query, key, value).square().sum().backward()
    slopes = alibi.slopes.detach().double().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    weights = softmax(exact[0] @ exact[1].mT, slopes, scale=8**-0.5)
    expected = torch.autograd.grad((weights @ exact[2]).square().sum(), slopes)[0]
    assert_close(alibi.slopes.grad, expected, 1e-5)


def test_softmax_of_a_row_without_keys_is_zero(device: torch.device) -> None:
    scores = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    weights = pe.ALiBi(2, device=device).softmax(scores, query_offset=-2)
    assert torch.equal(weights[:, :, :2], torch.zeros(1, 2, 2, 4, device=device))
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()


def test_documents_are_packed_sequences(device: torch.device) -> None:
    """Each document attends as if it were alone."""
    torch.manual_seed(0)
    alibi = pe.ALiBi(4, device=device)
    query, key, value = torch.randn(3, 1, 4, 12, 8, device=device)
    boundaries = torch.tensor([0, 5, 6, 12], device=device, dtype=torch.int32)
    packed = alibi.attention(query, key, value, cu_seqlens=boundaries)
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        alone = alibi.attention(*(x[:, :, begin:end] for x in (query, key, value)))
        assert_close(packed[:, :, begin:end], alone, 1e-6)


def test_left_padding_changes_nothing(device: torch.device) -> None:
    torch.manual_seed(0)
    alibi = pe.ALiBi(4, device=device)
    query, key, value = torch.randn(3, 1, 4, 6, 8, device=device)
    alone = alibi.attention(query, key, value)
    padded = [torch.cat([torch.full_like(x[:, :, :3], 7.0), x], 2) for x in (query, key, value)]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]], device=device)
    assert_close(alibi.attention(*padded, attention_mask=mask)[:, :, 3:], alone, 1e-6)
    last = alibi.attention(padded[0][:, :, -1:], *padded[1:], attention_mask=mask)
    assert_close(last, alone[:, :, -1:], 1e-6)


def numbered(mask: torch.Tensor, queries: int, first: int) -> dict[str, torch.Tensor]:
    """The positions that modules take from a mask."""
    positions = pe.functional.alibi_positions(mask)
    return {"query_positions": positions[:, first : first + queries], "key_positions": positions}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("offset", [None, 1])
def test_positions_from_a_mask(offset: int | None, inference: bool, device: torch.device) -> None:
    """Without autograd, kernels take positions from the mask themselves."""
    alibi = pe.ALiBi(2, device=device)
    scores = torch.randn(2, 2, 3, 7, device=device)
    mask = mask_of(2, 7, device=device)
    positions = numbered(mask, 3, 4 if offset is None else offset)
    given = {"attention_mask": mask, "query_offset": offset}
    with torch.inference_mode(inference):
        found = alibi.softmax(scores, **given)
        same = pe.functional.alibi_softmax(scores, alibi.slopes, positions_from_mask=True, **given)
        expected = alibi.softmax(scores, attention_mask=mask, **positions)
        biases = alibi(3, 7, **given), alibi(3, 7, attention_mask=mask, **positions)
        out = alibi(3, 7, out=torch.empty_like(biases[0]), **given)
        alibi.softmax_(scores, **given)
    assert torch.equal(found, expected)
    assert torch.equal(same, expected)
    assert torch.equal(scores, expected)
    assert torch.equal(biases[0], biases[1])
    assert torch.equal(out, biases[1])


@pytest.mark.parametrize("offset", [-2, 1, 5, 9])
def test_a_number_means_what_a_tensor_means_beside_a_mask(offset: int, device: torch.device) -> None:
    """Some or all of the queries are not among the keys of the mask."""
    alibi, mask = pe.ALiBi(2, device=device), mask_of(2, 7, device=device)
    scores = torch.randn(2, 2, 3, 7, device=device, requires_grad=True)
    number = alibi.softmax(scores, attention_mask=mask, query_offset=offset)
    offsets = torch.tensor([offset, offset], device=device)
    assert torch.equal(number, alibi.softmax(scores, attention_mask=mask, query_offset=offsets))
    one_mask = {"attention_mask": mask[0], "query_offset": offset}
    both = {"attention_mask": mask[:1], "query_offset": offsets}
    assert torch.equal(alibi.softmax(scores, **one_mask), alibi.softmax(scores, **both))


def test_documents_go_by_the_offset_beside_a_mask(device: torch.device) -> None:
    """The first document's queries see its keys, also if the last query is not at the last key."""
    alibi = pe.ALiBi(2, device=device)
    scores, mask = torch.randn(1, 2, 3, 6, device=device), torch.ones(1, 6, device=device).bool()
    options = {"query_offset": 0, "cu_seqlens": torch.tensor([0, 3, 6], device=device)}
    assert torch.equal(alibi.softmax(scores, attention_mask=mask, **options), alibi.softmax(scores, **options))


@pytest.mark.parametrize("dtype", FLOATING)
def test_slopes_may_be_any_nan(dtype: torch.dtype, device: torch.device) -> None:
    """CUDA's own NaN has a payload that rounding to bfloat16 must not carry into the sign."""
    slopes = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32, device=device).view(torch.float32)
    scores = torch.zeros(2, 3, 70, dtype=dtype, device=device)
    assert pe.functional.alibi_add(scores, slopes, causal=False)[..., 3:].isnan().all()
    bias = pe.functional.alibi_bias(slopes, 3, 70, causal=False, dtype=dtype)
    assert bias[..., :-3].isnan().all()


@pytest.mark.parametrize("form", ["distance", "key"])
def test_blocks_merge_by_corrected_log_sum_exps(form: str) -> None:
    """Compares merged blocks of keys, computed with local indices, with the whole."""
    torch.manual_seed(0)
    heads, length, size = 3, 12, 4
    alibi = pe.ALiBi(heads, slopes=torch.rand(heads))
    slopes = alibi.slopes.double()
    scores = torch.randn(heads, length, length, dtype=torch.float64)
    value = torch.randn(heads, length, 5, dtype=torch.float64)
    whole = softmax(scores, alibi.slopes.double()) @ value
    index = torch.arange(size, dtype=torch.float64)
    local = index[None] - index[:, None] if form == "distance" else index[None].expand(size, -1)
    for query in range(0, length, size):
        outputs, sums = [], []
        for key in range(0, length, size):
            block = scores[:, query : query + size, key : key + size] + slopes[:, None, None] * local
            if key == query:
                block = block.masked_fill(index[None] > index[:, None], -torch.inf)
            correction = alibi.lse_correction(size, query_start=query, key_start=key, form=form)
            sums.append(block.logsumexp(-1) + correction)
            outputs.append(block.softmax(-1) @ value[:, key : key + size])
        shares = torch.stack(sums).softmax(0).unsqueeze(-1)
        merged = (shares * torch.stack(outputs)).sum(0)
        assert_close(merged, whole[:, query : query + size], 2e-6)  # the correction is float32


def test_flash_attention_takes_positive_float32_slopes(device: torch.device) -> None:
    alibi = pe.ALiBi(12, device=device, dtype=torch.bfloat16, learned=True)
    slopes = alibi.alibi_slopes()
    assert (slopes.dtype, slopes.shape, slopes.device.type) == (torch.float32, (12,), device.type)
    assert not slopes.requires_grad
    assert (slopes > 0).all()
    assert torch.equal(alibi.alibi_slopes(batch_size=3), slopes.expand(3, 12))
    refused((pe.ALiBi(4, slopes=torch.rand(2, 4), causal=False).alibi_slopes, ValueError, "one slope for each head, got [2, 4]"))  # fmt: skip


def test_slopes_are_made_once(device: torch.device) -> None:
    """A call launches one kernel, because slopes exist already; users get copies of them."""
    alibi = pe.ALiBi(4).to(device)
    expected = alibi(3)
    alibi.slopes.zero_()
    alibi.alibi_slopes().zero_()
    assert torch.equal(alibi(3), expected)
    with torch.profiler.profile() as profile:
        alibi.softmax_(torch.randn(1, 4, 1, 64, device=device))
    names = [event.key for event in profile.key_averages()]
    assert "posembed::alibi_softmax_" in names
    assert "posembed::alibi_slopes" not in names


def test_slopes_divided_for_longer_sequences() -> None:
    alibi = pe.ALiBi(4, train_length=8)
    assert torch.equal(alibi(8), pe.ALiBi(4)(8))
    halved = pe.ALiBi(4, factor=2.0)
    assert torch.equal(alibi(16), halved(16))
    assert torch.equal(alibi.alibi_slopes(key_length=16), halved.slopes)
    refused(
        (alibi.alibi_slopes, ValueError, "key_length: expected a number with train_length"),
        (alibi.score_mod, ValueError, "key_length: expected a number with train_length"),
    )


def test_gradients_of_scaled_slopes() -> None:
    slopes = torch.rand(3, requires_grad=True)
    assert pe.functional.alibi_scaled_slopes(slopes, 8, 8) is slopes
    found = pe.functional.alibi_scaled_slopes(slopes, 16, 8)
    assert torch.equal(found, slopes / 2)
    assert torch.equal(torch.autograd.grad(found.sum(), slopes)[0], torch.full((3,), 0.5))
    each = torch.func.vmap(lambda row: pe.functional.alibi_scaled_slopes(row, 16, 8))
    assert torch.equal(each(slopes.detach().unsqueeze(0)), found.detach().unsqueeze(0))
    refused((lambda: pe.functional.alibi_scaled_slopes(slopes, 16, 0), ValueError, "train_length: expected a positive number, got 0"))  # fmt: skip


def test_made_where_meta_is_the_default_device() -> None:
    """Large models are made so: weights come later, but values derived from options must exist."""
    given = torch.rand(4)
    for make in (lambda: pe.ALiBi(4, slopes=given), lambda: pe.ALiBi.from_preset("falcon", 4, head_dim=8)):
        with torch.device("meta"):
            alibi = make()
        assert alibi(5).is_meta
        assert torch.equal(alibi.to("cpu")(5), make()(5))


@pytest.mark.program
@pytest.mark.slow
def test_packaged_by_aotinductor() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alibi = pe.ALiBi(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.alibi(len(x))

    x = torch.zeros(5)
    package = torch._inductor.aoti_compile_and_package(torch.export.export(Model(), (x,)))
    bias = torch._inductor.aoti_load_package(package)(x)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, pe.ALiBi(4)(5))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: pe.ALiBi(-3), ValueError, "num_heads: expected a positive number, got -3"),
        (lambda s: pe.ALiBi(4, total_heads=8, head_start=8), ValueError, "head_start: expected heads within total_heads, 8, or a multiple of num_heads below it, got head_start 8 and num_heads 4"),
        (lambda s: pe.ALiBi(4, head_start=-1), ValueError, "head_start: expected heads within"),
        (lambda s: pe.ALiBi(4, max_bias=0), ValueError, "max_bias: expected a positive number, got 0"),
        (lambda s: pe.ALiBi(4, slopes=torch.rand(4), max_bias=4.0), ValueError, "max_bias: expected none where slopes are given, got 4"),
        (lambda s: pe.ALiBi(4, slopes=torch.rand(3)), ValueError, r"slopes: expected \[4\] or \[2, 4\], got \[3\]"),
        (lambda s: pe.functional.alibi_slopes(4, values=[1.0]), ValueError, "values: expected none, or one or two for each of total_heads 4, got 1"),
        (lambda s: pe.ALiBi(4)(3, 2**31), ValueError, "key_length: expected 0 to 2147483647"),
        (lambda s: pe.ALiBi(4)(3, 3, query_offset=2**31 - 3), ValueError, "query_offset: expected distances between queries and keys up to 2147483647"),
        (lambda s: pe.ALiBi(4, train_length=0), ValueError, "train_length: expected a positive number, got 0"),
        (lambda s: pe.ALiBi(4, train_length="a"), ValueError, "train_length: expected a whole number, got 'a'"),
        (lambda s: pe.ALiBi(4, total_heads="a"), ValueError, "total_heads: expected a whole number, got 'a'"),
        (lambda s: pe.ALiBi(4, head_start=0.5), ValueError, "head_start: expected a whole number, got 0.5"),
        (lambda s: pe.ALiBi(4, causal="false"), ValueError, "causal: expected True or False, got 'false'"),
        (lambda s: pe.ALiBi(4, learned="false"), ValueError, "learned: expected True or False, got 'false'"),
        (lambda s: pe.ALiBi(4, factor=0), ValueError, "factor: expected a positive number, got 0"),
        (lambda s: pe.ALiBi.from_preset("gpt", 4), ValueError, "name: expected one of 'bloom', .* got 'gpt'"),
        (lambda s: pe.ALiBi.from_preset("falcon", 4), ValueError, "head_dim: expected a number for 'falcon', got None"),
        (lambda s: pe.ALiBi(2).add_(s, query_positions=torch.arange(4)), ValueError, r"query_positions: expected \[3\] or \[2, 3\], got \[4\]"),
        (lambda s: pe.ALiBi(2).add_(s, key_positions=torch.ones(3, 5, dtype=torch.int64)), ValueError, r"key_positions: expected \[5\] or \[2, 5\], got \[3, 5\]"),
        (lambda s: pe.ALiBi(2).add_(s[0], key_positions=torch.ones(2, 5, dtype=torch.int64)), ValueError, r"key_positions: expected \[5\], got \[2, 5\]"),
        (lambda s: pe.ALiBi(2).add_(s, key_positions=torch.rand(5)), TypeError, "key_positions: expected int32 or int64, got float32"),
        (lambda s: pe.ALiBi(2).add_(s, query_positions=torch.arange(3), query_offset=0), ValueError, "query_offset: expected none beside query_positions"),
        (lambda s: pe.ALiBi(2).add_(s, query_positions=torch.tensor([0, 2**31, 1])), IndexError, "query_positions: expected -2147483647 to 2147483647, got 2147483648 at index 1"),
        (lambda s: pe.ALiBi(2).softmax_(s, query_positions=torch.tensor([0, 2**31 - 1, 1]), key_positions=torch.tensor([0, -5, 1, 2, 3])), ValueError, "positions: expected distances between queries and keys up to 2147483647, got queries from 0 to 2147483647 and keys from -5 to 3"),
        pytest.param(lambda s: pe.ALiBi(2).softmax_(s, cu_seqlens=torch.tensor([0, 4])), ValueError, "cu_seqlens: expected key_length, 5, last, got 4", marks=AT_ONCE),
        pytest.param(lambda s: pe.ALiBi(2).softmax_(s, cu_seqlens=torch.tensor([0, 4, 3, 5])), ValueError, "cu_seqlens: expected numbers that do not decrease, got 4 and 3 at index 2", marks=AT_ONCE),
        pytest.param(lambda s: pe.ALiBi(2).softmax_(s, cu_seqlens=torch.tensor([1, 5])), ValueError, "cu_seqlens: expected 0 first, got 1", marks=AT_ONCE),
        (lambda s: pe.ALiBi(2).softmax_(s, cu_seqlens=torch.tensor(5)), ValueError, r"cu_seqlens: expected \[documents \+ 1\], got \[\]"),
        (lambda s: pe.ALiBi(2).softmax_(s, attention_mask=torch.ones(4, dtype=torch.bool)), ValueError, r"attention_mask: expected \[5\] or \[2, 5\], got \[4\]"),
        (lambda s: pe.functional.alibi_softmax_(s, torch.rand(2), attention_mask=torch.rand(5)), TypeError, "attention_mask: expected bool or integers, got float32"),
        (lambda s: pe.ALiBi(4).softmax_(s), ValueError, "scores: expected heads 4, got 2"),
        (lambda s: pe.ALiBi(2).softmax_(s.transpose(-1, -2), query_offset=0), ValueError, "scores: expected a contiguous last dimension"),
        (lambda s: pe.ALiBi(2).lse_correction(3, query_start=0, key_start=0, form="x"), ValueError, "form: expected 'distance' or 'key', got 'x'"),
        (lambda s: pe.ALiBi(2).add_(s[0, 0]), ValueError, r"scores: expected \[batch, heads, query_length, key_length\] or .* got \[3, 5\]"),
        (lambda s: pe.ALiBi(2).add_(s[0, 0, 0]), ValueError, r"scores: expected \[batch, heads, query_length, key_length\] or .* got \[5\]"),
        (lambda s: pe.ALiBi(2).softmax(s[0, 0, 0, 0]), ValueError, r"scores: expected \[batch, heads, query_length, key_length\] or .* got \[\]"),
        (lambda s: pe.ALiBi(2).softmax_(s[0, 0, 0]), ValueError, r"scores: expected \[batch, heads, query_length, key_length\] or .* got \[5\]"),
        (lambda s: pe.ALiBi(2).add_(s.int()), TypeError, "scores: expected float32, float64, bfloat16 or float16, got int32"),
        (lambda s: pe.ALiBi(2).add_(s.transpose(-1, -2), query_offset=0), ValueError, "scores: expected a contiguous last dimension"),
        (lambda s: pe.ALiBi(2).add_(s[:, :1].expand(-1, 2, -1, -1)), ValueError, "scores: expected elements that do not share memory"),
        (lambda s: pe.functional.alibi_add(s, torch.rand(1, 2)), ValueError, r"slopes: expected \[heads\], \[2, heads\] .* got \[1, 2\]"),
        (lambda s: pe.functional.alibi_add(s, torch.rand(2, device="meta")), ValueError, "slopes: expected the device of scores, cpu, got meta"),
        (lambda s: pe.ALiBi(2, learned=True).add_(s), ValueError, "slopes: requires grad"),
        (lambda s: pe.ALiBi(2, learned=True)(3, 5, out=s[0]), ValueError, "slopes: requires grad"),
        (lambda s: pe.ALiBi(2)(3, 5, out=s), ValueError, r"out: expected \[2, 3, 5\], got \[2, 2, 3, 5\]"),
        (lambda s: pe.ALiBi(2)(5, 3, query_offset=0, out=s[0].mT), ValueError, "out: expected a contiguous last dimension"),
        (lambda s: pe.ALiBi(2).softmax_(s.as_strided((1, 2, 3, 5), (0, 6, 4, 1))), ValueError, "scores: expected elements that do not share memory"),
        (lambda s: pe.ALiBi(2)(3, 5, out=s[0, :1].expand(2, 3, 5)), ValueError, "out: expected elements that do not share memory"),
        (lambda s: pe.ALiBi(2)(3, 5, out=s[0].int()), TypeError, "out: expected float32, float64, bfloat16 or float16, got int32"),
        (lambda s: pe.ALiBi(2)(3, 5, out=s[0], dtype=torch.float64), TypeError, "dtype: expected none or that of out, torch.float32, got torch.float64"),
        (lambda s: pe.ALiBi(2, device="meta")(3, 5, out=s[0]), ValueError, "slopes: expected the device of out, cpu, got meta"),
    ],
)  # fmt: skip
def test_errors(call, error, text) -> None:
    scores = torch.randn(2, 2, 3, 5)
    before = scores.clone()
    refused((call, error, text), given=(scores,))
    assert torch.equal(scores, before)


def test_slopes_may_be_a_list() -> None:
    assert torch.equal(pe.ALiBi(2, slopes=[0.5, 0.25]).slopes, torch.tensor([0.5, 0.25]))
    refused((lambda: pe.ALiBi(2, slopes="steep"), ValueError, "slopes: expected 'paper', 'geometric' or a tensor"))  # fmt: skip
