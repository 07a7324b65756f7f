"""Indices outside their tables, of every operator that has some: named at once on the CPU, and later on CUDA."""

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from support.halves import AT_ONCE
from support.refusals import refused
from torch import Tensor

ROWS, COLUMNS, COUNT = 37, 8, 600  # more indices than are searched together
OPERATORS = torch.ops.posembed


def like(indices: Tensor, *sizes: int) -> Tensor:
    return torch.ones(sizes, device=indices.device)


def table(indices: Tensor) -> Tensor:
    return torch.arange(1.0, ROWS * COLUMNS + 1, device=indices.device).view(ROWS, COLUMNS)


def backward_of_bags(name: str) -> Callable[[Tensor], Any]:
    operator = getattr(OPERATORS, name)
    first = table if name == "token_bag_weights_backward" else (lambda _: ROWS)
    return lambda ids: operator(like(ids, 3, COLUMNS), first(ids), ids.view(3, -1))


def quantized(ids: Tensor) -> Tensor:
    codes = functional.quantize_rows(table(ids), "int8")
    return functional.embedding_quantized(ids, *codes)


# The kind of index, and a call whose result has a row for each; or none, if its rows are no index's.
LOOK_UPS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "embedding": ("token id", lambda ids: functional.embedding(ids, table(ids))),
    "embedding_quantized": ("token id", quantized),
    "input_embedding": ("token id", lambda ids: functional.input_embedding(ids[None], table(ids))[0]),
    "input_embedding, normed": ("token id", lambda ids: functional.input_embedding(ids[None], table(ids), norm="layer")[0]),
    "input_embedding, wide rows": ("token id", lambda ids: functional.input_embedding(ids[None], table(ids).repeat(1, 513), norm="layer")[0]),
    "input_embedding, types of wide rows": ("token type", lambda types: functional.input_embedding(types[None] % ROWS, table(types).repeat(1, 513), token_type=table(types).repeat(1, 513), types=types[None])[0]),
    "input_embedding, types": ("token type", lambda types: functional.input_embedding(types[None] % ROWS, table(types), token_type=table(types), types=types[None])[0]),
    "input_embedding, positions": ("position", lambda places: functional.input_embedding(places[None] % ROWS, table(places), position=table(places), positions=places)[0]),
    "learned_add": ("position", lambda places: functional.learned_add(like(places, 1, COUNT, COLUMNS), table(places), places)[0]),
    "learned_encode": ("position", lambda places: functional.learned_encode(table(places), places)),
    "token_bag": ("token id", lambda ids: functional.token_bag(ids[:, None], table(ids))),
}  # fmt: skip
OTHERS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "embedding_backward": ("token id", lambda ids: OPERATORS.embedding_backward(like(ids, COUNT, COLUMNS), ROWS, ids)),
    "embedding_backward_rows": ("token id", lambda ids: OPERATORS.embedding_backward_rows(like(ids, COUNT, COLUMNS), ROWS, ids)),
    "token_bag_backward": ("token id", backward_of_bags("token_bag_backward")),
    "token_bag_weights_backward": ("token id", backward_of_bags("token_bag_weights_backward")),
    "token_bag, maxima": ("token id", lambda ids: functional.token_bag(ids.view(3, -1), table(ids), mode="max")),
}  # fmt: skip
VALUES = [ROWS, -1, 2**32 + 5, -(2**63), 2**63 - 1]


def indices(value: int, place: int) -> Tensor:
    ids = torch.arange(COUNT) % ROWS
    ids[place] = value
    return ids


@AT_ONCE
@pytest.mark.parametrize("place", [0, COUNT - 1])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", [*LOOK_UPS, *OTHERS])
def test_on_the_cpu(name: str, value: int, place: int) -> None:
    _, call = (LOOK_UPS | OTHERS)[name]
    message = f"expected 0 to {ROWS - 1}, got {value} at index {place}"
    refused((lambda: call(indices(value, place)), IndexError, message))


@pytest.mark.gpu
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", LOOK_UPS)
def test_on_cuda(name: str, value: int, cuda: torch.device) -> None:
    """The row is zeros, other rows are as they would be, and the next call is well."""
    kind, call = LOOK_UPS[name]
    expected = call(indices(5, 17).to(cuda))
    found = call(indices(value, 17).to(cuda))
    refused((pe.check_errors, IndexError, f"{kind} {value} at index 17"))
    pe.check_errors()
    assert not found[17].any()
    others = torch.arange(COUNT, device=cuda) != 17
    assert torch.equal(found[others], expected[others])
    assert torch.equal(call(indices(5, 17).to(cuda)), expected)
    pe.check_errors()
