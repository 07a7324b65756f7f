"""Tests of LearnedPositionalEmbedding beyond the shared tests of operators."""

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.case import FLOATING
from support.halves import AT_ONCE
from support.refusals import refused


def test_initial_values() -> None:
    torch.manual_seed(0)
    weight = pe.LearnedPositionalEmbedding(2000, 64, first_row=2).weight
    assert weight.shape == (2002, 64)
    assert abs(float(weight.std()) - 0.02) < 2e-4
    assert abs(float(weight.mean())) < 2e-4


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("aligned", [True, False])
def test_results_larger_than_caches(dtype: torch.dtype, aligned: bool) -> None:
    """Results whose rows are whole cache lines are streamed; both forms round each sum once."""
    dim = 640 if aligned else 641
    position = pe.LearnedPositionalEmbedding(1200, dim, dtype=dtype)
    x = torch.randn(3, 1200, dim, dtype=dtype)
    result = position(x)
    assert result.nbytes > 4 << 20
    assert torch.equal(result, x + position.weight)
    (gradient,) = torch.autograd.grad(result, position.weight, x)
    exact = x.double().sum(0)
    bound = torch.finfo(dtype).eps * x.double().abs().sum(0)  # for two additions and a rounding
    assert bool(((gradient.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", FLOATING)
def test_forms_agree(dtype: torch.dtype, device: torch.device) -> None:
    """offset, positions [seq], [1, seq] and [batch, seq], and encode give the same bits."""
    module = pe.LearnedPositionalEmbedding(20, 12, first_row=2, dtype=dtype, device=device)
    x = torch.randn(3, 5, 12, dtype=dtype, device=device)
    expected = module(x, offset=4)
    positions = torch.arange(4, 9, device=device)
    for given in (positions, positions[None].int(), positions.expand(3, 5), positions.expand(3, 5).int()):
        assert torch.equal(module(x, given), expected)
    assert torch.equal(x + module.encode(positions), expected)


def test_padding_positions_are_the_rows_before_the_first() -> None:
    """OPT and RoBERTa give padding position -1: row first_row - 1."""
    module = pe.LearnedPositionalEmbedding(4, 3, first_row=2)
    assert torch.equal(module.encode(torch.tensor([-2, -1, 0])), module.weight[:3])


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "x: expected the dtype of weight", lambda m: m(torch.zeros(1, 3, 4).half())),
        (ValueError, "positions: expected seq 3", lambda m: m(torch.zeros(1, 3, 4), torch.arange(2))),
        (ValueError, "positions: expected batch 1 or 2, got 3", lambda m: m(torch.zeros(2, 3, 4), torch.zeros(3, 3).int())),
        (ValueError, "offset: expected 0 where", lambda m: m(torch.zeros(1, 3, 4), torch.arange(3), offset=1)),
        (ValueError, "offset: expected 0 or more", lambda m: m(torch.zeros(1, 3, 4), offset=-1)),
        pytest.param(IndexError, "position table of 2, got -3 at index 1", lambda m: pe.LearnedPositionalEmbedding(2, 4, first_row=2).encode(torch.tensor([-2, -3])), marks=AT_ONCE),
        (ValueError, "first_row: expected 0", lambda m: pe.LearnedPositionalEmbedding(3, 4, first_row=-1)),
        (ValueError, "max_positions: expected 0", lambda m: pe.LearnedPositionalEmbedding(-3, 4)),
        (ValueError, "first_row: expected 0 to 10", lambda m: pe.functional.learned_encode(m.weight, torch.arange(2), first_row=11)),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call) -> None:
    refused((call, error, message), given=(pe.LearnedPositionalEmbedding(10, 4),))


@pytest.mark.parametrize("method", ["linear", "cubic", "repeat"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_extend(method: str, dtype: torch.dtype, device: torch.device) -> None:
    """Stretching keeps both ends and straight lines. After repeating, row p is row p mod 5."""
    module = pe.LearnedPositionalEmbedding(5, 3, first_row=2, dtype=dtype, device=device)
    line = torch.arange(5.0)[:, None] * torch.tensor([1.0, -2.0, 0.5]) + 0.25
    with torch.no_grad():
        module.weight[2:] = line
    padding = module.weight[:2].clone()
    module.extend(9, method)
    assert module.max_positions == 9
    assert module.weight.is_contiguous()
    assert module.weight.dtype == dtype
    assert torch.equal(module.weight[:2], padding)
    found = module.weight[2:].double().cpu()
    if method == "repeat":
        assert torch.equal(found, line[torch.arange(9) % 5].double())
    elif method == "linear":
        expected = torch.arange(9.0)[:, None] / 2 * torch.tensor([1.0, -2.0, 0.5]) + 0.25
        assert torch.equal(found, expected.double())
    else:
        assert torch.equal(found[::2], line.double())
        assert not torch.equal(found, line[torch.arange(9) // 2].double())
    module(torch.zeros(1, 9, 3, dtype=dtype, device=device)).sum().backward()
    assert torch.equal(module.weight.grad[2:].double().cpu(), torch.ones(9, 3).double())


@pytest.mark.parametrize("method", ["linear", "cubic", "repeat"])
def test_extend_rows_of_nothing(method: str) -> None:
    module = pe.LearnedPositionalEmbedding(5, 0, first_row=1)
    module.extend(9, method)
    assert module.weight.shape == (10, 0)
    assert module(torch.zeros(2, 9, 0)).shape == (2, 9, 0)
    refused((lambda: module.extend(8, method), ValueError, "max_positions: expected 9 or more"))


def test_extend_refuses() -> None:
    module = pe.LearnedPositionalEmbedding(5, 3)
    refused(
        (lambda: module.extend(4), ValueError, "max_positions: expected 5 or more, which .* got 4"),
        (lambda: module.extend(6, "nearest"), ValueError, "method: expected 'linear', .* got 'nearest'"),
        (lambda: module.extend(6.5), ValueError, "max_positions: expected a whole number, got 6.5"),
        (lambda: pe.LearnedPositionalEmbedding(0, 3).extend(6), ValueError, "weight: expected rows to extend"),
    )  # fmt: skip


def test_roberta_positions_are_those_of_transformers(device: torch.device) -> None:
    roberta = pytest.importorskip("transformers.models.roberta.modeling_roberta")
    ids = torch.tensor([[1, 5, 1, 7, 8], [1, 1, 1, 1, 1], [3, 4, 5, 6, 1]], device=device)
    make = roberta.RobertaEmbeddings.create_position_ids_from_input_ids
    for past in (0, 4):
        found = pe.functional.roberta_positions(ids, 1, past_length=past)
        assert torch.equal(found + 2, make(ids, 1, past))  # padding_idx + 1 is the first row
    assert torch.equal(pe.functional.fairseq_positions(ids.int(), 1), pe.functional.roberta_positions(ids, 1))


def test_opt_positions_are_those_of_transformers() -> None:
    opt = pytest.importorskip("transformers.models.opt.modeling_opt")
    table = opt.OPTLearnedPositionalEmbedding(12, 4)
    module = pe.LearnedPositionalEmbedding(12, 4, first_row=2)
    module.load_state_dict(table.state_dict())
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    for past in (0, 3):
        positions = pe.functional.opt_positions(mask, past_length=past)
        assert torch.equal(module.encode(positions), table(mask, past))


def test_positions_among_padding_refuse() -> None:
    refused(
        (lambda: pe.functional.opt_positions(torch.ones(1, 3)), TypeError, "attention_mask: expected bool, int32 or int64, got float32"),
        (lambda: pe.functional.opt_positions(torch.ones(1, 3, dtype=torch.int32), past_length=4), ValueError, "past_length: expected 0 to 3, .* got 4"),
        (lambda: pe.functional.roberta_positions(torch.ones(1, 3, dtype=torch.int32), 1, past_length=-1), ValueError, "past_length: expected 0 or more, got -1"),
    )  # fmt: skip


def test_positions_among_padding_compile() -> None:
    compiled = torch.compile(pe.functional.roberta_positions, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (5, 9):
        ids = torch.randint(0, 3, (2, seq))
        assert torch.equal(compiled(ids, 1), pe.functional.roberta_positions(ids, 1))
