"""Tests of TokenBag beyond the shared ones: agreement with nn.EmbeddingBag, gradients, errors."""

from pathlib import Path

import posembed as pe
import pytest
import torch
from support.case import FLOATING, assert_close, same_for_any_thread_count
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor, nn

ROWS, COLUMNS = 37, 5


def make_places(count: int = 200, bags: int = 30, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids and offsets, some of them equal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (count,), generator=generator)
    offsets = torch.randint(0, count + 1, (bags,), generator=generator).sort().values
    offsets[0] = 0
    offsets[10:13] = offsets[10]
    return ids.to(device), offsets.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_equals_torch(mode, padding_idx, include_last_offset, dtype, device: torch.device) -> None:
    options = {"mode": mode, "padding_idx": padding_idx, "include_last_offset": include_last_offset}
    modules = []
    for kind in (pe.TokenBag, nn.EmbeddingBag):
        torch.manual_seed(1)
        modules.append(kind(ROWS, COLUMNS, dtype=dtype, device=device, **options))
    ours, theirs = modules
    assert torch.equal(ours.weight, theirs.weight)
    ids, offsets = make_places(device=device)
    if include_last_offset:
        offsets[-1] = len(ids)
    for index in (torch.int32, torch.int64):
        ours.zero_grad(), theirs.zero_grad()
        result, expected = ours(ids.to(index), offsets.to(index)), theirs(ids, offsets)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        assert_close(result, expected, tolerance)
        gradient = torch.randn_like(expected)
        result.backward(gradient), expected.backward(gradient)
        assert_close(ours.weight.grad, theirs.weight.grad, tolerance)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_weights_and_their_gradients_equal_torch(padding_idx, device: torch.device) -> None:
    ids, offsets = make_places(device=device)
    tables = [torch.randn(ROWS, COLUMNS, device=device).requires_grad_()]
    tables.append(tables[0].detach().clone().requires_grad_())
    weights = [torch.randn(len(ids), device=device).requires_grad_()]
    weights.append(weights[0].detach().clone().requires_grad_())
    ours = pe.functional.token_bag(ids, tables[0], offsets, weights[0], padding_idx=padding_idx)
    theirs = nn.functional.embedding_bag(
        ids, tables[1], offsets, per_sample_weights=weights[1], mode="sum", padding_idx=padding_idx
    )
    assert_close(ours, theirs, 1e-6)
    ours.pow(2).sum().backward(), theirs.pow(2).sum().backward()
    assert_close(tables[0].grad, tables[1].grad, 2e-6)
    assert_close(weights[0].grad, weights[1].grad, 2e-6)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("gradient", ["dense", "rows"])
def test_sums_are_rounded_once(dtype: torch.dtype, gradient: str, device: torch.device) -> None:
    """Sums 10,240 ones, forward and backward, weighted and not."""
    ids = torch.zeros(1, 10240, dtype=torch.int64, device=device)
    table = torch.ones(2, 8, dtype=dtype, device=device)
    for weights in (None, torch.ones(1, 10240, dtype=dtype, device=device)):
        bag = pe.TokenBag.from_pretrained(table, freeze=False, gradient=gradient)
        output = bag(ids, weights=weights)
        assert output.double().eq(10240).all()
        output.sum().backward()
        found = bag.weight.grad.to_dense().double()
        assert found[0].eq(10240).all()
        assert found[1].eq(0).all()


