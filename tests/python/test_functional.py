"""Tests that each function calls its operator, which modes and subclasses see."""

from typing import Any

import pytest
from posembed import functional
from support.calls import functions
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Operators of other names than their functions.
OPERATORS = {
    "fairseq_positions": "learned_positions",
    "opt_positions": "learned_positions",
    "roberta_positions": "learned_positions",
    "rerotate_": "rotary_rerotate_",
    "rotary": "rotary_pair",
    "rotary_": "rotary_pair_",
    "rotary_tables": "rotary_tables_pair",
    "rotary_tables_": "rotary_tables_pair_",
    "sinusoidal": "sinusoidal_add",
}


class Recorder(TorchFunctionMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", functions())
def test_modes_see_the_operator(name: str) -> None:
    given = functions()[name]
    with Recorder() as recorder:
        getattr(functional, name)(**given)
    assert OPERATORS.get(name, name) in {seen.partition(".")[0] for seen in recorder.names}


class Subclass(Tensor):
    """A subclass whose calls return its own type, as torch's default does."""


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("embedding", "weight"),
        ("input_embedding", "position"),
        ("learned_add", "x"),
        ("alibi_add", "slopes"),
        ("rotary", "query"),
    ],
)
def test_subclasses_see_the_operator(name: str, argument: str) -> None:
    given = functions()[name]
    given[argument] = given[argument].as_subclass(Subclass)
    found = getattr(functional, name)(**given)
    assert type(found[0] if isinstance(found, tuple) else found) is Subclass
