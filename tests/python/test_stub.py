"""Tests that posembed/_C.pyi matches the bindings, with parameters and defaults."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import posembed
import pytest
from posembed import _C

STUB = ast.parse((Path(posembed.__file__).parent / "_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
# A module is bound as a class in _C.cpp, which a class in _C wraps.
MODULES = [name for name in CLASSES if hasattr(_C.cpp, name)]


def methods(stub: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}


def bound(function: Any) -> ast.FunctionDef:
    """The signature in pybind11's docstring; the last of several, as torch binds forward too."""
    lines = [line for line in function.__doc__.splitlines() if " -> " in line]
    signature = lines[-1].partition(". ")[2] if lines[-1][0].isdigit() else lines[-1]
    (node,) = ast.parse(f"def {signature.replace('::', '.')}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return node


def parameters(function: ast.FunctionDef) -> dict[str, Any]:
    """Names with defaults, in order; unnamed ones have pybind11's names: arg0 and so on."""
    given = function.args
    names = [f"arg{index}" for index in range(len(given.posonlyargs))]
    names += [argument.arg for argument in given.args if argument.arg != "self"]
    required = [None] * (len(names) - len(given.defaults))
    by_name = [argument.arg for argument in given.kwonlyargs]
    return {
        "positional": values(names, [*required, *given.defaults]),
        "by name": values(by_name, given.kw_defaults),
        "further options": given.kwarg is not None,
    }


def values(names: list[str], defaults: Sequence[ast.expr | None]) -> list[tuple[str, Any]]:
    return [
        (name, "required" if default is None else ast.literal_eval(default))
        for name, default in zip(names, defaults, strict=True)
    ]


def own(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_same_classes() -> None:
    assert own(set(vars(_C))) - {"cpp"} == {*CLASSES}


@pytest.mark.parametrize("name", CLASSES)
def test_methods(name: str) -> None:
    kind, stubs = getattr(_C, name), methods(CLASSES[name])
    names = own(set(vars(kind)))  # of a wrapper: static methods, whose docstrings lack parameters
    if name in MODULES:
        kind = getattr(_C.cpp, name)
        from_torch = set.intersection(*(set(vars(getattr(_C.cpp, each))) for each in MODULES))
        names |= own(set(vars(kind)) - from_torch) | {"forward"}
    assert names | {"__init__"} == {*stubs} | {"__init__"}
    for method in {*stubs} & {*vars(kind)}:
        assert parameters(stubs[method]) == parameters(bound(getattr(kind, method)))