def gradient_of(gradient: str, mode: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    torch.manual_seed(2)
    bag = pe.TokenBag(ROWS, COLUMNS, mode, padding_idx=5, gradient=gradient, dtype=dtype, device=device)
    output = bag(*make_places(60, device=device))
    slope = torch.linspace(-1, 1, output.numel(), device=device)
    output.backward(slope.view_as(output).to(dtype))
    return bag.weight.grad


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_rows_form_has_each_touched_row_once_in_order(dtype, mode, device: torch.device) -> None:
    rows, dense = (gradient_of(form, mode, dtype, device) for form in ("rows", "dense"))
    expected = make_places(60, device=device)[0].unique()
    assert torch.equal(rows._indices(), expected[expected != 5].unsqueeze(0))
    assert torch.equal(rows.to_dense(), dense)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("mode", ["sum", "weighted", "mean"])
def test_wide_tables_gradient_is_read_from_the_bags(mode, dtype, device: torch.device) -> None:
    """Compares with a float64 sum, for more columns than registers; equal bits for any threads."""
    torch.manual_seed(4)
    columns, size = 700, 130
    ids = torch.randint(ROWS, (40, size), device=device)
    ids[:, ::2] = 2  # one id with many spans of places
    weights = torch.randn(40, size, device=device).to(dtype) if mode == "weighted" else None
    gradient = torch.randn(40, columns, device=device).to(dtype)
    kind = "mean" if mode == "mean" else "sum"
    bag = pe.TokenBag(ROWS, columns, kind, padding_idx=1, dtype=dtype, device=device)
    found = same_for_any_thread_count(lambda: torch.autograd.grad(bag(ids, weights=weights), bag.weight, gradient))
    factors = torch.ones(40, size, device=device).double() if weights is None else weights.double()
    factors = factors.masked_fill(ids.eq(1), 0)
    if mode == "mean":
        factors = factors / ids.ne(1).sum(1, keepdim=True)
    shares = gradient.double().unsqueeze(1) * factors.unsqueeze(2)
    expected = torch.zeros(ROWS, columns, device=device).double()
    expected.index_add_(0, ids.flatten(), shares.flatten(0, 1))
    assert_close(found[0].double(), expected, {2: 1e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize])


def test_ids_of_no_bag_get_no_gradient(device: torch.device) -> None:
    ids, none = torch.tensor([3, 1], device=device), torch.zeros(0, COLUMNS, device=device)
    offsets = torch.zeros(0, dtype=torch.int64, device=device)
    backward = torch.ops.posembed.token_bag_backward
    assert not backward(none, ROWS, ids, offsets).any()


def test_rows_form_refuses_second_derivatives() -> None:
    bag = pe.TokenBag(ROWS, COLUMNS, gradient="rows")
    loss = bag(*make_places()).pow(2).sum()
    (first,) = torch.autograd.grad(loss, bag.weight, create_graph=True)
    refused((first.to_dense().sum().backward, NotImplementedError, "gradient='dense'"))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_empty_bags_are_zeros(mode: str, device: torch.device) -> None:
    bag = pe.TokenBag(4, 3, mode, padding_idx=1, device=device)
    ids = torch.tensor([2, 1, 1], device=device)
    output = bag(ids, torch.tensor([0, 1, 1], device=device))  # one id, none, only padding
    assert_close(output[0], bag.weight[2], 1e-6)
    assert not output[1:].any()
    assert bag(torch.zeros(2, 0, dtype=torch.int64, device=device)).eq(0).all()
    output.sum().backward()
    assert bag.weight.grad[2].eq(1).all()
    assert not bag.weight.grad[[0, 1, 3]].any()


def test_maximum_keeps_the_first_of_equals_and_every_nan() -> None:
    weight = torch.tensor([[1.0, 5.0], [1.0, float("nan")], [-float("inf"), 7.0]])
    pooled, places = torch.ops.posembed.token_bag_max(weight, torch.tensor([[2, 0, 1, 0]]))
    assert pooled[0, 0] == 1
    assert pooled[0, 1].isnan()
    assert places.tolist() == [[1, 2]]
    lowest, places = torch.ops.posembed.token_bag_max(weight, torch.tensor([[2]]))
    assert lowest[0, 0] == -float("inf")
    assert places.tolist() == [[0, 0]]


def test_shared_table_gives_means_of_a_token_embedding() -> None:
    token = pe.TokenEmbedding(ROWS, COLUMNS)
    bag = pe.TokenBag.from_pretrained(token.weight, freeze=False, mode="mean")
    ids = torch.randint(0, ROWS, (4, 6))
    assert_close(bag(ids), token(ids).mean(1), 1e-6)
    assert bag.weight.data_ptr() == token.weight.data_ptr()
    assert not pe.TokenBag.from_pretrained(token.weight.detach()).weight.requires_grad
    refused((lambda: pe.TokenBag.from_pretrained(torch.zeros(3)), ValueError, "embeddings: expected"))  # fmt: skip


def test_weights_have_torchs_name_too() -> None:
    bag, ids, weights = (pe.TokenBag(9, 4), torch.tensor([[1, 2, 2]]), torch.tensor([[0.5, 2.0, 1.0]]))
    assert torch.equal(bag(ids, per_sample_weights=weights), bag(ids, weights=weights))
    refused((lambda: bag(ids, None, weights, per_sample_weights=weights), ValueError, "per_sample_weights: expected none beside weights"))  # fmt: skip


def test_from_file_pools_the_rows_of_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("the 0.5 0.25\ncat 1 2\n")
    bag = pe.TokenBag.from_file(path, vocabulary=["cat", "dog", "the"], missing="zero", mode="mean")
    assert bag(torch.tensor([[0, 2]])).tolist() == [[0.75, 1.125]]
    assert bag.weight.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.5, 0.25]]
    assert not bag.weight.requires_grad
    trained = pe.TokenBag.from_file(path, gradient="rows", freeze=False, padding_idx=1)
    trained(torch.tensor([[0, 1]])).sum().backward()
    assert trained.weight.grad.coalesce().indices().tolist() == [[0]]


