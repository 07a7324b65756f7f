"""Shadows of modeling modules: copies of their globals that use posembed's rotations.

A shadow is a real module, so compilers and pickle find its functions and classes by name. Its
classes are subclasses of the originals that differ in the methods that reach a rotation.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from posembed.integrations.huggingface._angles import ExactAngles, makes_tables
from posembed.integrations.huggingface._embeddings import OnePass, looks_like_layer
from posembed.integrations.huggingface._recognition import contents, plain, recognise, roles_of
from posembed.integrations.huggingface._report import Counter
from posembed.integrations.huggingface._rotation import Rotation

PREFIX = "posembed.integrations.huggingface.patched."
ELSEWHERE = {"torch", "posembed", *sys.stdlib_module_names} - {"__main__"}
BIASES = re.compile(r"build\w*alibi")
ROTATES = re.compile(r"_?(apply|rotate)\w*(rotary|rope|queries)")


@dataclasses.dataclass
class Shadow:
    """The rotations of a modeling module.

    Args:
        original: The modeling module.
        rotations: Rotations, by the qualified name of the function that each replaces.
        unknown: Functions that look like rotations but follow no rule, by name.
        biases: Functions that make an ALiBi bias, by name.
    """

    original: types.ModuleType
    rotations: dict[str, Rotation] = dataclasses.field(default_factory=dict)
    unknown: dict[str, Any] = dataclasses.field(default_factory=dict)
    biases: dict[str, Any] = dataclasses.field(default_factory=dict)

    def function(self, name: str) -> Any:
        """The function of that name if it is one of these, otherwise None."""
        if name in self.rotations:
            return self.rotations[name].original
        return self.unknown.get(name) or self.biases.get(name)


SHADOWS: dict[str, Shadow] = {}
CLASSES: dict[type, type] = {}
ORIGINALS: dict[type, type] = {}
EXACT: dict[type, type] = {}  # rotary modules that can return positions instead of tables
FUSED: dict[type, type[Any]] = {}  # input layers that can run in one kernel


def original_of(cls: type) -> Any:
    """The model's own class that a class was made from, or the class itself."""
    return ORIGINALS.get(cls, cls)


def worth(module: str) -> bool:
    """Whether a module may hold model code: not torch, and not transformers' infrastructure."""
    root, _, rest = module.partition(".")
    if module not in sys.modules:  # created by hand
        return False
    if root in ELSEWHERE or (root == "transformers" and not rest.startswith("models.")):
        return False
    return any(value is torch or value is nn for value in vars(sys.modules[module]).values())


def shadow_of(module: str) -> types.ModuleType | None:
    """The shadow of a module, created on first use; None for modules without model code."""
    return importlib.import_module(PREFIX + module) if worth(module) else None


def shadow_class(cls: type) -> type:
    """The patched subclass of a model's class, or the class if nothing in it rotates."""
    if cls in ORIGINALS or cls in CLASSES:
        return CLASSES.get(cls, cls)
    for base in cls.__mro__:
        shadow_of(base.__module__)
    return CLASSES.get(cls, cls)


