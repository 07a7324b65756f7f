"""Tests TokenEmbedding.select: a part of a vocabulary, with its output layer and its optimizer."""

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 11, 5
KEPT = [9, 0, 3, 3, 10]  # another order, and one twice


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_rows(dtype: torch.dtype, requires_grad: bool, device: torch.device) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, padding_idx=3, dtype=dtype, device=device)
    token.requires_grad_(requires_grad)
    before = token.weight.detach().clone()
    token.select(torch.tensor(KEPT, dtype=torch.int32, device=device))
    assert torch.equal(token.weight, before[KEPT])
    assert (token.num_embeddings, token.padding_idx) == (len(KEPT), 2)
    assert (token.weight.device, token.weight.requires_grad) == (before.device, requires_grad)
    assert token(torch.tensor([4], device=device)).equal(before[10:])
    token.select(range(2, 4))
    assert torch.equal(token.weight, before[[3, 3]])
    assert token.padding_idx == 0


def trained(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


STATES = {"AdamW": {}, "SGD": {"momentum": 0.9}, "Rprop": {}, "SparseAdam": {}}


@pytest.mark.parametrize("name", STATES)
def test_a_model_of_a_part_learns_as_the_whole(name: str, device: torch.device) -> None:
    """Rows that are in use keep their states: steps after select are those of the whole table."""
    form = "rows" if name in ("SparseAdam", "SGD") else "dense"
    kept = torch.tensor([7, 2, 9, 4], device=device)
    results = []
    for selects in (False, True):
        torch.manual_seed(1)
        token = pe.TokenEmbedding(ROWS, COLUMNS, gradient=form, device=device)
        optimizer = getattr(torch.optim, name)(token.parameters(), lr=0.1, **STATES[name])
        trained(optimizer, token(kept).pow(2).sum())
        trained(optimizer, token(torch.arange(ROWS, device=device)).pow(2).sum())
        if selects:
            old = token.weight
            token.select(kept, optimizer=optimizer)
            assert old not in optimizer.state
            assert optimizer.param_groups[0]["params"] == [token.weight]
        for _ in range(2):
            ids = torch.arange(len(kept), device=device) if selects else kept
            trained(optimizer, token(ids).pow(2).sum())
        results.append(token.weight.detach() if selects else token.weight.detach()[kept])
    assert torch.equal(*results)


@pytest.mark.parametrize("bias", [True, False])
def test_the_head_keeps_the_same_tokens(bias: bool, device: torch.device) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, device=device)
    head = nn.Linear(COLUMNS, ROWS, bias=bias, device=device)
    optimizer = torch.optim.AdamW([*token.parameters(), *head.parameters()])
    trained(optimizer, head(token(torch.arange(ROWS, device=device))).square().sum())
    before = head(token.weight).detach()
    moments = [optimizer.state[p]["exp_avg"] for p in (token.weight, *head.parameters())]
    token.select(KEPT, head=head, optimizer=optimizer)
    torch.testing.assert_close(head(token.weight), before[KEPT][:, KEPT])
    assert head.out_features == len(KEPT)
    for parameter, moment in zip((token.weight, *head.parameters()), moments, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment[KEPT])


def test_a_tied_head_shares_the_part() -> None:
    token, head = pe.TokenEmbedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS, bias=False)
    head.weight = token.weight
    token.select(KEPT, head=head)
    assert head.weight is token.weight


def test_state_per_row() -> None:
    """Row-wise optimizers keep one number per row."""
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    optimizer = torch.optim.SGD(token.parameters())
    sums = torch.arange(float(ROWS))
    optimizer.state[token.weight] = {"sum": sums, "step": 3}
    token.select(KEPT, optimizer=optimizer)
    assert torch.equal(optimizer.state[token.weight]["sum"], sums[KEPT])
    token.resize(7, optimizer=optimizer)
    assert optimizer.state[token.weight]["sum"].tolist() == [*map(float, KEPT), 0.0, 0.0]
    assert optimizer.state[token.weight]["step"] == 3


class Owing(torch.optim.SGD):
    """Owes rows a step, as optimizers of tables do."""

    def catch_up(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(2)


def test_rows_are_paid_what_they_are_owed() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    optimizer, expected = Owing(token.parameters()), token.weight.detach().clone()
    token.select(range(ROWS), optimizer=optimizer)
    assert torch.equal(token.weight, 2 * expected)
    token.train_rows([1, 2], optimizer=optimizer)
    assert torch.equal(token.weight, 4 * expected)
    token.train_rows(None, optimizer=optimizer)
    assert torch.equal(token.weight[1:3], 8 * expected[1:3])
    assert torch.equal(token.weight[3:], 4 * expected[3:])
    token.resize(3, optimizer=optimizer)
    assert torch.equal(token.weight[0], 8 * expected[0])


def test_errors_change_nothing() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, padding_idx=3)
    head, weight = nn.Linear(COLUMNS, ROWS), token.weight
    optimizer = torch.optim.SGD(head.parameters())
    refused(
        (lambda: token.select([3, 11]), IndexError, "rows: expected 0 to 10.*got 11 at index 1"),
        (lambda: token.select([-1, 3]), IndexError, "rows: expected 0 to 10.*got -1 at index 0"),
        (lambda: token.select([0, 1]), ValueError, "rows: expected padding_idx, 3, among them"),
        (lambda: token.select([0.5]), ValueError, "rows: expected a whole number, got 0.5"),
        (lambda: token.select(torch.ones(11).bool()), TypeError, "rows: expected int32 or int64"),
        (lambda: token.select(torch.zeros(1, 1).long()), ValueError, r"rows: expected \[rows\]"),
        (lambda: token.select([3], head=nn.Linear(2, 3)), ValueError, "head: expected 11 outputs"),
        (lambda: token.select([3], head=head, optimizer=optimizer), ValueError, "optimizer: expe"),
    )
    assert token.weight is weight
    assert (token.num_embeddings, token.padding_idx, head.out_features) == (ROWS, 3, ROWS)
    token.quantize()
    refused((lambda: token.select([3]), TypeError, "weight: expected a table of numbers"))
