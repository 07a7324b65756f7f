"""Tests relative logits beside models' programs, and RelativeLogits."""

import math

import posembed as pe
import pytest
import torch
from support.case import same_for_any_thread_count
from support.refusals import refused
from torch import Tensor

logits_of = pe.functional.relative_logits
AT = torch.arange(12)
BACK = AT.unsqueeze(1) - AT


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, atol=1e-5), (found - expected).abs().max()


def test_inkling() -> None:
    module = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    inkling = module.InklingRelativeLogits(16, 8)
    torch.nn.init.normal_(inkling.proj)
    states = torch.randn(2, 12, 4, 16)
    table = inkling.proj.detach().T
    found = logits_of(states.transpose(1, 2), table, rule="band", bidirectional=False)
    close(found, inkling(states, AT, AT).detach())


def test_shaw_and_transformer_xl() -> None:
    query, table = torch.randn(2, 4, 12, 16), torch.randn(11, 16)
    rows = (-BACK).clamp(-5, 5) + 5
    shaw = torch.einsum("bhqd,qkd->bhqk", query, table[rows])
    close(logits_of(query, table), shaw)
    close(logits_of(query, table, rows, scale=-0.5), -0.5 * shaw)
    sinusoids = pe.SinusoidalPositionalEmbedding(16).encode(torch.arange(11, -12, -1))
    padded = torch.nn.functional.pad(query @ sinusoids.T, (1, 0)).view(2, 4, 24, 12)
    shifted = padded[:, :, 1:].reshape(2, 4, 12, 23)[..., :12]
    close(logits_of(query, sinusoids, rule="clipped"), shifted)


def test_vitdets_rows_and_columns() -> None:
    module = pytest.importorskip("transformers.models.vitdet.modeling_vitdet")
    tables = torch.randn(5, 16), torch.randn(7, 16)
    query, scores = torch.randn(2, 1, 12, 16), torch.randn(2, 1, 12, 12)
    expected = module.add_decomposed_relative_positions(scores[:, 0].clone(), query[:, 0], *tables, (3, 4), (3, 4))
    cells = torch.cartesian_prod(torch.arange(3), torch.arange(4)).T
    found = logits_of(query, tables, rule="bert", scores=scores, query_positions=cells, key_positions=cells)
    close(found[:, 0], expected)
    y, x = cells.unsqueeze(2) - cells.unsqueeze(1)
    close(logits_of(query, tables, (y + 2, x + 3), scores=scores)[:, 0], expected)


def test_debertas_two_terms() -> None:
    module = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        hidden_size=32, num_attention_heads=2, relative_attention=True, position_buckets=4,
        max_relative_positions=16, pos_att_type=["c2p", "p2c"], share_att_key=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = module.DisentangledSelfAttention(config).eval()
    query, key, embeddings = torch.randn(4, 12, 16), torch.randn(4, 12, 16), torch.randn(8, 32)
    with torch.no_grad():
        expected = attention.disentangled_attention_bias(
            query, key, module.build_relative_position(query, key, 4, 16), embeddings, 3
        )
        tables = [
            projection(embeddings).view(8, 2, 16).transpose(0, 1)
            for projection in (attention.key_proj, attention.query_proj)
        ]
    options = {"rule": "deberta", "max_distance": 16, "scale": 1 / math.sqrt(48)}
    found = logits_of(query.view(2, 2, 12, 16), tables[0], **options)
    found = logits_of(key.view(2, 2, 12, 16), tables[1], by="key", scores=found, **options)
    close(found.view(4, 12, 12), expected)


