"""Tests of features among rows: functional.embedding_with_features and with_embeddings."""

from collections.abc import Callable

import posembed as pe
import pytest
import torch
from posembed import functional
from support.case import FLOATING, same_for_any_thread_count
from support.halves import CUDA_ON_CPU
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 11, 24
# Placeholders of other programs are no rows of the table.
IDS = torch.tensor([[3, -200, -200, 10, 0], [1, 1, ROWS, 7, -200]])
MASK = (IDS < 0) | (IDS >= ROWS)


def made(device: torch.device | str = "cpu", **options) -> pe.TokenEmbedding:
    torch.manual_seed(0)
    return pe.TokenEmbedding(ROWS, COLUMNS, device=device, **options)


def features_of(token: pe.TokenEmbedding, count: int = 4) -> Tensor:
    table = token.weight
    return torch.randn(count, COLUMNS, dtype=table.dtype, device=table.device, requires_grad=True)


def scattered(token: nn.Module, ids: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """What other programs do."""
    return token(ids.masked_fill(mask, 0)).masked_scatter(mask[..., None], features)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("columns", [1, 24, 500])
@pytest.mark.parametrize("options", [{}, {"scale": 3.0, "padding_idx": 1}, {"gradient": "rows"}])
def test_results_and_gradients(dtype, columns, options, device: torch.device) -> None:
    torch.manual_seed(0)
    token = pe.TokenEmbedding(ROWS, columns, dtype=dtype, device=device, **options)
    ids, mask = IDS.to(device), MASK.to(device)
    features = torch.randn(4, columns, dtype=dtype, device=device, requires_grad=True)
    direction = torch.randn(2, 5, columns, dtype=dtype, device=device)
    tensors, found = (token.weight, features), []
    for function in (
        lambda: scattered(token, ids, features, mask),
        lambda: token.with_embeddings(ids, features, mask),
        lambda: token.with_embeddings(ids.int(), features, mask),
    ):
        result = function()
        gradients = torch.autograd.grad(result, tensors, direction)
        found.append([result, *(each.to_dense() for each in gradients)])
    for got in found[1:]:
        for actual, expected in zip(got, found[0], strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [20_011, 0])
def test_many_rows_on_any_number_of_threads(count: int, device: torch.device) -> None:
    token = made(device, scale=0.5)
    ids = torch.randint(ROWS, (count,), device=device)
    mask = torch.rand(count, device=device) < 0.3
    features = features_of(token, int(mask.sum()))
    expected = scattered(token, ids, features, mask)
    (found,) = same_for_any_thread_count(lambda: (token.with_embeddings(ids, features, mask),))
    assert torch.equal(found, expected)


def test_places_by_number(device: torch.device) -> None:
    """A feature may be in several places, whose gradients add up, or in none."""
    table, features = torch.randn(ROWS, 4, device=device), torch.randn(3, 4, device=device)
    features.requires_grad_()
    ids = torch.tensor([5, 0, 0, 7], device=device)
    for dtype in (torch.int32, torch.int64):
        places = torch.tensor([-1, 2, 2, 0], dtype=dtype, device=device)
        rows = functional.embedding_with_features(ids, table, features, places, scale=2.0)
        wanted = [2 * table[5], features[2], features[2], features[0]]
        assert torch.equal(rows, torch.stack(wanted))
        (gradient,) = torch.autograd.grad(rows.sum(), features)
        assert gradient[:, 0].tolist() == [1.0, 0.0, 2.0]


def test_ids_that_are_neither_tokens_nor_places(device: torch.device) -> None:
    token = made(device)
    features = features_of(token, 1)
    for bad in (-1, ROWS, torch.iinfo(torch.int64).min + 1, torch.iinfo(torch.int64).min):
        ids = torch.tensor([0, bad], device=device)
        mask = torch.tensor([True, False], device=device)
        shown = max(bad, torch.iinfo(torch.int64).min + 1)  # the least id has a meaning inside
        with pytest.raises(IndexError, match=f"{shown} at index 1"):
            token.with_embeddings(ids, features, mask), pe.check_errors()
        places = torch.tensor([0, -1], device=device)
        look_up = functional.embedding_with_features
        with pytest.raises(IndexError, match=f"{shown} at index 1"):
            look_up(ids, token.weight, features, places), pe.check_errors()
        places = torch.tensor([-1, bad if bad != -1 else -2], device=device)
        with pytest.raises(IndexError, match=f"{min(shown, -2) if bad < 0 else bad} at index 1"):
            look_up(ids * 0, token.weight, features, places), pe.check_errors()


@pytest.mark.parametrize("count", [0, 3, 5])
def test_the_number_of_features_is_checked(count: int, device: torch.device) -> None:
    token = made(device)
    on_cuda = CUDA_ON_CPU or device.type == "cuda"
    error = IndexError if on_cuda else ValueError
    message = "slot" if on_cuda else f"features: expected 4, one .*, got {count}"
    compiled = torch.compile(token.with_embeddings, fullgraph=True, backend="aot_eager")
    for function in (token.with_embeddings, compiled):
        refused((lambda: (function(IDS.to(device), features_of(token, count), MASK.to(device)), pe.check_errors()), error, message))  # fmt: skip


def test_compiled_without_a_break(device: torch.device) -> None:
    token = made(device, scale=2.0)
    features = features_of(token)
    compiled = torch.compile(token.with_embeddings, fullgraph=True, backend="aot_eager")
    for function in (compiled, token.with_embeddings):
        function(IDS.to(device), features, MASK.to(device)).square().sum().backward()
    torch.testing.assert_close(features.grad, 4 * features.detach())


def codes() -> pe.TokenEmbedding:
    token = made()
    token.quantize()
    return token


def part() -> pe.TokenEmbedding:
    token = made(scale=2.0)
    token.train_rows([3, 7])
    return token


def hooked() -> pe.TokenEmbedding:
    token = made()
    token.register_forward_hook(lambda module, args, result: result + 1)
    return token


class Noisy(pe.TokenEmbedding):
    """A subclass with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


def subclass() -> pe.TokenEmbedding:
    return Noisy(ROWS, COLUMNS)


def replaced() -> pe.TokenEmbedding:
    """Accelerate replaces forward on the instance."""
    token = made()
    token.forward = lambda ids: 2 * pe.TokenEmbedding.forward(token, ids)
    return token


@pytest.mark.parametrize("make", [codes, part, hooked, subclass, replaced])
def test_tables_with_look_ups_of_their_own(make: Callable[[], pe.TokenEmbedding]) -> None:
    token = make()
    features = torch.randn(4, COLUMNS, requires_grad=True)
    found = token.with_embeddings(IDS, features, MASK)
    assert torch.equal(found, scattered(token, IDS, features, MASK))
    found.square().sum().backward()
    assert torch.equal(features.grad, 2 * features)
    if make is part:
        assert token.trained.grad.abs().sum(1).gt(0).all()


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_run(kind: str) -> None:
    token, seen = made(), []
    getattr(token, kind)(lambda *_: seen.append(1))
    token.with_embeddings(IDS, torch.randn(4, COLUMNS), MASK).sum().backward()
    assert seen == [1]


def test_layers_of_rows() -> None:
    token = pe.PerLayerEmbedding(ROWS, 3, 4)
    features = torch.randn(4, 12)
    found = token.with_embeddings(IDS, features, MASK)
    assert torch.equal(found[MASK], features.view(4, 3, 4))
    assert torch.equal(found[~MASK], token(IDS[~MASK]))


def test_autocast_casts_features() -> None:
    token = made()
    features = features_of(token).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token.with_embeddings(IDS, features, MASK)
    assert torch.equal(found[MASK], features.float())


LAYERS = {
    "plain": {"positions": None, "norm": "rms"},
    "bert": {"max_positions": 20, "num_types": 2, "norm": "layer", "scale": 2.0},
    "roberta": {"max_positions": 20, "position_rule": "roberta", "padding_idx": 1},
    "projected": {"max_positions": 20, "token_dim": 6},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("foreign", [False, True])
def test_the_input_layer(name: str, foreign: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    embed = pe.InputEmbedding(ROWS, COLUMNS, device=device, **LAYERS[name])
    if foreign:
        embed.token = nn.Embedding(ROWS, LAYERS[name].get("token_dim", COLUMNS), device=device)
    ids, mask = IDS.to(device), MASK.to(device)
    features = torch.randn(4, embed.token.embedding_dim, device=device)
    rows = scattered(embed.token, ids, features, mask)
    given = {}
    if name == "roberta":  # features count, padding does not, whatever a placeholder's id is
        ids = ids.masked_fill(mask, 1)
        given["positions"] = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]], device=device)
    expected = embed(inputs_embeds=rows, **given)
    torch.testing.assert_close(embed.with_embeddings(ids, features, mask), expected)
    if name == "roberta":
        later = embed.with_embeddings(ids, features, mask, offset=3)
        given["positions"] = torch.where(given["positions"] < 0, -1, given["positions"] + 3)
        torch.testing.assert_close(later, embed(inputs_embeds=rows, **given))
        chosen = embed.with_embeddings(ids, features, mask, position_ids=given["positions"])
        torch.testing.assert_close(chosen, later)


def test_refusals() -> None:
    token = made()
    features, half = features_of(token), features_of(token).half()
    refused(
        (lambda: token.with_embeddings(IDS, features, MASK.long()), TypeError, "mask: expected bool"),
        (lambda: token.with_embeddings(IDS, features, MASK[0]), ValueError, r"mask: .*shape of ids, .2, 5., got .5."),
        (lambda: token.with_embeddings(IDS, features[:, :3], MASK), ValueError, "features: expected embedding_dim 24, got 3"),
        (lambda: token.with_embeddings(IDS, features[None], MASK), ValueError, "features: expected .features, embedding_dim."),
        (lambda: token.with_embeddings(IDS, half, MASK), TypeError, "features: expected the dtype of weight, float32"),
        (lambda: token.with_embeddings(IDS, [1.0], MASK), TypeError, "features: expected a Tensor"),
        (lambda: made(max_norm=1.0).with_embeddings(IDS, features, MASK), ValueError, "max_norm: expected none"),
        (lambda: made(scale_grad_by_freq=True).with_embeddings(IDS, features, MASK), ValueError, "scale_grad_by_freq"),
        (lambda: functional.embedding_with_features(IDS, token.weight, features, MASK.half()), TypeError, "places: expected"),
        (lambda: functional.embedding_with_features(IDS * 0, token.weight, features, IDS), IndexError, "places: expected -1 or a row of the features, 0 to 3, got -200 at index 1"),
    )  # fmt: skip
