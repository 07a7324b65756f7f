"""Tests that arguments of a wrong type, and unknown options, raise one line that says what to pass."""

import dataclasses
import inspect
import re
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

SPEC, WAVES = pe.RotarySpec(4), pe.SinusoidalSpec(4)
IDS, TABLE = torch.tensor([[0, 1, 2]]), torch.ones(5, 4)
ROWS, HEADS = torch.ones(1, 3, 4), torch.ones(1, 3, 2, 4)


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


def test_every_function_of_tensors_is_tried() -> None:
    takes = {
        name
        for name in functional.__all__
        if name.islower() and "Tensor" in str(inspect.signature(getattr(functional, name)).parameters)
    }
    assert takes - {"alibi_slopes"} == set(functions())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pe.RotaryEmbedding(4)(HEADS, offset=1.5), "offset: expected an int, got a float"),
        (lambda: pe.RotaryEmbedding(4)(HEADS, offset=None), "offset: expected an int, got None"),
        (lambda: pe.RotaryEmbedding(4)(None), "query: expected a Tensor, got None"),
        (lambda: pe.RotaryEmbedding(4)(None, HEADS), "query: expected a Tensor, got none"),
        (lambda: pe.RotaryEmbedding(4)(HEADS, inverse="no"), "inverse: expected a bool, got a str"),
        (lambda: functional.rotary(HEADS, spec=SPEC, layout=None), "layout: expected a str, got None"),
        (lambda: pe.LearnedPositionalEmbedding(5, 4)(ROWS, [0, 1, 2]), "positions: expected a Ten"),
        (lambda: pe.SinusoidalPositionalEmbedding(4)([1.0]), "x: expected a Tensor, got a list"),
        (lambda: pe.SinusoidalPositionalEmbedding(4)(ROWS, offset=0.5), "offset: expected an int"),
        (lambda: pe.TokenEmbedding(5, 4)([1, 2]), "ids: expected a Tensor, got a list"),
        (lambda: pe.TokenEmbedding(5, 4)(2), "ids: expected a Tensor, got an int"),
        (lambda: pe.TokenBag(5, 4)([[1, 2]]), "ids: expected a Tensor, got a list"),
        (lambda: pe.InputEmbedding(5, 4, max_positions=4)([[1]]), "ids: expected a Tensor, got a"),
        (lambda: pe.ALiBi(2)(4.0), "query_length: expected an int, got a float"),
        (lambda: pe.ALiBi(2)(4, dtype="half"), "dtype: expected a torch.dtype, got a str"),
        (lambda: pe.ALiBi(2).add_([1.0]), "scores: expected a Tensor, got a list"),
        (lambda: pe.RelativePositionBias(2)(4.0), "query_length: expected an int, got a float"),
        (lambda: pe.permute_rotary_weight([1], 1, to="interleaved"), "weight: expected a Tensor"),
        (lambda: functional.sinusoidal_shift_matrix("3", spec=WAVES), "distance: expected a float, got a s"),
    ],
)  # fmt: skip
def test_modules_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match="^" + re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_tensor_without_strides_is_refused_in_one_line() -> None:
    for call, name in (
        (lambda: functional.embedding(IDS.to_sparse(), TABLE), "ids"),
        (lambda: pe.RotaryEmbedding(4)(HEADS.to_sparse()), "query"),
        (lambda: pe.RotaryEmbedding(4)(HEADS, HEADS.to_sparse()), "key"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}: expected a Tensor with strides, got torch.sp"):
            call()


def test_other_errors_of_operators_pass_unchanged() -> None:
    quantized = torch.quantize_per_tensor(TABLE, 0.1, 0, torch.qint8)
    refused((lambda: functional.embedding(IDS, quantized), NotImplementedError, "Could not run"))


def test_rotary_embedding_takes_its_sizes_by_name() -> None:
    named = pe.RotaryEmbedding(head_dim=4, base=500.0)
    assert named.spec == pe.RotaryEmbedding(spec=pe.RotarySpec(4, base=500.0)).spec
    assert named.spec == pe.RotaryEmbedding(named.spec).spec
    for wrong in ({}, {"head_dim": 4, "spec": SPEC}):
        with pytest.raises(TypeError, match=r"^head_dim: expected it or a RotarySpec, got "):
            pe.RotaryEmbedding(**wrong)
    with pytest.raises(TypeError, match=r"^spec: expected a RotarySpec, got int"):
        pe.RotaryEmbedding(spec=4)
    with pytest.raises(ValueError, match=r"^base: expected none beside a RotarySpec"):
        pe.RotaryEmbedding(SPEC, base=5.0)


@pytest.mark.parametrize(
    ("option", "meant"), [("bse", "base"), ("theta", "base"), ("dim", "head_dim"), ("rope_scaling", "scaling")]
)
def test_an_unknown_option_has_a_guess(option: str, meant: str) -> None:
    start = f"RotaryEmbedding: no option '{option}'; did you mean {meant}? It has head_dim, "
    with pytest.raises(TypeError, match="^" + re.escape(start)):
        pe.RotaryEmbedding(4, **{option: 4})
    with pytest.raises(TypeError, match=r"^RotaryEmbedding: no option 'cosine'\. It has "):
        pe.RotaryEmbedding(4, cosine=4)


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