def test_rows_below_zero() -> None:
    query, table = torch.randn(1, 1, 3, 4), torch.randn(2, 4).requires_grad_()
    rows = torch.tensor([[0, -1], [-2, -1], [1, -2]])
    scores = torch.full((1, 1, 3, 2), torch.nan).masked_fill(rows != -2, 2.0)
    found = logits_of(query, table, rows, scores=scores)
    assert torch.equal(found[0, 0, 1:, 0].isinf(), torch.tensor([True, False]))
    assert found[0, 0, 0, 1] == 2.0
    assert found[0, 0, 2, 1] == -math.inf
    gradient = torch.full_like(found, torch.nan).masked_fill(rows >= 0, 1.0)
    (grad,) = torch.autograd.grad(found, table, gradient)
    close(grad, torch.stack([query[0, 0, 0], query[0, 0, 2]]))


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("by", ["query", "key"])
def test_gradients_have_the_same_bits_for_any_number_of_threads(by: str, heads: bool) -> None:
    query, table = torch.randn(3, 2, 150, 8), torch.randn(*([2] if heads else []), 401, 8)
    gradient = torch.randn(3, 2, 150, 150)

    def run() -> list[Tensor]:
        given = [query.clone().requires_grad_(), table.clone().requires_grad_()]
        logits = logits_of(*given, by=by, rule="bert")
        return [logits, *torch.autograd.grad(logits, given, gradient)]

    same_for_any_thread_count(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_in_float32(dtype: torch.dtype) -> None:
    """4096 ones would stay at 256 in bfloat16, and the sum's rounding shows in float16."""
    query = torch.ones(1, 1, 4096, 1, dtype=dtype, requires_grad=True)
    table = torch.full((1, 1), 1 / 64, dtype=dtype, requires_grad=True)
    logits = logits_of(query, table, torch.zeros(4096, 64).long())
    of_query, of_table = torch.autograd.grad(logits, [query, table], torch.ones_like(logits) / 64)
    assert torch.equal(of_table, torch.full_like(table, 4096))
    assert torch.equal(of_query, torch.full_like(query, 1 / 64))


def test_memory_does_not_hold_all_products() -> None:
    """16 heads of 256 queries and 4001 rows would take 64 MiB."""
    query, table = torch.randn(1, 16, 256, 4), torch.randn(4001, 4)
    rows = torch.arange(256).unsqueeze(1) - torch.arange(64) + 2000
    with torch.profiler.profile(profile_memory=True) as profile:
        logits_of(query, table, rows)
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert max(sizes) < 8 * 2**20


def test_autocast_computes_products_in_its_dtype() -> None:
    query, table = torch.randn(1, 2, 5, 8), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_of(query, table)
    assert torch.equal(found, logits_of(query.bfloat16(), table.bfloat16()))
    scores = torch.zeros(1, 2, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        pe.functional.relative_logits_(scores, query.bfloat16(), table, torch.zeros(5, 5).long())
    close(scores, (query.bfloat16().float() @ table[0])[..., None].expand(1, 2, 5, 5))


@pytest.mark.parametrize("by", ["query", "key"])
def test_score_mod(by: str) -> None:
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    query, key, value = torch.randn(3, 2, 2, 9, 8)
    module = pe.RelativeLogits((3, 5), 8, num_heads=2, buckets="bert", by=by, scale=0.5)
    torch.nn.init.normal_(module.weight)
    positions = torch.stack([AT[:9] // 3, AT[:9] % 3])
    options = {"query_positions": positions, "key_positions": positions, "cu_seqlens": torch.tensor([0, 4, 9])}
    given = key if by == "key" else query
    scores = module(given, scores=query @ key.mT / math.sqrt(8), **options)
    found = attention.flex_attention(query, key, value, score_mod=module.score_mod(given, **options))
    close(found, scores.softmax(-1) @ value)


def test_module() -> None:
    module = pe.RelativeLogits((3, 5), 8, num_heads=2, buckets="bert", causal=True, by="key")
    assert repr(module) == ("RelativeLogits((3, 5), 8, num_heads=2, buckets='bert', causal=True, by='key')")
    assert module.weight.shape == (2, 8, 8)
    assert pe.RelativeLogits((3, 5), 8, buckets="grid").weight.shape == (15, 8)
    shaw = pe.RelativeLogits(7, 8, scale=0.25)
    query, scores = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 9)
    with torch.no_grad():
        found = shaw(query, 9)
        assert torch.equal(found, shaw(query, scores=torch.zeros_like(scores)))
        whole = shaw(query.expand(2, 3, 9, 8))
        close(found, whole[:, :, -1:])
        expected = scores + found
        assert shaw.add_(scores, query) is scores
        close(scores, expected)


def test_errors() -> None:
    query, table, rows = torch.ones(2, 3, 4, 8), torch.ones(5, 8), torch.zeros(4, 6).long()
    functional = pe.functional
    refused(
        (lambda: logits_of(query[0], table, rows), ValueError, "query: expected [batch, heads, queries, dim], got [3, 4, 8]"),
        (lambda: logits_of(query, table.double(), rows), TypeError, "table: expected the dtype of query, float32, got float64"),
        (lambda: logits_of(query.long(), table.long(), rows), TypeError, "query: expected float32"),
        (lambda: logits_of(query, table[0], rows), ValueError, "table: expected [rows, dim] or [heads, rows, dim], got [8]"),
        (lambda: logits_of(query, table.expand(2, 5, 8), rows), ValueError, "table: expected heads 3, got 2"),
        (lambda: logits_of(query, table[:, :4], rows), ValueError, "table: expected dim 8, got 4"),
        (lambda: logits_of(query, table[:0], rows), ValueError, "table: expected at least 1 row"),
        (lambda: logits_of(query, table, rows[:3]), ValueError, "rows: expected queries 4, got 3"),
        (lambda: logits_of(query, table, rows, by="key"), ValueError, "rows: expected keys 4, got 6"),
        (lambda: logits_of(query, table, rows.expand(3, 4, 6)), ValueError, "rows: expected batch 1 or 2, got 3"),
        (lambda: logits_of(query, table, rows[0]), ValueError, "rows: expected [queries, keys]"),
        (lambda: logits_of(query, table, rows.float()), TypeError, "rows: expected int32 or int64, got float32"),
        (lambda: logits_of(query, table, rows + 5), IndexError, "rows: expected 0 to 4, a row of the table, -1 or -2, got 5 at index 0"),
        (lambda: logits_of(query, table, rows - 3), IndexError, "got -3 at index 0"),
        (lambda: logits_of(query, table, rows + 2**32), IndexError, "got 4294967296 at index 0"),
        (lambda: logits_of(query, table, rows, scores=torch.ones(2, 3, 4, 5)), ValueError, "scores: expected [2, 3, 4, 6], got [2, 3, 4, 5]"),
        (lambda: logits_of(query, table, rows, scores=torch.ones(2, 3, 4, 6).half()), TypeError, "scores: expected the dtype of query"),
        (lambda: logits_of(query, table, rows, by="both"), ValueError, "by: expected 'query' or 'key', got 'both'"),
        (lambda: logits_of(query, table, rows, query_offset=1), ValueError, "rows: expected None beside positions"),
        (lambda: logits_of(query, (table, table), rows), ValueError, "rows: expected one for each of 2 tables, got one tensor"),
        (lambda: functional.relative_logits_(torch.ones(2, 3, 4, 1).expand(2, 3, 4, 6), query, table, rows), ValueError, "scores"),
        (lambda: pe.RelativeLogits((), 8), ValueError, "num_buckets: expected a number for each axis, got none"),
        (lambda: pe.RelativeLogits(5, 8, num_heads=0), ValueError, "num_heads: expected 1 or more, got 0"),
        (lambda: pe.cpp.RelativeLogits(5, 8, by="both"), ValueError, "by: expected 'query' or 'key', got 'both'"),
    )  # fmt: skip


@pytest.mark.parametrize("by", ["query", "key"])
def test_places_of_several_blocks(by: str, device: torch.device) -> None:
    """Blocks have up to 128 places on the CPU, and 2^24 products on CUDA."""
    places, others, count = 600, 3, 30_000
    query = torch.randn(1, 1, places, 4, dtype=torch.float64, device=device).requires_grad_()
    table = torch.randn(count, 4, dtype=torch.float64, device=device).requires_grad_()
    rows = torch.randint(count, (places, others), device=device)
    upper = torch.randn(1, 1, places, others, dtype=torch.float64, device=device)
    expected = torch.einsum("bhqd,qkd->bhqk", query, table[rows])
    found = logits_of(query, table, rows if by == "query" else rows.mT, by=by)
    found = found if by == "query" else found.mT
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (query, table), upper)
    for one, other in zip(torch.autograd.grad(found, (query, table), upper), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["query", "key"])
def test_runs_of_rows(dtype: torch.dtype, by: str, device: torch.device) -> None:
    """Lines of equal, rising and falling rows of every length, of -1 and of -2, on two axes."""
    torch.manual_seed(0)
    count, queries, keys = 60, 70, 150

    def line() -> Tensor:
        parts: list[Tensor] = []
        while sum(map(len, parts)) < keys:
            size, first = int(torch.randint(1, 45, ())), int(torch.randint(-2, count, ()))
            last = int(parts[-1][-1]) if parts else count
            first = {0: -1, -1: 0}.get(last, first)  # 0 and -1 are no run
            step = int(torch.randint(-1, 2, ())) if first >= 0 else 0
            part = first + step * torch.arange(size)
            parts.append(part[(part >= (0 if first >= 0 else -2)) & (part < count)])
        return torch.cat(parts)[:keys]

    rows = torch.stack([line() for _ in range(2 * queries)]).view(2, 1, queries, keys).to(device)
    sizes = (2, 2, queries if by == "query" else keys, 8)
    query, table = torch.randn(sizes, device=device), torch.randn(count, 8, device=device)
    scores, upper = torch.randn(2, 2, 2, queries, keys, device=device)
    leaves = [x.to(dtype).requires_grad_() for x in (query, table)]
    found = logits_of(*leaves, rows, by=by, scores=scores.to(dtype), scale=0.5)
    upper = upper.to(dtype).masked_fill(rows.eq(-2).any(0), 0)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    products = exact[0] @ exact[1].T * 0.5
    expected = scores.to(dtype).double()
    for axis in rows:
        at = axis.clamp_min(0)
        at = at if by == "query" else at.mT
        logits = products.gather(-1, at.expand(2, 2, *at.shape[1:]))
        logits = logits if by == "query" else logits.mT
        expected = expected + torch.where(axis >= 0, logits, 0.0)
        expected = expected.masked_fill(axis == -2, -math.inf)
    slack = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 6e-2)
    gradients = torch.autograd.grad(found, leaves, upper)
    wanted = torch.autograd.grad(expected, exact, upper.double())
    for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
        bound = slack * other[other.isfinite()].abs().max()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=float(bound))
