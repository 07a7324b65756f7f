"""Hidden keys are never read, whatever hides them: their scores and gradients may hold NaN."""

from typing import Any

import posembed as pe
import pytest
import torch
from posembed.glue.decompositions.alibi import distances
from support.case import FLOATING
from torch import Tensor

BATCH, HEADS, QUERIES = 2, 3, 6
# CUDA: rows that begin at a multiple of 8, 4 and 2 keys; an odd row; a row of many warps.
KEYS = (40, 36, 34, 37, 8200)


def lengths(keys: int) -> Tensor:
    return torch.arange(keys) < torch.tensor([[keys - 3], [keys // 2]])


def ways(keys: int) -> dict[str, dict[str, Any]]:
    """Options of a call for each way in which keys are hidden."""
    mask = torch.ones(BATCH, keys, dtype=torch.bool)
    mask[0, 2], mask[1, :5] = False, False
    documents = torch.tensor([0, keys - QUERIES + 2, keys])
    shuffled = torch.arange(keys).flip(0)
    return {
        "causal": {"causal": True},
        "mask": {"causal": False, "attention_mask": mask},
        "mask of one row": {"causal": False, "attention_mask": mask[:1].int()},
        "lengths": {"causal": False, "attention_mask": lengths(keys)},
        "documents": {"causal": False, "cu_seqlens": documents},
        "positions": {"causal": True, "key_positions": shuffled},
        "causal and a mask of ones": {"causal": True, "attention_mask": mask.new_ones(keys)},
        "mask that numbers keys": {"attention_mask": mask, "positions_from_mask": True},
        "all at once": {
            "causal": True,
            "attention_mask": mask,
            "cu_seqlens": documents,
            "query_positions": torch.arange(QUERIES) + keys // 2,
            "key_positions": shuffled.expand(BATCH, -1).contiguous(),
        },
    }


WAYS = list(ways(KEYS[0]))


def given(way: str, keys: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """The options of a call, and which keys it hides: [batch, heads, query, key]."""
    options = ways(keys)[way]
    names = ("query_offset", "attention_mask", "query_positions", "key_positions", "cu_seqlens")
    others = {"causal": True, "positions_from_mask": False, "query_offsets": None}
    all_of_them = {**dict.fromkeys(names), **others, **options}
    _, hidden = distances(QUERIES, keys, torch.device("cpu"), **all_of_them)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return moved, hidden.expand(BATCH, HEADS, -1, -1).to(device)


def numbers(hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random numbers with 0 where keys are hidden, and with NaN there."""
    plain = torch.randn(hidden.shape, device=hidden.device, dtype=dtype).masked_fill(hidden, 0)
    return plain, plain.masked_fill(hidden, torch.nan)


def slopes_of(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([0.5, 0.25, 0.0625], device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("way", WAYS)
def test_scores(way: str, keys: int, dtype: torch.dtype, device: torch.device) -> None:
    options, hidden = given(way, keys, device)
    assert 0 < hidden.sum() < hidden.numel()
    plain, bad = numbers(hidden, dtype)
    slopes = slopes_of(device)
    for function in (pe.functional.alibi_add, pe.functional.alibi_softmax):
        assert torch.equal(function(bad, slopes, **options), function(plain, slopes, **options))
    for function in (pe.functional.alibi_add_, pe.functional.alibi_softmax_):
        expected = function(plain.clone(), slopes, **options)
        assert torch.equal(function(bad.clone(), slopes, **options), expected)
    assert expected[hidden].eq(0).all()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: str, keys: int, dtype: torch.dtype, device: torch.device) -> None:
    options, hidden = given(way, keys, device)
    plain, bad = numbers(hidden, dtype)
    scores = torch.randn(hidden.shape, device=device, dtype=dtype, requires_grad=True)
    for learned in (False, True):
        slopes = slopes_of(device).requires_grad_(learned)
        inputs = (scores, slopes) if learned else (scores,)
        weights = pe.functional.alibi_softmax(scores, slopes, **options)
        expected = torch.autograd.grad(weights, inputs, plain, retain_graph=True)
        found = torch.autograd.grad(weights, inputs, bad)
        assert all(map(torch.equal, found, expected))
        assert found[0].isfinite().all()
        assert found[0][hidden].eq(0).all()
    bias = pe.functional.alibi_add(scores, slopes, **options)
    (expected_slopes,) = torch.autograd.grad(bias, slopes, plain, retain_graph=True)
    (found_slopes,) = torch.autograd.grad(bias, slopes, bad)
    assert torch.equal(found_slopes, expected_slopes)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_nan_stays_among_visible_keys(way: str, keys: int, device: torch.device) -> None:
    options, hidden = given(way, keys, device)
    grad = torch.randn(hidden.shape, device=device)
    order = hidden.logical_not().cumsum(-1).masked_fill(hidden, 0)
    grad[order == 1] = torch.nan  # the first visible key
    grad[order == 2] = 0  # the second has weight 0 too, as hidden keys have
    scores = torch.randn(hidden.shape, device=device).masked_fill(order == 2, -1e30)
    scores.requires_grad_()
    pe.functional.alibi_softmax(scores, slopes_of(device), **options).backward(grad)
    assert scores.grad is not None
    assert scores.grad[hidden].eq(0).all()
    assert scores.grad[~hidden].isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_of_gradients_and_tangents(way: str, device: torch.device) -> None:
    options, hidden = given(way, KEYS[0], device)
    plain, bad = numbers(hidden, torch.float64)
    slopes = slopes_of(device, torch.float64).requires_grad_()
    scores = torch.randn(hidden.shape, device=device, dtype=torch.float64, requires_grad=True)

    def softmax(scores: Tensor) -> Tensor:
        return pe.functional.alibi_softmax(scores, slopes, **options)

    results = []
    for grad in (plain, bad):
        upper = grad.clone().requires_grad_()
        first = torch.autograd.grad(softmax(scores), (scores, slopes), upper, create_graph=True)
        total = first[0].pow(2).sum() + first[1].pow(2).sum()
        second = torch.autograd.grad(total, (scores, slopes, upper))
        _, tangent = torch.func.jvp(softmax, (scores.detach(),), (grad,))
        results.append([*(each.detach() for each in first), *second, tangent.detach()])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
        assert found.isfinite().all()


def test_without_the_mask_no_key_is_hidden(device: torch.device) -> None:
    """``apply_mask=False`` leaves scores as they are, so all of them count."""
    options, hidden = given("all at once", 40, device)
    scores = torch.randn(hidden.shape, device=device, requires_grad=True)
    weights = pe.functional.alibi_softmax(scores, slopes_of(device), apply_mask=False, **options)
    grad = torch.randn(hidden.shape, device=device)
    weights.backward(grad)
    expected = weights * (grad - (grad * weights).sum(-1, keepdim=True))
    assert scores.grad is not None
    assert torch.allclose(scores.grad, expected, atol=1e-6)
    assert scores.grad[hidden].ne(0).any()