@AT_ONCE
@pytest.mark.parametrize(
    ("offsets", "last", "value", "place"),
    [
        ([1, 2], False, 1, 0),
        ([0, 3, 2], False, 2, 2),
        ([0, 5], False, 5, 1),
        ([0, -1], False, -1, 1),
        ([0, 2, 3], True, 3, 2),
        ([3], True, 3, 0),
    ],
)
def test_offsets_that_do_not_fit_cpu(offsets: list[int], last: bool, value: int, place: int) -> None:
    refused((lambda: pe.functional.token_bag(torch.zeros(4, dtype=torch.int64), torch.zeros(ROWS, COLUMNS), torch.tensor(offsets), include_last_offset=last), IndexError, f"offsets: expected 0.*got {value} at index {place}"))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("columns", [1, 5, 64, 768])
def test_cuda_has_the_bits_of_the_cpu(mode: str, dtype: torch.dtype, columns: int) -> None:
    ids, offsets = make_places(4000)
    weight = torch.randn(ROWS, columns).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        table = weight.to(device, copy=True).requires_grad_()
        output = pe.functional.token_bag(ids.to(device), table, offsets.to(device), mode=mode, padding_idx=4)
        output.backward(output.detach())
        results.append((output.detach().cpu(), table.grad.cpu()))
    for cpu, cuda in zip(*results, strict=True):
        assert torch.equal(cpu, cuda)


@pytest.mark.gpu
def test_bad_offsets_cuda(cuda: torch.device) -> None:
    bag = pe.TokenBag(ROWS, COLUMNS, device=cuda)
    ids, offsets = make_places(device=cuda)
    expected = bag(ids, offsets)
    wrong = offsets.clone()
    wrong[3] = 999
    output = bag(ids, wrong)
    refused((pe.check_errors, IndexError, "bag offset 999 at index 3"))
    assert output.isfinite().all()
    assert torch.equal(bag(ids, offsets), expected)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "mode: expected 'sum'", lambda bag, ids: bag(ids, mode="median")),
        (ValueError, "ids: expected .count. beside", lambda bag, ids: bag(ids, offsets=ids[0])),
        (TypeError, "ids: expected int32", lambda bag, ids: bag(ids.float())),
        (TypeError, "offsets: expected int32", lambda bag, ids: bag(ids[0], offsets=torch.zeros(1))),
        (ValueError, "offsets: expected .bags.", lambda bag, ids: bag(ids[0], offsets=ids)),
        (ValueError, "offsets: expected the end", lambda bag, ids: bag(ids[0], offsets=ids[0, :0], include_last_offset=True)),
        (ValueError, "weights: expected none with mode 'mean'", lambda bag, ids: bag(ids, weights=torch.zeros(2, 3), mode="mean")),
        (ValueError, "weights: expected none with mode .*xxx...", lambda bag, ids: torch.ops.posembed.token_bag_backward(torch.zeros(2, 4), 10, ids, None, -1, False, 9000 * "x", torch.zeros(2, 3))),
        (ValueError, "weights: expected the shape of ids", lambda bag, ids: bag(ids, weights=torch.zeros(2, 2))),
        (TypeError, "weights: expected the dtype", lambda bag, ids: bag(ids, weights=torch.zeros(2, 3).double())),
        (ValueError, r"weight: expected \[num_embeddings, embedding_dim\], got \[\]", lambda bag, ids: pe.functional.token_bag(ids, torch.tensor(1.0))),
        (ValueError, "padding_idx: expected", lambda bag, ids: bag(ids, padding_idx=ROWS)),
        (ValueError, "gradient: expected", lambda bag, ids: bag(ids, gradient="columns")),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call) -> None:
    def bag(ids, **options):
        return pe.functional.token_bag(ids, torch.zeros(ROWS, COLUMNS), **options)

    refused((call, error, message), given=(bag, torch.zeros(2, 3, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("mode: expected", {"mode": "median"}),
        ("padding_idx: expected a whole number, got 1.5", {"padding_idx": 1.5}),
        ("gradient: expected", {"gradient": "columns"}),
        ("include_last_offset: expected True or False", {"include_last_offset": "no"}),
    ],
)  # fmt: skip
def test_module_refuses_at_once(message: str, options: dict) -> None:
    refused((lambda: pe.TokenBag(ROWS, COLUMNS, **options), ValueError, message))
