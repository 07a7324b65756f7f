"""patch(model): functions keep their identity and get other code."""

import copy
import functools
import inspect
import pickle
import sys
import threading
import types
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import _door, patch, unpatch
from torch import Tensor, nn
from torch._dynamo.utils import counters

SEEN: list[str] = []


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turn(x: Tensor, c: Tensor, s: Tensor, *, scale: float = 1.0) -> Tensor:
    """Rotates."""
    return x * c + half(x) * s


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any) -> Any:
        SEEN.append(function.__name__)
        return function(*given)

    return call


@logged
def decorated(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


part = functools.partial(turn)


def outer(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    def inner(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * c + torch.cat((-b, a), -1) * s

    return inner(x, c, s)


def around(function: Any) -> Any:
    return lambda x, c, s: function(x, c, s)


enclosed = around(turn)
LOOSE = {"turn": turn}


class Base(nn.Module):
    """Rotates by a method that a subclass may change in part."""

    def turned(self, x: Tensor) -> Tensor:
        return half(x)

    def rotated(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + self.turned(x) * s

    def forward(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.rotated(x, c, s)


class Other(Base):
    def turned(self, x: Tensor) -> Tensor:
        return -half(x)


class Processor:
    """A plain object, with a rotation inside its method, as diffusers' attention processors."""

    def __call__(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        def turn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + half(x) * s

        return turn(x, c, s)


# A module to import from, before the first patch reads what functions import.
sys.modules["rotations_of_a_test"] = made = types.ModuleType("rotations_of_a_test")
SOURCE = "import torch\ndef imported(x, c, s):\n    a, b = x.chunk(2, -1)\n"
SOURCE += "    return x * c + torch.cat((-b, a), -1) * s\n"
exec(compile(SOURCE, __file__, "exec"), vars(made))


class Layer(nn.Module):
    """As RoFormer's in transformers 5.24: its method is decorated twice, and takes tables."""

    @logged
    @logged
    def forward(self, x: Tensor, sinusoidal_pos: Tensor) -> Tensor:
        return x + sinusoidal_pos


class Model(nn.Module):
    """Reaches rotations in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor()

    def method(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + half(x) * s

    @staticmethod
    def static(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return x * c + half(x) * s

    def forward(self, form: str, *given: Tensor) -> Tensor:
        match form:
            case "turn":
                return turn(*given)
            case "decorated":
                return decorated(*given)
            case "part":
                return part(*given)
            case "outer":
                return outer(*given)
            case "enclosed":
                return enclosed(*given)
            case "imported":
                from rotations_of_a_test import imported

                return imported(*given)
        return getattr(self, form)(*given)


FORMS = ("turn", "decorated", "part", "outer", "enclosed", "static", "method", "processor")


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    theta = 1 + torch.rand(5, 4).repeat(1, 2)
    return torch.randn(2, 3, 5, 8), theta.cos(), theta.sin()


def total(report: Any) -> tuple[int, int]:
    calls = report.calls()
    return sum(x.kernel for x in calls), sum(x.own for x in calls)


@pytest.mark.parametrize("form", [*FORMS, "imported"])
def test_whatever_holds_a_function_follows(form: str) -> None:
    model, given = Model(), arguments()
    expected, count = model(form, *given), len(SEEN)
    report = patch(model)
    assert torch.equal(model(form, *given), expected)
    once = 2 if form == "enclosed" else 1  # its own code calls another rotation when it is compared
    assert total(report) == (once, 0)
    assert len(SEEN) - count == (form == "decorated")  # the decorator's effect stays
    if form in ("method", "processor", "static", "imported"):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(form, *given), expected)
    assert torch.equal(copy.deepcopy(model)(form, *given), expected)
    unpatch(model)
    assert torch.equal(model(form, *given), expected)
    assert total(report) == (once + 1, 0)


def test_a_decorated_method_is_no_function() -> None:
    assert patch(Layer()).rows == ()


def simple(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + half(x) * s


class Scripted(Base):
    """Calls a function and a method in code that torch.jit.script takes."""

    def forward(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return simple(x, c, s) + self.rotated(x, c, s)


def test_a_patched_model_is_scripted_as_the_models_own_code() -> None:
    model, given = Scripted(), arguments()
    expected, report = model(*given), patch(model)
    assert torch.equal(torch.jit.script(model)(*given), expected)
    assert total(report) == (0, 0)
    assert torch.equal(model(*given), expected)
    assert total(report) == (2, 0)


def test_what_describes_a_function_stays() -> None:
    model, names, code = Model(), set(globals()), turn.__code__
    known = inspect.signature(turn), turn.__doc__, inspect.getsource(turn), turn.__name__
    patch(model)
    assert turn.__code__ is not code
    assert LOOSE["turn"] is turn
    assert known == (inspect.signature(turn), turn.__doc__, inspect.getsource(turn), turn.__name__)
    assert b"posembed" not in pickle.dumps(model)
    unpatch(model)
    assert turn.__code__ is code
    assert set(globals()) == names


def test_arguments_by_name_and_their_errors() -> None:
    model, (x, c, s) = Model(), arguments()
    expected = turn(x, c, s)
    report = patch(model)
    assert torch.equal(turn(s=s, c=c, x=x, scale=1.0), expected)
    assert total(report) == (1, 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        turn(x, c, s, other=1)  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="size of tensor"):
        turn(x, c[:3], s)


def test_a_subclass_that_overrides_a_part_runs_its_own_code() -> None:
    base, other, given = Base(), Other(), arguments()
    expected = base(*given), other(*given)
    report = patch(base)
    patch(other)
    assert torch.equal(base(*given), expected[0])
    assert torch.equal(other(*given), expected[1])
    assert not torch.equal(*expected)
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), expected[1])
    assert total(report) == (1, 0)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_that_was_compiled_before_follows(backend: str) -> None:
    """Twenty rounds compile it twice: each function has the same two codes."""
    torch.compiler.reset()
    counters.clear()
    model, given = Model(), arguments()
    expected = model("turn", *given)
    operators: list[str] = []

    def listed(graph: Any, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, backend=listed, fullgraph=True)
    torch.testing.assert_close(compiled("turn", *given), expected)
    assert not any("posembed" in name for name in operators)
    for _ in range(20):
        patch(model)
        torch.testing.assert_close(compiled("turn", *given), expected)
        unpatch(model)
        torch.testing.assert_close(compiled("turn", *given), expected)
    assert sum("posembed" in name for name in operators) == 1
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


def test_a_patched_model_may_be_compiled_before_it_runs() -> None:
    model, given = Base(), arguments()
    expected = model(*given)
    _door._found.pop(Base.rotated, None)
    patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), expected)


def test_threads_call_while_patch_swaps() -> None:
    model, given = Model(), arguments()
    expected, running = model("outer", *given), True
    errors: list[BaseException] = []

    def call() -> None:
        try:
            while running:
                for form in ("turn", "outer", "decorated"):
                    assert torch.equal(model(form, *given), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        patch(model)
        unpatch(model)
    running = False
    for thread in threads:
        thread.join()
    assert errors == []


def test_code_that_finds_no_global_calls_the_rotation() -> None:
    """A thread may be in the code when another restores a function."""
    model, given = Model(), arguments()
    expected = model("turn", *given)
    patch(model)
    code, names = turn.__code__, [name for name in turn.__code__.co_names if name in globals()]
    unpatch(model)
    assert names
    assert not any(name in globals() for name in names)
    late = type(turn)(code, globals(), "late", None)
    late.__kwdefaults__ = turn.__kwdefaults__
    assert torch.equal(late(*given), expected)


@torch.jit.script
def apply_rotary_scripted(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def rotary_apply(x: Tensor, c: Tensor, s: Tensor) -> Any:
    yield x * c + half(x) * s


class Stays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.traced = torch.jit.trace(Base(), arguments())

    def forward(self, *given: Tensor) -> Any:
        return apply_rotary_scripted(*given), next(rotary_apply(*given)), self.traced(*given)


def test_what_cannot_follow_has_a_row() -> None:
    report = patch(Stays())
    rows = {row.function: row.action for row in report.left}
    assert rows["apply_rotary_scripted"].startswith("it is no function, but of the type Script")
    assert "rotary_apply" in rows
    assert "traced or exported program" in rows["forward"]
    assert report.patched == ()


class Pipeline:
    """As those of diffusers."""

    def __init__(self) -> None:
        self.components = {"model": Base(), "tokenizer": object()}


def test_a_pipeline_is_its_components_that_rotate() -> None:
    pipeline, given = Pipeline(), arguments()
    model: Any = pipeline.components["model"]
    expected = model(*given)
    report = patch(pipeline)
    assert torch.equal(model(*given), expected)
    assert total(report) == (1, 0)
    unpatch(pipeline)
    assert Base.rotated.__code__.co_consts == Base.__dict__["rotated"].__code__.co_consts
    assert not _door._own


def test_benchmark_runs_both_in_turn() -> None:
    """The models' own code is for a block alone, and counts no calls."""
    model, given = Model(), arguments()
    report = patch(model)
    times = report.benchmark(model, "turn", *given, rounds=3)
    assert min(times.values()) > 0
    assert total(report) == (4, 0)
