"""Slopes of each sample, and positions of each sample's first query."""

from typing import Any

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.refusals import refused
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

BATCH, HEADS, QUERIES, KEYS = 3, 4, 6, 16

OPTIONS: dict[str, Any] = {
    "plain": {},
    "mask": {"attention_mask": torch.arange(KEYS) < torch.tensor([[16], [9], [12]])},
    "documents": {"cu_seqlens": torch.tensor([0, 4, 12, 16])},
    "positions": {"key_positions": torch.arange(KEYS) * 2, "query_offset": 5},
    "offsets": {"query_offset": torch.tensor([10, 2, 7])},
    "offsets and mask": {
        "query_offset": torch.tensor([10, 2, 7]),
        "attention_mask": torch.arange(KEYS) >= torch.tensor([[0], [1], [3]]),
    },
}


def options_of(name: str, device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in OPTIONS[name].items()}


def of_sample(options: dict[str, Any], sample: int) -> dict[str, Any]:
    """The options of one sample alone."""
    own = dict(options)
    if isinstance(own.get("query_offset"), Tensor):
        own["query_offset"] = int(own["query_offset"][sample])
    mask = own.get("attention_mask")
    if mask is not None:
        own["attention_mask"] = mask[sample]
    return own


def alibi_on(device: torch.device, modules: Any, *args: Any, **options: Any) -> Any:
    module = modules.ALiBi(*args, **options)
    module.to(device)
    return module