def inner(value: Any) -> Iterator[Any]:
    """The functions behind a member of a class or module: its own and those that it wraps."""
    if isinstance(value, (staticmethod, classmethod)):
        yield from inner(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from inner(part)
    elif isinstance(value, functools.partial):
        yield from inner(value.func)
    elif isinstance(value, types.FunctionType):
        yield value
        for content in contents(value):
            if isinstance(content, types.FunctionType) and content is not value:
                yield from inner(content)


def names_in(code: types.CodeType) -> set[str]:
    """Names of globals and attributes that a function uses, including nested functions."""
    nested = (names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*nested)


class Builder:
    """Fills a shadow."""

    def __init__(self, original: types.ModuleType, shadow: types.ModuleType) -> None:
        self.original = original
        self.globals = vars(original)
        self.space = vars(shadow)
        self.name = shadow.__name__
        self.found = Shadow(original)
        self.changed: set[str] = set()
        self._rebuilt: dict[int, Any] = {}

    def build(self) -> Shadow:
        """Replaces rotations, then everything that reaches them."""
        # Relative imports in functions use the original's package.
        kept = {"__name__": self.name, "__path__": self.space.get("__path__")}
        self.space.update(self.globals)
        self.space.update({name: value for name, value in kept.items() if value is not None})
        items = [(n, v) for n, v in self.globals.items() if not n.startswith("__")]
        for name, value in items:
            self._replace(name, value)
        self._spread([(n, v) for n, v in items if isinstance(v, types.FunctionType)])
        for name, value in items:
            if isinstance(value, type) and value.__module__ == self.original.__name__:
                self._shadow(value, name)
                if makes_tables(value) and value not in EXACT:
                    EXACT[value] = self._beside(value, "Exact", ExactAngles)
                if looks_like_layer(value) and value not in FUSED:
                    members = {"posembed_counter": Counter()}
                    FUSED[value] = self._beside(value, "Fused", OnePass, members)
        return self.found

    def _replace(self, name: str, value: Any) -> None:
        """Replaces a function with a rotation, or an imported object with its shadow."""
        value = plain(value)
        module = getattr(value, "__module__", None)
        if isinstance(value, types.FunctionType):
            if not isinstance(module, str) or not worth(module):
                return
            rotation = self._rotation(value, name)
            if rotation is not None:
                self._set(name, rotation)
                return
        if module == self.original.__name__ or not isinstance(module, str):
            return
        if isinstance(value, types.FunctionType | type) and worth(module):
            other = getattr(shadow_of(module), value.__name__, value)
            if other is not value:
                self._set(name, other)

    def _set(self, name: str, value: Any) -> None:
        self.space[name] = value
        self.changed.add(name)

    def _rotation(self, function: Any, name: str) -> Rotation | None:
        if roles_of(function) is None:
            if BIASES.match(name):
                self.found.biases[name] = function
            if ROTATES.match(name):
                self.found.unknown[name] = function
            return None
        rotation = recognise(function, self.name)
        if rotation is None:
            self.found.unknown[name] = function
        else:
            rotation.__qualname__ = name
            self.found.rotations[name] = rotation
        return rotation

    def _spread(self, functions: list[tuple[str, types.FunctionType]]) -> None:
        """Rebuilds functions that reach a changed name, until none is left."""
        pending = [(n, f) for n, f in functions if n not in self.changed]
        while reached := [(n, f) for n, f in pending if self.reaches(f)]:
            self.changed.update(name for name, _ in reached)
            pending = [(n, f) for n, f in pending if n not in self.changed]
            for name, _ in reached:
                self.found.unknown.pop(name, None)  # a composition of rotations
        for name, function in functions:
            if name in self.changed and name in self.globals and self.space[name] is function:
                self.space[name] = self.rebuild(function)

    def reaches(self, value: Any) -> bool:
        """Whether a member uses a changed name of this module."""
        return any(
            function.__globals__ is self.globals and names_in(function.__code__) & self.changed
            for function in inner(value)
        )

    def _shadow(self, cls: type, name: str) -> None:
        """Creates the subclass if a method or base class has changed."""
        if cls in CLASSES:
            self.space[name] = CLASSES[cls]
            return
        members: dict[str, Any] = {}
        for key, value in vars(cls).items():
            if isinstance(value, staticmethod):
                rotation = self._rotation(value.__func__, f"{name}.{key}")
                if rotation is not None:
                    members[key] = staticmethod(rotation)
                    continue
            if self.reaches(value):
                members[key] = self.rebuild(value)
            elif isinstance(value, types.FunctionType) and ROTATES.match(key):
                self.found.unknown[f"{name}.{key}"] = value
        bases = [shadow_class(base) for base in cls.__bases__ if worth(base.__module__)]
        bases = [base for base in bases if base in ORIGINALS]
        if not members and not bases:
            return
        # The patched bases follow the class, so that super() in the class finds their methods.
        space = {**members, "__module__": self.name, "__qualname__": cls.__qualname__}
        made = type(cls)(cls.__name__, (cls, *bases), {**space, "__doc__": cls.__doc__})
        CLASSES[cls], ORIGINALS[made] = made, cls
        self.space[name] = made

    def _beside(
        self, cls: type, prefix: str, base: type, members: dict[str, Any] | None = None
    ) -> type:
        """Creates another subclass besides the shadow's, for modules with exact numerics."""
        path = f"{prefix}{cls.__name__}"
        space = {"__module__": self.name, "__qualname__": path, "__doc__": cls.__doc__}
        made = type(cls)(cls.__name__, (base, CLASSES.get(cls, cls)), {**space, **(members or {})})
        ORIGINALS[made] = cls
        self.space[path] = made
        return made

    def rebuild(self, value: Any) -> Any:
        """The same function or descriptor, with the shadow's globals."""
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self.rebuild(value.__func__))
        if isinstance(value, property):
            get, put, drop = (self.rebuild(part) for part in (value.fget, value.fset, value.fdel))
            return property(get, put, drop, value.__doc__)
        if isinstance(value, functools.partial):
            return functools.partial(self.rebuild(value.func), *value.args, **value.keywords)
        if not isinstance(value, types.FunctionType) or not self.reaches(value):
            return value
        if id(value) not in self._rebuilt:
            self._rebuilt[id(value)] = self._function(value)
        return self._rebuilt[id(value)]

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        own = function.__globals__ is self.globals
        cells = []
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                content = None
            part = self.rebuild(content) if content is not function else content
            cells.append(cell if part is content else types.CellType(part))
        made = types.FunctionType(
            function.__code__,
            self.space if own else function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(cells) if function.__closure__ else None,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        made.__qualname__ = function.__qualname__
        made.__doc__ = function.__doc__
        made.__annotations__ = function.__annotations__
        made.__module__ = (
            self.name if function.__module__ == self.original.__name__ else function.__module__
        )
        if "__wrapped__" in made.__dict__:
            made.__dict__["__wrapped__"] = self.rebuild(made.__dict__["__wrapped__"])
        return made


def fill(shadow: types.ModuleType) -> None:
    """Fills a new shadow from the module whose name follows the prefix."""
    original = importlib.import_module(shadow.__name__.removeprefix(PREFIX))
    if worth(original.__name__):  # a parent package is needed only by name
        SHADOWS[original.__name__] = Builder(original, shadow).build()
