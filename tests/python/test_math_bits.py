"""torch's negative and conjugate bits: views whose memory holds other numbers than they stand for.

Every tensor argument of every operator gets such a view: results are those of a copy without the
bit, and an argument that is written is refused before anything is written.
"""

import functools
from typing import Any

import posembed as pe
import pytest
import torch
from support import calls
from support.calls import Arguments, x
from support.refusals import refused
from torch import Tensor

# A composition is refused by an operator in it, under whose name for the argument.
COMPOSED = {"mla_rotary_cache_": {"cache": "key_cache"}}

# Writes by torch's copy_, which knows the bits.
WRITES_THROUGH = {"rotary_rerotate_"}


@functools.cache
def calls_of() -> dict[str, list[Arguments]]:
    """Calls of each operator that takes a tensor."""
    found: dict[str, list[Arguments]] = {}
    for case in calls.every():
        torch.manual_seed(0)
        sample = case.sample(2, 3, "cpu", case.dtypes[0])
        names = [argument.name for argument in case.operator._schema.arguments]
        arguments = {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}
        found.setdefault(case.operator._opname, []).append(arguments)
    return found


def tensors_of(name: str) -> dict[str, bool]:
    """The tensor arguments of an operator, and whether it writes them."""
    arguments = getattr(torch.ops.posembed, name).default._schema.arguments
    return {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in arguments
        if "Tensor" in str(argument.type)
    }


def negative(value: Tensor) -> Tensor:
    """The same numbers, as a view with the negative bit."""
    view = torch._neg_view(-value)
    assert view.is_neg()
    assert torch.equal(view.resolve_neg(), value)
    return view


def conjugate(value: Tensor) -> Tensor:
    """Complex numbers as a view with the conjugate bit."""
    return torch.complex(value.float(), value.float()).conj()


def outcome(name: str, arguments: Arguments) -> list[Any]:
    """What a call returns or raises, then the contents of its tensors."""
    try:
        results = getattr(torch.ops.posembed, name).default(**arguments)
        found = results if isinstance(results, tuple) else (results,)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        found = (type(error), str(error).partition("\n")[0])
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    return [contents(value) for value in (*found, *tensors)]


def contents(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    plain = value.resolve_conj().resolve_neg().to_dense()
    return plain.dtype, plain.shape, plain.flatten().view(torch.uint8).numpy().tobytes()


def copied(arguments: Arguments) -> Arguments:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in arguments.items()}


def check(name: str, argument: str, arguments: Arguments, with_bit: Tensor) -> None:
    """Compares a call whose argument has a bit with one of the same numbers."""
    torch.manual_seed(0)
    resolved = with_bit.resolve_conj().resolve_neg()
    plain = outcome(name, {**copied(arguments), argument: resolved.clone()})
    other = {**copied(arguments), argument: with_bit}
    before = {key: contents(value) for key, value in other.items()}
    torch.manual_seed(0)
    found = outcome(name, other)
    if tensors_of(name)[argument] and name not in WRITES_THROUGH:
        assert found[0] is ValueError
        named = COMPOSED.get(name, {}).get(argument, argument)
        assert found[1].startswith(f"{named}: expected memory that holds its numbers")
        assert {key: contents(value) for key, value in other.items()} == before
    else:
        assert found == plain


@pytest.mark.parametrize("name", [name for name in calls_of() if tensors_of(name)])
def test_every_argument_may_be_a_view_with_a_bit(name: str) -> None:
    given = 0
    for arguments in calls_of()[name]:
        for argument in tensors_of(name):
            value = arguments.get(argument)
            if value is None:
                value = torch.ones(3)  # where it is refused, the bit changes no message
            elif value.dtype == torch.bool:
                continue
            given += 1
            check(name, argument, arguments, negative(value))
            check(name, argument, arguments, conjugate(value))
    assert given > 0


def test_gradients_pass_through_views_with_the_negative_bit() -> None:
    gradients = []
    for view in (lambda value: value, lambda value: torch._neg_view(-value)):
        query, weight = x(1, 3, 2, 4).requires_grad_(), x(5, 4).requires_grad_()
        rotated = pe.functional.rotary(view(query), spec=pe.RotarySpec(4))
        rows = pe.functional.embedding(torch.tensor([1, 1, 4]), view(weight))
        (view(rotated).sin().sum() + view(rows).sin().sum()).backward()
        gradients.append((query.grad, weight.grad))
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_parts_of_complex_numbers_rotate() -> None:
    """The call whose query was once released too often."""
    query, parts = x(1, 3, 2, 4), torch.complex(x(1, 3, 1, 4), x(1, 3, 1, 4)).conj()
    rope = pe.RotaryEmbedding(4)
    refused((lambda: rope.rotate_(query, parts.imag), ValueError, "key: expected memory that holds its numbers"))  # fmt: skip
    assert torch.equal(query, x(1, 3, 2, 4))
    expected, key = rope(query, parts.imag.resolve_neg())
    rope.rotate_(query, parts.imag.resolve_neg())
    assert torch.equal(query, expected)
    assert torch.equal(rope(x(1, 3, 2, 4), parts.imag)[1], key)
