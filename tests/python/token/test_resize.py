"""Tests TokenEmbedding.resize: remaining rows, new ones as in transformers, and optimizers."""

import posembed as pe
import pytest
import torch
from support.case import FLOATING, assert_close
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 37, 5


def generator(seed: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_rows_that_stay_keep_their_bits(dtype, requires_grad, device: torch.device) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, padding_idx=-30, dtype=dtype, device=device)
    token.requires_grad_(requires_grad)
    before = token.weight.detach().clone()
    for rows in (50, ROWS, 20, 20):
        token.resize(rows)
        kept = min(rows, ROWS)
        assert torch.equal(token.weight[:kept], before[:kept])
        assert token.weight.shape == (rows, COLUMNS)
        assert (token.num_embeddings, token.padding_idx) == (rows, 7)
        assert (token.weight.dtype, token.weight.device) == (dtype, before.device)
        assert token.weight.requires_grad == requires_grad
        assert token(torch.tensor([rows - 1], device=device)).shape == (1, COLUMNS)
        assert token.logits(torch.zeros(COLUMNS, dtype=dtype, device=device)).shape == (rows,)
    with pytest.raises(IndexError, match=r"token table of 20|token id 20 at index 0"):
        token(torch.tensor([20], device="cpu").to(token.weight.device)), pe.check_errors()


@pytest.mark.parametrize("dtype", FLOATING)
def test_mean_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    token = pe.TokenEmbedding(5000, 3, dtype=dtype, device=device)
    expected = token.weight.detach().double().mean(0)
    token.resize(5002)
    error = (token.weight[5000:].double() - expected).abs()
    assert error.max() <= expected.abs().max() * torch.finfo(dtype).eps * 4 + 1e-15


def resized_by_transformers(table: Tensor, rows: int) -> Tensor:
    """New rows as transformers adds them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=table.shape[0], n_embd=table.shape[1], n_layer=1, n_head=1, n_positions=4
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(table)
    torch.manual_seed(5)
    return model.resize_token_embeddings(rows).weight.detach()[table.shape[0] :]


def test_mean_equals_transformers() -> None:
    """Gives the mean, as transformers does if the rows' covariance has no Cholesky factor."""
    table = torch.randn(4, 8, generator=generator())
    token = pe.TokenEmbedding.from_pretrained(table)
    token.resize(7)
    assert_close(token.weight[4:], resized_by_transformers(table, 7), 1e-6)


def test_covariance_is_that_of_transformers() -> None:
    """Both draw from N(mean, 1e-9 covariance); the moments of many new rows agree with it."""
    table = torch.randn(60, 4, generator=generator()) @ torch.randn(4, 4, generator=generator(1))
    added = 20_000
    token = pe.TokenEmbedding.from_pretrained(table)
    token.resize(60 + added, "mean-and-covariance", generator=generator(2))
    covariance = torch.cov(table.double().T, correction=0)
    for rows in (token.weight[60:], resized_by_transformers(table, 60 + added)):
        deviation = (rows.double() - table.double().mean(0)) / 1e-9**0.5
        largest = covariance.diagonal().max()
        # Standard errors of a mean and a variance of 20,000 are 0.7 % and 1 %; float32 rounding of
        # rows adds 0.2 %.
        assert deviation.mean(0).abs().max() < 0.05 * largest.sqrt()
        assert (torch.cov(deviation.T) - covariance).abs().max() < 0.05 * largest


def test_covariance_of_rows_that_span_a_line() -> None:
    """New rows stay on the line; a Cholesky factor would not exist."""
    table = torch.tensor([[1.0, 2.0, 3.0]]) * torch.randn(9, 1, generator=generator())
    token = pe.TokenEmbedding.from_pretrained(table)
    token.resize(20, "mean-and-covariance", covariance_scale=1.0, generator=generator())
    new = token.weight[9:]
    assert_close(new, new[:, :1] * torch.tensor([1.0, 2.0, 3.0]), 1e-5)
    assert new[:, 0].std() > 0.1


