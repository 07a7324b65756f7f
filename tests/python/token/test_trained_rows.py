"""Tests TokenEmbedding.train_rows and freeze_rows: only some rows learn, under any optimizer."""

import copy
import pickle

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 11, 5
LEARN = [9, 4, 10, 4]


def made(dtype: torch.dtype = torch.float32, **options) -> pe.TokenEmbedding:
    torch.manual_seed(0)
    return pe.TokenEmbedding(ROWS, COLUMNS, dtype=dtype, **options)


def learns(token: pe.TokenEmbedding, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    (token(ids).square().sum() + token.logits(token(ids[:2])).square().mean()).backward()
    optimizer.step()


OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "weight_decay": 0.1},
    "Adagrad": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_only_these_rows_learn(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """They learn as in a table that learns as a whole; all others keep their bits."""
    ids = torch.tensor([[4, 1, 9], [4, 0, 10]], device=device)
    results = []
    for part in (False, True):
        token = made(dtype, scale=2.0, padding_idx=1).to(device)
        before = token.weight.detach().clone()
        if part:
            token.train_rows(LEARN)
            assert token.trained.shape == (3, COLUMNS)
        optimizer = getattr(torch.optim, name)(token.parameters(), lr=0.01, **OPTIMIZERS[name])
        for _ in range(3):
            optimizer.zero_grad()
            token(ids).square().sum().backward()
            optimizer.step()
        results.append(token.weight.detach().clone())
    rows = sorted(set(LEARN))
    frozen = [row for row in range(ROWS) if row not in rows]
    assert torch.equal(results[1][frozen], before[frozen])
    assert (results[1][rows] != before[rows]).all()
    # torch rounds twice at the end of 16-bit tensors, which is elsewhere in a shorter one.
    close = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(results[1][rows], results[0][rows], rtol=close, atol=close)


def test_results_are_those_of_the_whole_table(device: torch.device) -> None:
    token = made(scale=0.5, padding_idx=2).to(device)
    hidden = torch.randn(3, COLUMNS, device=device, requires_grad=True)
    ids = torch.randint(ROWS, (4, 7), dtype=torch.int32, device=device)
    expected, scores = token(ids).detach(), token.logits(hidden)
    (gradient,) = torch.autograd.grad(scores.square().sum(), hidden)
    token.train_rows(torch.tensor(LEARN))
    assert torch.equal(token(ids), expected)
    torch.testing.assert_close(token.logits(hidden), scores)
    token.logits(hidden).square().sum().backward()
    torch.testing.assert_close(hidden.grad, gradient)
    assert token.trained.grad.abs().sum() > 0
    for bad in (-1, ROWS):
        with pytest.raises(IndexError, match=f"{bad} at index 0"):
            token(torch.tensor([bad], device=device)), pe.check_errors()


def test_gradients_of_the_head(device: torch.device) -> None:
    whole, part = made().to(device), made().to(device)
    part.train_rows(LEARN)
    hidden = torch.randn(3, COLUMNS, device=device)
    for token in (whole, part):
        token.logits(hidden).square().sum().backward()
    torch.testing.assert_close(part.trained.grad, whole.weight.grad[part.trained_rows])
    assert part.weight.grad is None


def test_freeze_rows_leaves_the_others() -> None:
    token = made(padding_idx=-1)
    token.freeze_rows(range(1, 8))
    assert token.trained_rows.tolist() == [0, 8, 9]
    assert repr(token).endswith("(11, 5, padding_idx=10, trained_rows=3)")
    token.train_rows([])
    assert torch.equal(token(torch.arange(ROWS)), token.weight)
    token.train_rows(None)
    assert type(token) is pe.TokenEmbedding
    assert [name for name, _ in token.named_parameters()] == ["weight"]
    assert token.weight.requires_grad


def test_the_table_is_whole_where_it_is_read() -> None:
    """weight, checkpoints, copies and tied modules: the values are those learned."""
    token = made()
    table = token.weight
    token.train_rows(LEARN)
    assert token.weight is table
    optimizer = torch.optim.SGD(token.parameters(), lr=0.1)
    learns(token, optimizer, torch.arange(ROWS))
    assert torch.equal(token.weight[token.trained_rows], token.trained)
    state = token.state_dict()
    assert list(state) == ["weight"]
    assert torch.equal(state["weight"], token(torch.arange(ROWS)))
    for other in (pe.TokenEmbedding(ROWS, COLUMNS), copy.deepcopy(token)):
        other.load_state_dict(state)
        assert torch.equal(other.weight, token.weight)
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        twin = copied(token)
        before = token.weight.detach().clone()
        learns(token, optimizer, torch.arange(ROWS))
        assert torch.equal(twin.weight, before)
        assert not torch.equal(twin.weight, token.weight)
        twin.load_state_dict(token.state_dict())
        assert torch.equal(twin.trained, token.trained)


def test_moves_and_resets() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, device="meta")
    token.train_rows(LEARN)
    token.to_empty(device="cpu")
    token.reset_parameters()
    assert token.trained_rows.tolist() == [4, 9, 10]
    assert token.trained.std() > 0.3
    token.double()
    assert token(torch.tensor([4])).equal(token.trained[:1])
    assert token.weight.dtype == token.trained.dtype == torch.float64


