"""Traces where a rotary module's tables go, from the source code of the classes around it.

Any code that is not understood is a reason to keep the tables, so no patched model fails later.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from posembed.integrations.huggingface import _shadow
from posembed.integrations.huggingface._rotation import Rotation, rotation_of

PARTS = (ast.Tuple, ast.List, ast.Dict, ast.DictComp, ast.IfExp)


class TablesStayError(Exception):
    """Why the tables of a rotary module stay."""


class Source:
    """The syntax tree of a function, with the parent of every node."""

    def __init__(self, code: types.CodeType) -> None:
        try:
            text = textwrap.dedent(inspect.getsource(code))
            self.tree = ast.parse(text)
        except (OSError, SyntaxError, TypeError) as error:
            raise TablesStayError(f"the source of {code.co_name} cannot be read") from error
        nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.names = [x for x in nodes if isinstance(x, ast.Name)]
        self.attributes = [x for x in nodes if isinstance(x, ast.Attribute)]
        self.strings = {x.value for x in nodes if isinstance(x, ast.Constant)}


source = functools.lru_cache(maxsize=512)(Source)


def functions_of(module: nn.Module, *, named: bool = True) -> Iterator[types.FunctionType]:
    """The functions of a module's class and its bases that are model code.

    Args:
        module: The module.
        named: False: only those of classes that no module has, which ``patch`` leaves as they are.
    """
    for base in type(module).__mro__:
        if _shadow.worth(base.__module__) and (named or not _shadow.is_named(base)):
            for value in vars(base).values():
                for function in _shadow.inner(value):
                    if _shadow.worth(function.__module__):
                        yield function


def rotation_named(function: types.FunctionType, name: str) -> Rotation | None:
    """The rotation that a patched function calls by this name."""
    shadow = sys.modules.get(_shadow.PREFIX + function.__globals__.get("__name__", ""))
    found = vars(shadow).get(name) if shadow is not None else None
    return rotation_of(found)


class Flow:
    """Follows one rotary module's tables to the rotations that take them.

    Args:
        model: The whole model.
        owner: The module that calls the rotary module.
        attribute: The owner's attribute that holds the rotary module.

    Raises:
        TablesStayError: The tables go elsewhere, or might.
    """

    def __init__(self, model: nn.Module, owner: nn.Module, attribute: str) -> None:
        self.attribute = attribute
        self.arguments: set[str] = set()  # names of arguments that are tables
        self.calls: set[tuple[Rotation, int | None]] = set()  # with the dimension that they pass
        self.owned = dict.fromkeys(functions_of(owner))
        functions = dict.fromkeys(f for m in owner.modules() for f in functions_of(m))
        self.kept = {f for m in owner.modules() for f in functions_of(m, named=False)}
        self._refuse_others(model)
        known = -1
        while known != len(self.arguments):
            known = len(self.arguments)
            for function in functions:
                self._read(function)
        for function in functions:
            for name in self.arguments & source(function.__code__).strings:
                raise TablesStayError(f"{function.__qualname__} has the name {name!r} as a string")
        if not self.calls:
            raise TablesStayError("its tables reach no rotation that is called by name")

    def _refuse_others(self, model: nn.Module) -> None:
        """Only the owner may use the module, and only by calling it."""
        for function in dict.fromkeys(f for m in model.modules() for f in functions_of(m)):
            if self.attribute not in _shadow.names_in(function.__code__):
                continue
            tree = source(function.__code__)
            for node in tree.attributes:
                if node.attr != self.attribute or isinstance(node.ctx, ast.Store):
                    continue
                mine = isinstance(node.value, ast.Name) and node.value.id == "self"
                parent = tree.parents[node]
                called = isinstance(parent, ast.Call) and parent.func is node
                read = isinstance(parent, ast.Attribute) and parent.attr != "forward"
                if not mine or not (called or read or isinstance(parent, ast.Compare)):
                    raise TablesStayError(_where(function, parent))

    def _read(self, function: types.FunctionType) -> None:
        """Follows tables through one function."""
        code = function.__code__
        local = self.arguments.intersection(code.co_varnames[: _parameters(code)])
        if not local and (function not in self.owned or self.attribute not in code.co_names):
            return
        tree = source(code)
        known = -1
        while known != len(local):
            known = len(local)
            loads = [x for x in tree.names if x.id in local and isinstance(x.ctx, ast.Load)]
            for node in [*loads, *self._sources(function, tree)]:
                self._follow(function, tree, node, local)

    def _sources(self, function: types.FunctionType, tree: Source) -> list[ast.expr]:
        if function not in self.owned:
            return []
        calls = [tree.parents[x] for x in tree.attributes if x.attr == self.attribute]
        return [x for x in calls if isinstance(x, ast.Call)]

    def _follow(
        self, function: types.FunctionType, tree: Source, node: ast.AST, local: set[str]
    ) -> None:
        """Follows tables from an expression to where they go next."""
        parent = tree.parents[node]
        if isinstance(parent, ast.keyword):
            self._pass(function, tree.parents[parent], node, parent.arg)
        elif isinstance(parent, ast.Call) and node in parent.args:
            self._pass(function, parent, node, None)
        elif isinstance(parent, ast.Subscript) and parent.value is node:
            if isinstance(parent.ctx, ast.Load):
                self._follow(function, tree, parent, local)
        elif isinstance(parent, PARTS) and getattr(parent, "test", None) is not node:
            self._follow(function, tree, parent, local)
        elif isinstance(parent, ast.Assign) and parent.value is node:
            for target in parent.targets:
                local.update(_assigned(function, target))
        elif not _compares_with_none(parent):
            raise TablesStayError(_where(function, parent))

    def _pass(
        self, function: types.FunctionType, call: ast.AST, node: ast.AST, name: str | None
    ) -> None:
        """Follows tables into a call of a rotation, or of a module that takes them by keyword."""
        assert isinstance(call, ast.Call)
        callee = call.func
        rotation = rotation_named(function, callee.id) if isinstance(callee, ast.Name) else None
        if rotation is not None and function not in self.kept:
            self.calls.add((rotation, _dimension(function, rotation, call, node, name)))
            return
        while isinstance(callee, ast.Attribute | ast.Subscript):
            callee = callee.value
        if isinstance(callee, ast.Call):
            callee = callee.func
            own = isinstance(callee, ast.Name) and callee.id == "super"
        else:
            own = isinstance(callee, ast.Name) and not _is_global(function, callee.id)
        if name is None or not own:
            raise TablesStayError(_where(function, call))
        self.arguments.add(name)


def _is_global(function: types.FunctionType, name: str) -> bool:
    return name in function.__globals__ or hasattr(builtins, name)


def _parameters(code: types.CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def _assigned(function: types.FunctionType, target: ast.expr) -> Iterator[str]:
    """Names that hold tables after an assignment: the target, or its container."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _assigned(function, part)
        return
    named = target.value if isinstance(target, ast.Subscript) else target
    if not isinstance(named, ast.Name):
        raise TablesStayError(_where(function, target))
    yield named.id