@pytest.mark.parametrize("initialization", ["mean-and-covariance", "normal"])
def test_generator_makes_new_rows_repeatable(initialization, device: torch.device) -> None:
    results = []
    for seed in (3, 3, 4):
        token = pe.TokenEmbedding.from_pretrained(torch.arange(12.0, device=device).view(6, 2))
        token.resize(600, initialization, covariance_scale=1.0, generator=generator(seed, device))
        results.append(token.weight[6:])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    if initialization == "normal":
        assert abs(float(results[0].mean())) < 0.15
        assert abs(float(results[0].std()) - 1) < 0.15


def test_given_rows() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, dtype=torch.bfloat16)
    rows = torch.randn(3, COLUMNS)
    token.resize(ROWS + 3, rows)
    assert torch.equal(token.weight[ROWS:], rows.bfloat16())


STATES = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SparseAdam": {},
}


@pytest.mark.parametrize("name", STATES)
def test_optimizer_state_of_rows_that_stay(name: str, device: torch.device) -> None:
    """A table that grows and shrinks during training ends like one that does not."""
    form = "rows" if name in ("SparseAdam", "SGD") else "dense"
    ids = torch.randint(0, ROWS, (8, 4), generator=generator()).to(device)
    results = []
    for resizes in (False, True):
        torch.manual_seed(1)
        token = pe.TokenEmbedding(ROWS, COLUMNS, gradient=form, device=device)
        head = nn.Linear(COLUMNS, COLUMNS, device=device)
        options = {"lr": 0.1, **STATES[name]}
        parameters = [token.weight] if name == "SparseAdam" else [head.weight, token.weight]
        optimizer = getattr(torch.optim, name)(parameters, **options)
        for step in range(4):
            if resizes and step in (2, 3):
                token.resize(ROWS + 9 if step == 2 else ROWS, optimizer=optimizer)
                assert any(
                    parameter is token.weight for group in optimizer.param_groups for parameter in group["params"]
                )
            optimizer.zero_grad()
            head(token(ids)).pow(2).sum().backward()
            optimizer.step()
        results.append(token.weight.detach())
    if device.type == "cuda":  # torch adds sparse momenta with atomics, in any order
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(*results)


