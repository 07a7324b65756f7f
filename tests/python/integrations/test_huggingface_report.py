"""The report names every function with its reason, calls are decided once, and effects are none."""

from __future__ import annotations

import builtins
import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from posembed.integrations.huggingface import _rotation, patch, unpatch
from torch import Tensor, nn

BATCH, HEADS, TOKENS, HEAD = 2, 3, 5, 8


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def swapped(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turn(x: Tensor, c: Tensor, s: Tensor, adjacent: bool = False) -> Tensor:
    return x * c + (swapped(x) if adjacent else half(x)) * s


def three(q: Tensor, k: Tensor, v: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q * c + half(q) * s, k * c + half(k) * s, v * c + half(v) * s


def keeps(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Rounds once only if tables are wider than data."""
    return (x * c + half(x) * s).to(x.dtype)


def matrices(x: Tensor, pe: Tensor) -> Tensor:
    parts = x.unflatten(-1, (-1, 1, 2))
    return (pe[..., 0] * parts[..., 0] + pe[..., 1] * parts[..., 1]).reshape(x.shape)


@torch.no_grad()
def decorated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """No rotation, but its arguments are called like those of one."""
    return x * cos + sin


def apply_rotary_scaled(x: Tensor, amount: Tensor) -> Tensor:
    """No rotation, but called like one."""
    return x * amount


def apply_rotary_both(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Does more than to rotate, by a function that does not."""
    return turn(x, c, s) + 1


def build_alibi(heads: Tensor, length: Tensor) -> Tensor:
    return heads * length


def build_scaled_alibi(heads: Tensor, length: Tensor) -> Tensor:
    return 2 * build_alibi(heads, length)


class First(nn.Module):
    def forward(self, x: Tensor, c: Tensor, s: Tensor, **options: Any) -> Tensor:
        return turn(x, c, s, **options)


class Second(First):
    def forward(self, x: Tensor, c: Tensor, s: Tensor, **options: Any) -> Tensor:
        return turn(x, c, s, **options)


class Others(nn.Module):
    """Calls what looks like a rotation, and what calls one."""

    def apply_rotary_twice(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return turn(turn(x, c, s), c, s) - 1

    def apply_rotary_thrice(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return self.apply_rotary_twice(x, c, s) + 2

    def forward(self, x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        x = decorated(x, c, s) + apply_rotary_scaled(x, c) + build_scaled_alibi(x, c)
        return apply_rotary_both(x, c, s) + self.apply_rotary_thrice(x, c, s)


class Forms(nn.Module):
    def forward(self, form: str, *given: Tensor) -> Any:
        return {"three": three, "matrices": matrices, "keeps": keeps}[form](*given)


def tables(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    theta = torch.rand(tokens, HEAD // 2).repeat(1, 2)
    return theta.cos(), theta.sin()


def query(tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, HEADS, tokens, HEAD)


def test_a_row_for_each_function() -> None:
    model = nn.ModuleList([First(), Second(), First()])
    report = patch(model)
    (row,) = report.rows
    assert (row.function, row.modules, row.classes) == ("turn", 3, ("First", "Second"))
    assert row.action == "half-split; interleaved with adjacent=True"
    assert report.notes == ()
    rows = {row.function: row for row in patch(Others()).rows}
    assert {name: row.patched for name, row in rows.items()} == {
        "turn": True,
        "decorated": False,
        "apply_rotary_scaled": False,
        "build_alibi": False,
    }
    line = decorated.__wrapped__.__code__.co_firstlineno  # type: ignore[attr-defined]
    assert rows["decorated"].location == f"{__file__}:{line}"
    assert rows["decorated"].action == "computes no known rotation"
    assert rows["build_alibi"].action.startswith("it makes one row for each head")
    (text,) = [x for x in str(patch(Others())).splitlines() if x.startswith("decorated")]
    assert "left: computes no known rotation" in text


class Outer:
    class Inner(First):
        """Pickle finds it, although it is no name of the module."""


def test_pickle_of_classes_inside_classes() -> None:
    model, given = Outer.Inner(), (query(), *tables())
    report = patch(model)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model) is not Outer.Inner
    assert torch.equal(again(*given), turn(*given))
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 0)]


def test_methods_of_classes_that_no_module_has_are_not_reported() -> None:
    """They stay; what such a class inherits is patched."""

    class Own(nn.Module):
        def forward(self, x: Tensor, c: Tensor, s: Tensor, **options: Any) -> Tensor:
            return turn(x, c, s, **options)

    class Inherits(First):
        pass

    given = (query(), *tables())
    own, inherits = Own(), Inherits()
    expected = own(*given)
    assert patch(nn.ModuleList([own])).rows == ()
    report = patch(nn.ModuleList([inherits]))
    assert torch.equal(own(*given), expected)
    assert torch.equal(inherits(*given), expected)
    assert [(each.function, each.kernel) for each in report.calls()] == [("turn", 1)]


def test_compiled_calls_are_not_counted() -> None:
    model, given = First(), (query(), *tables())
    report = patch(model)
    expected = model(*given)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(*given), expected)
    assert [(each.kernel, each.own) for each in report.calls()] == [(1, 0)]


def test_each_kind_of_call_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    plan, planned = _rotation.Case.plan, _rotation.Rotation._planned

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        looks.append("plan")
        return plan(self, *args, **options)

    def outer(self: Any, *args: Any) -> Any:
        looks.append("call")
        return planned(self, *args)

    monkeypatch.setattr(_rotation.Case, "plan", spy)
    monkeypatch.setattr(_rotation.Rotation, "_planned", outer)
    model = First()
    report = patch(model)
    x, (cos, sin) = query(), tables()
    row = torch.rand(1, HEAD)
    for given, options, later in [
        ((x, cos, sin), {}, []),  # the operator call is remembered
        ((x.double(), cos.double(), sin.double()), {}, []),
        ((query(TOKENS + 1), row, row), {}, ["call"]),  # that there is none
        ((x, cos, sin), {"adjacent": 2.5}, ["call"]),
        ((x, cos, sin.bfloat16()), {}, ["call"]),
    ]:
        expected = turn(*given, **options)
        assert torch.equal(model(*given, **options), expected)
        looks.clear()
        assert torch.equal(model(*given, **options), expected)
        assert looks == later
    (calls,) = report.calls()
    assert (calls.kernel, calls.own) == (4, 6)


def test_dtypes_are_told_apart() -> None:
    model, given = Forms(), (query(), *tables())
    report = patch(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float16):
        for _ in range(2):
            narrow = [x.to(dtype) for x in given]
            assert torch.equal(model("keeps", *narrow), keeps(*narrow))
    assert {each.function: (each.kernel, each.own) for each in report.calls()}["keeps"] == (8, 0)


def test_decisions_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = First()
    patch(model)
    rotation = _rotation.rotation_of(type(model).forward.__globals__["turn"])
    assert rotation is not None
    monkeypatch.setattr(_rotation, "PLANS", 2)
    for tokens in range(1, 8):
        given = query(tokens), *tables(tokens)
        assert torch.equal(model(*given), turn(*given))
        assert len(rotation.plans) <= 2
        assert len(rotation.direct) <= 2


def test_query_key_and_value() -> None:
    model, given = Forms(), (query(), query(), query(), *tables())
    report = patch(model)
    assert all(map(torch.equal, model("three", *given), three(*given)))
    assert {each.function: each.kernel for each in report.calls()}["three"] == 1


CALLS = 0
LIST: list[int] = []
TABLE: dict[str, Any] = {}
CONSTANTS = {"one": 1.0}


def counted() -> float:
    global CALLS
    CALLS += 1
    return 1.0


def stores_a_global(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    global CALLS
    CALLS = CALLS + 1
    return x * c + half(x) * s


def stores_an_item(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    TABLE["last"] = x
    return x * c + half(x) * s


def appends(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    LIST.append(len(LIST))
    return x * c + half(x) * s


def prints(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    print("rotates")
    return x * c + half(x) * s


def calls_another(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return (x * c + half(x) * s) * counted()


def around(amount: list[float]) -> Any:
    def holds_a_list(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        return (x * c + half(x) * s) * amount.__len__()

    return holds_a_list


holds_a_list = around([1.0])


def reads_a_constant(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Has no effect: it is recognised."""
    return (x * c + half(x) * s) * CONSTANTS["one"]


class Effects(nn.Module):
    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        parts = stores_a_global(*given), stores_an_item(*given), appends(*given), prints(*given)
        return *parts, calls_another(*given), holds_a_list(*given), reads_a_constant(*given)


def test_functions_with_effects_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(builtins, "print", lambda *x: called.append("print"))
    report = patch(Effects())
    assert [row.function for row in report.patched] == ["reads_a_constant"]
    assert (CALLS, TABLE, LIST, called) == (0, {}, [], [])


SYSTEM = """
import os
import torch

def half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)

def imports(x, c, s):
    import roll  # tensors have a method of this name
    return x * c + half(x) * s

def removes(x, c, s):
    os.remove("a file")  # lists have a method of this name
    return x * c + half(x) * s

class Model(torch.nn.Module):
    def forward(self, *given):
        return imports(*given), removes(*given)
"""


def test_functions_that_import_or_use_the_system_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(os, "remove", called.append)
    (tmp_path / "roll.py").write_text("")
    (tmp_path / "uses_the_system.py").write_text(SYSTEM)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("uses_the_system").Model()
    assert not patch(model).patched
    assert called == []
    assert "roll" not in sys.modules
    del sys.modules["uses_the_system"]


class Held(nn.Module):
    """Has a function as an attribute, as those of the kernels package."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, *given: Tensor) -> Tensor:
        return self.turn(*given) + turn(*given)


def test_functions_that_are_attributes() -> None:
    model, given = Held(), (query(), *tables())
    report = patch(model)
    model(*given)
    assert [(each.kernel, each.own) for each in report.calls()] == [(2, 0)]
    unpatch(model)
    assert model.turn is turn


class Around(nn.Module):
    """A function inside its method reads a variable of the method: it stays."""

    def forward(self, x: Tensor, c: Tensor, s: Tensor, amount: float) -> Tensor:
        def apply_rotary(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return (x * c + half(x) * s) * amount

        return apply_rotary(x, c, s)


def test_functions_of_variables_around_them() -> None:
    model, given = Around(), (query(), *tables(), 3.0)
    expected = model(*given)
    assert not patch(model).patched
    assert torch.equal(model(*given), expected)


def test_relative_imports_inside_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rotations.py").write_text(
        "import torch\n"
        "def spin(x, c, s):\n"
        "    a, b = x.chunk(2, -1)\n"
        "    return x * c + torch.cat((-b, a), -1) * s\n"
    )
    (package / "numbers.py").write_text("ONE = 1.0\n")  # no code of a model
    (package / "model.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, *given):\n"
        "        from .numbers import ONE\n"
        "        from .rotations import spin\n"
        "        return spin(*given) + ONE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("package_of_a_test.rotations")  # before the first patch
    model = importlib.import_module("package_of_a_test.model").Model()
    given = query(), *tables()
    expected = model(*given)
    report = patch(model)
    assert torch.equal(model(*given), expected)
    assert [(each.function, each.kernel) for each in report.calls()] == [("spin", 1)]
    for name in [x for x in sys.modules if "package_of_a_test" in x]:
        del sys.modules[name]
