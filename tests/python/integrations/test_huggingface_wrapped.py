"""patch(model): rotations that other functions wrap keep what these do."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import patch, unpatch
from torch import Tensor, nn

SEEN: list[str] = []
STATE = {"calls": 0}


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


def usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Its arguments have the usual names."""
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        SEEN.append(function.__name__)
        return function(*given, **options)

    return call


def scaled(amount: float) -> Any:
    """A decorator with an argument."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*given: Any) -> Any:
            result = function(*given)
            both = isinstance(result, tuple)
            return tuple(x * amount for x in result) if both else result * amount

        return call

    return decorate


def without_name(function: Any) -> Any:
    """A decorator that does not say what it wraps."""

    def call(*given: Any) -> Any:
        return function(*given) + 1

    return call


def first_calls(function: Any) -> Any:
    """A decorator that changes a variable which all share."""
    count = 0

    @functools.wraps(function)
    def call(*given: Any) -> Any:
        nonlocal count
        count += 1
        return function(*given) * count

    return call


@logged
def decorated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


@scaled(3.0)
@logged
def twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@torch.compiler.disable
def disabled(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


@torch.no_grad()
def frozen(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


@torch.autocast("cpu", enabled=False)
def apart(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


def detached(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    x = x.detach()
    return x * c + half(x) * s


def with_option(x: Tensor, c: Tensor, s: Tensor, back: bool = False) -> Tensor:
    return x * c - half(x) * s if back else x * c + half(x) * s


named = logged(turn)
unnamed = without_name(turn)
partly = functools.partial(with_option, back=True)
partly_logged = functools.partial(logged(with_option), back=True)
shared = first_calls(turn)
tripled = scaled(3.0)(turn)  # whose name is turn


def before_scaling(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return turn(x, c, s) + 1


composed = scaled(2.0)(before_scaling)


class Rotator:
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + half(x) * sin


rotator = Rotator()


class Model(nn.Module):
    in_class = functools.partial(turn)
    static = staticmethod(scaled(2.0)(turn))

    def __init__(self) -> None:
        super().__init__()
        self.held = functools.partial(with_option, back=True)

    def forward(self, form: str, *given: Tensor) -> Any:
        match form:
            case "decorated":
                return decorated(*given)
            case "twice":
                return twice(given[0], *given)
            case "disabled":
                return disabled(*given)
            case "frozen":
                return frozen(*given)
            case "apart":
                return apart(*given)
            case "detached":
                return detached(*given)
            case "named":
                return named(*given)
            case "unnamed":
                return unnamed(*given)
            case "partly":
                return partly(*given)
            case "partly_logged":
                return partly_logged(*given)
            case "shared":
                return shared(*given)
            case "rotator":
                return rotator(*given)
            case "plain":
                return turn(*given), with_option(*given)
        return getattr(self, form)(*given)


FOLLOWED = (
    *("decorated", "twice", "disabled", "frozen", "apart", "named", "unnamed", "partly"),
    *("partly_logged", "held", "in_class", "static"),
)
ROWS = {"in_class": "Model.in_class", "static": "Model.static", "held": "with_option"}


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    theta = 6 * torch.rand(5, 4).repeat(1, 2)
    return torch.randn(2, 3, 5, 8), theta.cos(), theta.sin()


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("form", FOLLOWED)
def test_wrapped_rotations_run_the_kernel_in_the_wrapper(form: str) -> None:
    model, given = Model(), arguments()
    given[0].requires_grad_()
    SEEN.clear()
    expected, seen = tensors(model(form, *given)), list(SEEN)
    SEEN.clear()
    report = patch(model)
    assert SEEN == []  # nothing but the rotation itself is tried
    found = tensors(model(form, *given))
    assert seen == SEEN
    assert all(map(torch.equal, found, expected))
    assert [x.requires_grad for x in found] == [x.requires_grad for x in expected]
    (calls,) = [each for each in report.calls() if each.function == ROWS.get(form, form)]
    assert (calls.kernel, calls.own) == (1, 0)
    assert all(map(torch.equal, tensors(pickle.loads(pickle.dumps(model))(form, *given)), found))
    unpatch(model)
    model(form, *given)
    (calls,) = [each for each in report.calls() if each.function == ROWS.get(form, form)]
    assert calls.kernel == 2  # with that of the copy


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("shared", "a function wraps it, whose effect is not known"),
        ("rotator", "it is no function, but of the type Rotator"),
        ("detached", "it rotates, but its results have no gradients"),
    ],
)
def test_what_is_not_followed_has_a_reason(form: str, reason: str) -> None:
    model, given = Model(), arguments()
    given[0].requires_grad_()
    (row,) = [row for row in patch(model).left if row.function == form]
    assert row.action == reason
    found = model(form, *given)
    cells = getattr(globals()[form], "__closure__", None) or ()
    count = next((x.cell_contents for x in cells if isinstance(x.cell_contents, int)), 1)
    assert torch.equal(found, turn(*given) * count)
    assert found.requires_grad == (form != "detached")


def test_graphs_break_where_the_model_breaks_them() -> None:
    model, given = Model(), arguments()
    expected = model("disabled", *given)
    report = patch(model)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="eager")("disabled", *given), expected)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"(?i)disable"):
        torch.compile(model, backend="eager", fullgraph=True)("disabled", *given)
    (calls,) = [each for each in report.calls() if each.function == "disabled"]
    assert calls.kernel == 1


def importing(imported: str) -> Any:
    """A model of another module, which imports a function from this one."""
    name = f"posembed_importing_{imported}"
    module = sys.modules.setdefault(name, types.ModuleType(name))
    text = (
        "import torch\n"
        f"from {__name__} import {imported} as rotate\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, *given):\n"
        "        return rotate(*given)\n"
    )
    exec(text, vars(module))
    return vars(module)["Model"]()


@pytest.mark.parametrize("name", ["named", "tripled", "unnamed", "partly", "decorated"])
def test_wrappers_that_a_module_imports(name: str) -> None:
    model, given = importing(name), arguments()
    expected = model(*given)
    report = patch(model)
    assert torch.equal(model(*given), expected)
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 0)]


def test_a_wrapper_with_the_name_of_a_rotation_stays() -> None:
    """What is not followed is not taken for the rotation of that name."""
    model, given = importing("shared"), arguments()
    model(*given)
    patch(model)
    found = model(*given)
    assert found.abs().max() > 1.5 * turn(*given).abs().max()


def test_an_imported_composition_runs_the_kernel() -> None:
    model, given = importing("composed"), arguments()
    expected = model(*given)
    report = patch(model)
    assert torch.equal(model(*given), expected)
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 0)]