@pytest.mark.parametrize(("name", "state"), [("Adafactor", r"'row_var' of .37, 1."), ("LBFGS", "of list")])
def test_state_that_is_not_of_rows_is_refused(name: str, state: str) -> None:
    token, head = pe.TokenEmbedding(ROWS, COLUMNS), nn.Linear(COLUMNS, 7)
    optimizer = getattr(torch.optim, name)([head.weight, head.bias, token.weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = head(token(torch.arange(ROWS))).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    weight = token.weight
    refused((lambda: token.resize(ROWS + 1, optimizer=optimizer), ValueError, f"optimizer: expected .*, got {name} with {state}"))  # fmt: skip
    assert token.weight is weight
    assert any(weight is p for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_head_is_resized_too(name: str, bias: bool, device: torch.device) -> None:
    """Its logits of old tokens, and a model that grows and shrinks during training, stay."""
    ids = torch.randint(0, ROWS, (8, 4), generator=generator()).to(device)
    results = []
    for resizes in (False, True):
        torch.manual_seed(1)
        token = pe.TokenEmbedding(ROWS, COLUMNS, device=device)
        head = nn.Linear(COLUMNS, ROWS, bias=bias, device=device)
        parameters = [*token.parameters(), *head.parameters()]
        options = {"lr": 0.1, **STATES[name]}
        optimizer = getattr(torch.optim, name)(parameters, **options)
        for step in range(4):
            if resizes and step in (2, 3):
                before = head(token(ids))
                token.resize(
                    ROWS + 5 if step == 2 else ROWS,
                    pad_to_multiple_of=64 if step == 2 else 1,
                    head=head,
                    optimizer=optimizer,
                )
                rows = 64 if step == 2 else ROWS
                assert token.weight.shape == head.weight.shape == (rows, COLUMNS)
                assert head.out_features == rows
                logits = head(token(ids))
                torch.testing.assert_close(logits[..., :ROWS], before[..., :ROWS])
                if step == 2:
                    for new in (head.weight, head.bias) if bias else (head.weight,):
                        mean = new[:ROWS].double().mean(0).to(new).expand_as(new[ROWS:])
                        torch.testing.assert_close(new[ROWS:], mean)
            optimizer.zero_grad()
            head(token(ids))[..., :ROWS].pow(2).sum().backward()
            optimizer.step()
        results.append([p.detach() for p in (token.weight, *head.parameters())])
    for first, second in zip(*results, strict=True):  # products of another shape add differently
        torch.testing.assert_close(first, second)


def test_a_tied_head_shares_the_new_table() -> None:
    token, head = pe.TokenEmbedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS, bias=False)
    head.weight = token.weight
    optimizer = torch.optim.SGD(token.parameters())
    token.resize(ROWS + 1, torch.ones(1, COLUMNS), head=head, optimizer=optimizer)
    assert head.weight is token.weight
    assert token.weight[ROWS:].eq(1).all()
    assert optimizer.param_groups[0]["params"][0] is token.weight
    assert head.out_features == ROWS + 1


def test_a_head_that_does_not_fit_changes_nothing() -> None:
    token, head = pe.TokenEmbedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS)
    weight = token.weight
    optimizer = torch.optim.AdamW([weight, head.weight])
    for message, error, options in (
        ("head: expected 37 outputs.*, got 5", ValueError, {"head": nn.Linear(COLUMNS, 5)}),
        ("head: expected a torch.nn.Linear, got a Parameter", TypeError, {"head": weight}),
        ("pad_to_multiple_of: expected 1 or more, got 0", ValueError, {"pad_to_multiple_of": 0}),
        ("optimizer: expected one", ValueError, {"head": head, "optimizer": optimizer}),
    ):
        refused((lambda: token.resize(ROWS + 1, **options), error, message))
    assert token.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert head.out_features == ROWS == head.weight.shape[0]


def test_new_rows_begin_with_the_step_of_rprop() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    optimizer = torch.optim.Rprop(token.parameters(), lr=0.25)
    for rows in (ROWS, ROWS + 2):
        token.resize(rows, optimizer=optimizer)
        before = token.weight.detach().clone()
        optimizer.zero_grad()
        token(torch.arange(rows)).sum().backward()
        optimizer.step()
    assert torch.equal(token.weight[ROWS:], before[ROWS:] - 0.25)


def test_new_rows_begin_with_zeros_in_the_optimizer() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    optimizer = torch.optim.Adam(token.parameters())
    token.resize(ROWS + 1, optimizer=optimizer)  # before the first step: nothing to keep
    token(torch.arange(ROWS)).pow(2).sum().backward()
    optimizer.step()
    old = token.weight
    token.resize(ROWS + 3, optimizer=optimizer)
    assert old not in optimizer.state
    state = optimizer.state[token.weight]
    assert state["exp_avg"].shape == token.weight.shape
    assert state["exp_avg"][:ROWS].all()
    assert not state["exp_avg"][ROWS:].any()
    assert float(state["step"]) == 1
    assert len(optimizer.state_dict()["state"]) == 1


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("num_embeddings: expected more than padding_idx, 3, got 3", (3,)),
        ("num_embeddings: expected more than padding_idx, 3, got -1", (-1,)),
        ("initialization: expected 'mean'", (40, "median")),
        ("initialization: expected new rows of shape .3, 5., got .2, 5.", (40, torch.ones(2, 5))),
        ("initialization: expected new rows of shape .0, 5.", (30, torch.ones(1, 5))),
    ],
)  # fmt: skip
def test_errors_change_nothing(message: str, arguments: tuple) -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS, padding_idx=3)
    weight = token.weight
    refused((lambda: token.resize(*arguments), ValueError, message))
    assert token.weight is weight
    assert token.num_embeddings == ROWS


def test_other_errors() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    refused((lambda: token.resize(40, optimizer=optimizer), ValueError, "optimizer: expected one that holds the table"))  # fmt: skip
    assert token.num_embeddings == ROWS
    refused(
        (lambda: token.resize(-1), ValueError, "num_embeddings: expected 0 or more, got -1"),
        (lambda: token.resize(5.5), ValueError, "num_embeddings: expected a whole number, got 5.5"),
        (lambda: token.resize(40, generator=3), TypeError, "generator: expected a torch.Generator or None, got 3"),
        (lambda: token.resize(40, "mean-and-covariance", covariance_scale=-1.0), ValueError, "covariance_scale: expected 0 or more"),
        (lambda: pe.TokenEmbedding(0, COLUMNS).resize(2), ValueError, "weight: expected rows to take the mean of"),
    )  # fmt: skip