def slopes_of(sides: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(BATCH, sides, HEADS, device=device, dtype=dtype) + 0.1


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_form_is_each_sample_alone(name: str, sides: int, modules: Any, device: torch.device) -> None:
    options, causal = options_of(name, device), sides == 1
    slopes = slopes_of(sides, device)
    given = slopes.squeeze(1) if sides == 1 else slopes
    alibi = alibi_on(device, modules, HEADS, causal=causal)
    alone = [alibi_on(device, modules, HEADS, slopes=each.squeeze(0).cpu(), causal=causal) for each in slopes]
    each = list(zip(alone, [of_sample(options, i) for i in range(BATCH)], strict=True))

    bias = alibi.forward(QUERIES, KEYS, sample_slopes=given, **options)
    expected = torch.stack([own.forward(QUERIES, KEYS, **rest) for own, rest in each])
    assert torch.equal(bias, expected)
    if causal:
        assert not torch.equal(bias[0], bias[1])

    scores = torch.randn(BATCH, HEADS, QUERIES, KEYS, device=device)
    weights = alibi.softmax(scores, sample_slopes=given, scale=0.5, **options)
    expected = torch.stack([own.softmax(s, scale=0.5, **rest) for s, (own, rest) in zip(scores, each, strict=True)])
    assert torch.equal(weights, expected)
    for method in ("add_", "softmax_"):
        found = getattr(alibi, method)(scores.clone(), sample_slopes=given, **options)
        parts = [getattr(own, method)(s.clone(), **rest) for s, (own, rest) in zip(scores, each, strict=True)]
        assert torch.equal(found, torch.stack(parts))

    query = torch.randn(BATCH, HEADS, QUERIES, 8, device=device)
    key = torch.randn(BATCH, 2, KEYS, 8, device=device)
    found = alibi.attention(query, key, key, sample_slopes=given, **options)
    parts = [
        own.attention(query[i : i + 1], key[i : i + 1], key[i : i + 1], **rest) for i, (own, rest) in enumerate(each)
    ]
    assert torch.allclose(found, torch.cat(parts), atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_each_samples(name: str, sides: int, dtype: torch.dtype, device: torch.device) -> None:
    options, causal = options_of(name, device), sides == 1
    slopes = slopes_of(sides, device, dtype).requires_grad_()
    scores = torch.randn(BATCH, HEADS, QUERIES, KEYS, device=device, dtype=dtype)
    scores.requires_grad_()
    upper = torch.randn_like(scores)
    functional = pe.functional
    for function in (functional.alibi_softmax, functional.alibi_add):
        result = function(scores, slopes, causal=causal, positions_from_mask=True, **options)
        found = torch.autograd.grad(result, (scores, slopes), upper)
        for i in range(BATCH):
            own_scores, own_slopes = scores[i].detach(), slopes[i].detach()
            own_slopes = own_slopes.squeeze(0)
            own_scores.requires_grad_(), own_slopes.requires_grad_()
            rest = of_sample(options, i)
            alone = function(own_scores, own_slopes, causal=causal, positions_from_mask=True, **rest)
            expected = torch.autograd.grad(alone, (own_scores, own_slopes), upper[i])
            assert torch.equal(found[0][i], expected[0])
            assert torch.equal(found[1][i].view_as(expected[1]), expected[1])
    bias = functional.alibi_bias(slopes, QUERIES, KEYS, causal=causal, **options)
    (found_slopes,) = torch.autograd.grad(bias, slopes, upper)
    assert found_slopes.shape == slopes.shape
    assert found_slopes[0].ne(found_slopes[1]).any()


def test_score_mod_compile_and_vmap() -> None:
    slopes = slopes_of(1, torch.device("cpu")).squeeze(1)
    offsets = torch.tensor([10, 2, 7])
    alibi = pe.ALiBi(HEADS)
    query = torch.randn(BATCH, HEADS, QUERIES, 16)
    key = torch.randn(BATCH, HEADS, KEYS, 16)
    expected = alibi.attention(query, key, key, sample_slopes=slopes, query_offset=offsets)
    change = alibi.score_mod(query_offset=offsets, sample_slopes=slopes)
    assert torch.allclose(flex_attention(query, key, key, score_mod=change), expected, atol=1e-5)
    scores = torch.randn(BATCH, HEADS, QUERIES, KEYS)

    def weights(scores: Tensor, slopes: Tensor) -> Tensor:
        return alibi.softmax(scores, sample_slopes=slopes, query_offset=offsets)

    compiled = torch.compile(weights, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(scores, slopes), weights(scores, slopes))
    copies = torch.stack([slopes, 2 * slopes])
    found = torch.func.vmap(weights, (None, 0))(scores, copies)
    assert torch.equal(found, torch.stack([weights(scores, each) for each in copies]))
    total = torch.func.vmap(torch.func.grad(lambda s: weights(scores, s).pow(2).sum()))(copies)
    alone = [torch.func.grad(lambda s: weights(scores, s).pow(2).sum())(each) for each in copies]
    assert torch.allclose(total, torch.stack(alone))


TWO = torch.tensor([[1.0, 1.0], [2.0, 2.0]])


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
def test_two_rows_are_not_two_samples(modules: Any) -> None:
    """[2, heads] are slopes left and right of the query, of which a causal bias has no right."""
    scores = torch.zeros(2, 2, 3, 3)
    refused((lambda: modules.ALiBi(2, slopes=TWO), ValueError, "slopes: expected [2] with causal=True.*sample_slopes"))  # fmt: skip
    with pytest.raises(ValueError, match=r"sample_slopes: expected .* with causal=True|slopes: ex"):
        modules.ALiBi(2).softmax(scores, sample_slopes=TWO.repeat(2, 1, 1))
    for slopes in (torch.ones(2, 3), torch.ones(2), torch.ones(2, 3, 2)):
        refused((lambda: modules.ALiBi(2).softmax(scores, sample_slopes=slopes), ValueError, "sample_slopes: expected [batch, 2] or"))  # fmt: skip
    refused(
        (lambda: modules.ALiBi(2).softmax(scores, sample_slopes=torch.ones(3, 2)), ValueError, "slopes: expected batch 2, got 3"),
        (lambda: modules.ALiBi(2).softmax(scores[0], sample_slopes=TWO), ValueError, "scores: expected [batch, heads.*slopes of each sample"),
    )  # fmt: skip
    assert modules.ALiBi(2, slopes=TWO, causal=False).softmax(scores).isfinite().all()


def test_functions_refuse_what_means_two_things() -> None:
    scores = torch.zeros(2, 2, 3, 3)
    functional = pe.functional
    for call in (
        lambda: functional.alibi_bias(TWO, 3, 3),
        lambda: functional.alibi_softmax(scores, TWO),
        lambda: functional.alibi_add(scores, TWO),
        lambda: functional.alibi_attention(scores, scores, scores, TWO),
    ):
        refused((call, ValueError, "slopes: expected [heads] with causal=True.*[2, 2]"))
    refused((lambda: functional.alibi_softmax(scores, torch.ones(2, 3, 2)), ValueError, "slopes: expected .*[batch, 1 or 2, heads] for each"))  # fmt: skip


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
def test_offsets_of_each_sample_are_checked(modules: Any) -> None:
    alibi, scores = modules.ALiBi(2), torch.zeros(2, 2, 3, 3)
    offsets = torch.tensor([1, 0])
    refused(
        (lambda: alibi.softmax(scores, query_offset=offsets.float()), TypeError, "query_offset: expected int32 or int64, got float32"),
        (lambda: alibi.softmax(scores, query_offset=torch.tensor([1, 2, 3])), ValueError, "query_offset: expected a number or [batch] with batch 2"),
        (lambda: alibi.softmax(torch.zeros(2, 2, 3, 3), query_offset=offsets, attention_mask=torch.ones(3, 3, dtype=torch.bool)), ValueError, "attention_mask: expected"),
        (lambda: alibi.softmax(scores, query_offset=offsets, cu_seqlens=torch.tensor([0, 3])), ValueError, "query_offset: expected a number beside cu_seqlens"),
        (lambda: alibi.softmax(scores, query_offset=offsets, query_positions=torch.arange(3)), ValueError, "query_offset: expected none beside query_positions"),
        (lambda: alibi.softmax(scores[0], query_offset=offsets), ValueError, "query_offset: expected a number where there is no batch"),
    )  # fmt: skip
