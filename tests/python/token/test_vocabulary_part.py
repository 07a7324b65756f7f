"""Tests that results of parts of a vocabulary add up to those of the whole table, bit for bit."""

import itertools

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.refusals import refused
from torch import Tensor

ROWS, COLUMNS = 103, 24
STARTS = (0, 1, 40, 77, ROWS)  # uneven on purpose
OPTIONS = [{}, {"padding_idx": 50, "scale": 3.0}, {"scale_grad_by_freq": True, "padding_idx": 0}]


def make(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A table, ids, some of them frequent, and the gradient of the looked-up rows."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, device=device).to(dtype)
    ids = torch.cat([torch.randint(ROWS, (500,)), torch.full((150,), 41)])
    ids = ids[torch.randperm(650)].view(13, 50).to(device)
    return weight, ids, torch.randn(13, 50, COLUMNS, device=device).to(dtype)


def look_up(weight: Tensor, ids: Tensor, direction: Tensor, **options) -> tuple[Tensor, Tensor]:
    """The rows, and the table's gradient."""
    leaf = weight.clone().requires_grad_()
    rows = pe.functional.embedding(ids, leaf, **options)
    rows.backward(direction)
    return rows.detach(), leaf.grad


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("form", ["dense", "rows"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parts_add_up_to_the_whole(dtype, form, options, device: torch.device) -> None:
    weight, ids, direction = make(dtype, device)
    options = options | {"gradient": form}
    rows, whole = look_up(weight, ids, direction, **options)
    sum_of_rows, parts = torch.zeros_like(rows), []
    for start, end in itertools.pairwise(STARTS):
        part, of_part = look_up(weight[start:end], ids, direction, vocabulary_start=start, **options)
        outside = (ids < start) | (ids >= end)
        assert not part[outside].any()
        sum_of_rows += part
        parts.append(of_part.to_dense())
    assert torch.equal(sum_of_rows, rows)
    assert torch.equal(torch.cat(parts), whole.to_dense())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_any_id_is_legal(index: torch.dtype, device: torch.device) -> None:
    limits = torch.iinfo(index)
    ids = torch.tensor([limits.min, -1, 0, 4, 5, 9, 10, limits.max], dtype=index, device=device)
    weight = torch.randn(5, 3, device=device, requires_grad=True)
    for start in (5, 2**62):
        rows = pe.functional.embedding(ids, weight, vocabulary_start=start)
        inside = torch.tensor([4, 5] if start == 5 else [])
        expected = torch.zeros(8, 3, device=device)
        expected[inside.long()] = weight[[0, 4]] if start == 5 else weight[[]]
        assert torch.equal(rows, expected)
        (found,) = torch.autograd.grad(rows.sum(), weight)
        assert torch.equal(found.sum(-1) > 0, torch.tensor([start == 5, 0, 0, 0, start == 5]).bool().to(device))
    pe.check_errors()


def test_rows_form_counts_rows_of_the_part(device: torch.device) -> None:
    weight = torch.randn(5, 3, device=device, requires_grad=True)
    ids = torch.tensor([12, 99, 10, 12, 3], device=device)
    rows = pe.functional.embedding(ids, weight, vocabulary_start=10, gradient="rows")
    rows.sum().backward()
    assert weight.grad._indices().tolist() == [[0, 2]]
    assert weight.grad._values()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_start": -1}, "vocabulary_start: expected an id"),
        ({"vocabulary_start": 2**62 + 1}, "vocabulary_start: expected -1"),
        ({"vocabulary_start": 4, "padding_idx": -2}, "padding_idx: expected an id"),
    ],
)  # fmt: skip
def test_errors(options: dict, message: str) -> None:
    refused((lambda: pe.functional.embedding(torch.zeros(2).long(), torch.zeros(3, 2), **options), ValueError, message))  # fmt: skip


def test_padding_may_be_of_another_part() -> None:
    weight = torch.randn(5, 3)
    ids = torch.tensor([10, 99])
    rows = pe.functional.embedding(ids, weight, vocabulary_start=10, padding_idx=99)
    assert torch.equal(rows, torch.stack([weight[0], torch.zeros(3)]))