def _compares_with_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and all(
        isinstance(x, ast.Is | ast.IsNot) for x in node.ops
    )


def _dimension(
    function: types.FunctionType,
    rotation: Rotation,
    call: ast.Call,
    node: ast.AST,
    name: str | None,
) -> int | None:
    """The head dimension that a call passes; the node has to be one of the call's tables."""
    roles = rotation.roles
    given: dict[str | None, Any] = dict(zip(roles.names, call.args, strict=False))
    given.update((keyword.arg, keyword.value) for keyword in call.keywords)
    names = [key for key, value in given.items() if value is node]
    simple = not any(isinstance(x, ast.Starred) for x in call.args) and None not in given
    others = rotation.cases[0].others.keys() & set(given)
    if not simple or not set(names) <= {roles.cos, roles.sin} or others:
        raise TablesStayError(_where(function, call))
    if roles.unsqueeze is None:
        return rotation.rule.unsqueeze
    try:
        value = ast.literal_eval(given[roles.unsqueeze]) if roles.unsqueeze in given else None
    except ValueError as error:
        raise TablesStayError(_where(function, call)) from error
    stated = roles.defaults.get(roles.unsqueeze) if value is None else value
    return stated if isinstance(stated, int) else None


def _where(function: types.FunctionType, node: ast.AST) -> str:
    line = function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
    text = " ".join(ast.unparse(node).split())
    shown = text if len(text) <= 60 else text[:57] + "..."
    return f"{function.__qualname__}, line {line}, has {shown!r}"
