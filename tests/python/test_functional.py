"""Tests that each function calls its operator, which modes and subclasses see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

IDS = torch.tensor([[3, 0, 4]])
TABLE = torch.randn(5, 8)
ROWS = torch.randn(1, 3, 8)
SCORES = torch.randn(1, 2, 3, 3)
SLOPES = functional.alibi_slopes(2)
HEADS = torch.randn(1, 3, 2, 8)
SPEC = pe.RotarySpec(8)


def in_place(function: Callable[..., None], tensor: Tensor, *others: Any, **options: Any) -> Tensor:
    changed = tensor.clone()
    function(changed, *others, **options)
    return changed


CALLS: dict[str, Callable[[], Any]] = {
    "embedding": lambda: functional.embedding(IDS, TABLE, padding_idx=-1, scale=3.0),
    "input_embedding": lambda: functional.input_embedding(
        IDS,
        TABLE,
        TABLE,
        torch.tensor([[2, 1, 0]]),
        TABLE[:2],
        torch.tensor([[0, 1, 1]]),
        TABLE[0],
        TABLE[1],
        first_row=2,
        norm="layer",
        eps=1e-3,
        scale=2.0,
        dropout=0.5,
        seed=torch.tensor([7]),
        first_token=4,
    ),
    "learned_add": lambda: functional.learned_add(ROWS, TABLE, offset=1, first_row=1),
    "sinusoidal_add": lambda: functional.sinusoidal(
        ROWS, scale=torch.tensor([2.0]), spec=pe.SinusoidalSpec(8), offset=5
    ),
    "alibi_add": lambda: functional.alibi_add(
        SCORES, SLOPES, scale=0.5, query_offset=1, causal=False
    ),
    "alibi_add_": lambda: in_place(
        functional.alibi_add_, SCORES, SLOPES, attention_mask=torch.ones(1, 3, dtype=torch.bool)
    ),
    "alibi_softmax": lambda: functional.alibi_softmax(
        SCORES, SLOPES, key_positions=torch.arange(3)
    ),
    "alibi_softmax_": lambda: in_place(
        functional.alibi_softmax_, SCORES, SLOPES, scale=0.5, apply_mask=False
    ),
    "rotary": lambda: functional.rotary(HEADS, spec=SPEC, offset=2, inverse=True),
    "rotary_": lambda: in_place(functional.rotary_, HEADS, spec=SPEC, offset=2),
    "norm_rotary": lambda: functional.norm_rotary(
        HEADS, HEADS, TABLE[0], TABLE[1], spec=SPEC, eps=1e-3
    ),
}


class Recorder(TorchFunctionMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_modes_see_the_operator(name: str) -> None:
    with Recorder() as recorder:
        CALLS[name]()
    assert name in {seen.partition(".")[0] for seen in recorder.names}


class Subclass(Tensor):
    """A subclass whose calls return its own type, as torch's default does."""


SEEN: dict[str, Callable[[], Tensor]] = {
    "embedding": lambda: functional.embedding(IDS, TABLE.as_subclass(Subclass)),
    "input_embedding": lambda: functional.input_embedding(IDS, TABLE, TABLE.as_subclass(Subclass)),
    "learned_add": lambda: functional.learned_add(ROWS.as_subclass(Subclass), TABLE),
    "alibi_add": lambda: functional.alibi_add(SCORES, SLOPES.as_subclass(Subclass)),
    "rotary": lambda: functional.rotary(HEADS.as_subclass(Subclass), spec=SPEC),
}


@pytest.mark.parametrize("name", SEEN)
def test_subclasses_see_the_operator(name: str) -> None:
    assert type(SEEN[name]()) is Subclass