def test_optimizer_states_follow_their_rows() -> None:
    token = made()
    optimizer = torch.optim.AdamW(token.parameters(), lr=0.1)
    learns(token, optimizer, torch.arange(ROWS))
    moments = optimizer.state[token.weight]["exp_avg"].clone()
    token.train_rows(LEARN, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == [token.trained]
    assert torch.equal(optimizer.state[token.trained]["exp_avg"], moments[[4, 9, 10]])
    token.train_rows([10, 2], optimizer=optimizer)
    assert torch.equal(optimizer.state[token.trained]["exp_avg"][1], moments[10])
    assert not optimizer.state[token.trained]["exp_avg"][0].any()
    optimizer.add_param_group({"params": [token._parameters["weight"]]})
    token.train_rows(None, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == [token.weight]
    assert torch.equal(optimizer.state[token.weight]["exp_avg"][10], moments[10])
    token.train_rows([0])
    optimizer = torch.optim.SGD(token.parameters())
    token.train_rows(None, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == [token.weight]


def test_grown_tables_train_their_new_rows() -> None:
    """The rows of added tokens: resize, train, grow again."""
    token = made()
    optimizer = torch.optim.AdamW(token.parameters())
    token.resize(ROWS + 2, optimizer=optimizer)
    token.train_rows(range(ROWS, ROWS + 2), optimizer=optimizer)
    learns(token, optimizer, torch.arange(ROWS + 2))
    refused(
        (lambda: token.resize(20), ValueError, "weight: expected a table whose rows learn together.*2 learn"),
        (lambda: token.select([1]), ValueError, "weight: expected a table whose rows learn together"),
        (lambda: token.quantize(), ValueError, "weight: expected a table whose rows learn together"),
        (lambda: token.keep_on_host(), ValueError, "weight: expected a table whose rows learn together"),
    )  # fmt: skip
    moments = optimizer.state[token.trained]["exp_avg"].clone()
    token.train_rows(None, optimizer=optimizer)
    token.resize(ROWS + 3, optimizer=optimizer)
    assert torch.equal(optimizer.state[token.weight]["exp_avg"][ROWS : ROWS + 2], moments)
    assert token.num_embeddings == ROWS + 3


def test_compiled(device: torch.device) -> None:
    token = made().to(device)
    token.train_rows(LEARN)
    ids = torch.arange(ROWS, device=device)
    compiled = torch.compile(token, fullgraph=True, backend="aot_eager")
    compiled(ids).square().sum().backward()
    found, token.trained.grad = token.trained.grad, None
    token(ids).square().sum().backward()
    assert torch.equal(found, token.trained.grad)


def test_in_the_input_layer() -> None:
    embed = pe.InputEmbedding(ROWS, COLUMNS, positions=None, norm="layer")
    ids = torch.arange(ROWS).view(1, -1)
    expected = embed(ids)
    embed.token.train_rows(LEARN)
    torch.testing.assert_close(embed(ids), expected)
    embed(ids).square().sum().backward()
    assert embed.token.trained.grad.abs().sum() > 0


def test_refusals() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    token = made()
    weight = token.weight
    refused(
        (lambda: token.train_rows([11]), IndexError, "rows: expected 0 to 10.*got 11 at index 0"),
        (lambda: token.freeze_rows([-1]), IndexError, "rows: expected 0 to 10.*got -1 at index 0"),
        (lambda: token.train_rows([0], optimizer=optimizer), ValueError, "optimizer: expected one"),
        (lambda: made(max_norm=1.0).train_rows([0]), ValueError, "max_norm: expected none"),
        (lambda: made(scale_grad_by_freq=True).train_rows([0]), ValueError, "scale_grad_by_freq: "),
        (lambda: pe.PerLayerEmbedding(3, 2, 4).train_rows([0]), TypeError, "rows: .*PerLayerEmb"),
    )
    assert type(token) is pe.TokenEmbedding
    assert token.weight is weight
    assert weight.requires_grad
    token.quantize()
    refused((lambda: token.train_rows([0]), TypeError, "weight: expected a table of numbers"))
