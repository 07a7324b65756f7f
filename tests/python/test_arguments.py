"""Tests that arguments of a wrong type, and unknown options, raise one line that says what to pass."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from posembed import functional
from posembed.modules.rotary import SizedOptions
from posembed.specifications import RotaryFields
from support.calls import functions
from support.refusals import refused

IDS, TABLE = torch.tensor([[0, 1, 2]]), torch.ones(5, 4)


def optional(function: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is None or "None" in str(parameter.annotation)


@pytest.mark.parametrize("name", functions())
def test_what_is_not_a_tensor_is_refused_by_name(name: str) -> None:
    function, arguments = getattr(functional, name), functions()[name]
    function(**arguments)
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        wrong: list[tuple[object, str]] = [
            ([1], f"{argument}: expected a Tensor, got a list; torch.tensor({argument})"),
            (np.ones((20, 20)), f"{argument}: expected a Tensor, got a numpy array; torch.from_numpy({argument})"),
            ("3", f"{argument}: expected a Tensor, got a str"),
        ]
        if not optional(function, argument):
            wrong.append((None, f"{argument}: expected a Tensor, got None"))
        for given, message in wrong:
            with pytest.raises(TypeError) as caught:
                function(**{**arguments, argument: given})
            assert str(caught.value).replace("none", "None") == message


@pytest.mark.parametrize("name", functions())
def test_an_unknown_argument_is_refused_by_the_function_that_was_called(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}(\(\)|: no argument).*'cosine'"):
        getattr(functional, name)(**functions()[name], cosine=1)


def test_every_function_of_tensors_is_tried() -> None:
    takes = {
        name
        for name in functional.__all__
        if name.islower() and "Tensor" in str(inspect.signature(getattr(functional, name)).parameters)
    }
    assert takes - {"alibi_slopes"} == set(functions())


def test_other_errors_of_operators_pass_unchanged() -> None:
    quantized = torch.quantize_per_tensor(TABLE, 0.1, 0, torch.qint8)
    refused((lambda: functional.embedding(IDS, quantized), NotImplementedError, "Could not run"))


def test_rotary_embedding_takes_its_sizes_by_name() -> None:
    named = pe.RotaryEmbedding(head_dim=4, base=500.0)
    assert named.spec == pe.RotaryEmbedding(spec=pe.RotarySpec(4, base=500.0)).spec
    assert named.spec == pe.RotaryEmbedding(named.spec).spec
    refused((lambda: pe.RotaryEmbedding(spec=4), TypeError, "spec: expected a RotarySpec, got int"))


def test_typed_options_are_those_of_the_specification() -> None:
    fields = {f.name: f.type for f in dataclasses.fields(pe.RotarySpec) if f.init}
    del fields["head_dim"]
    assert RotaryFields.__annotations__.keys() == fields.keys()
    declared = {name: hint.__forward_arg__ for name, hint in RotaryFields.__annotations__.items()}
    assert declared == fields
    signature = inspect.signature(pe.RotaryEmbedding.__init__)
    named = set(signature.parameters) - {"self", "options", "spec", "head_dim"}
    assert named == set(SizedOptions.__annotations__) - set(fields) | {"numerics"}


def test_errors_of_a_subclass_are_its_own() -> None:
    """Only calls that Python refuses are answered, whatever a user's annotations say."""

    class Own(pe.RotaryEmbedding):
        def forward(self, ids, *more, **kw: "Missing"):  # type: ignore[name-defined,no-untyped-def,override]  # noqa: F821
            raise TypeError("its own")

    class Plain(pe.RotaryEmbedding):
        def forward(self, ids, **kw):  # type: ignore[no-untyped-def,override]
            raise TypeError("its own")

    for call in (lambda: Own(8)(1, 2, 3, other=4), lambda: Plain(8)(1, other=4)):
        with pytest.raises(TypeError, match=r"^its own$"):
            call()
