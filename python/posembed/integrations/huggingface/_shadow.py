"""Shadows of modeling modules: copies of their globals that use posembed's rotations.

A shadow is a real module, so compilers and pickle find its functions and classes by name. Its
classes are subclasses of the originals that differ in the methods that reach a rotation.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import operator
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from posembed.integrations.huggingface._angles import ExactAngles, makes_tables
from posembed.integrations.huggingface._arithmetic import subtracts
from posembed.integrations.huggingface._recognition import (
    COS,
    SIN,
    contents,
    plain,
    recognise,
    recognise_method,
    roles_of,
    turns_otherwise,
)
from posembed.integrations.huggingface._rotation import Rotation, rotation_of

IDENTITY = ("__name__", "__path__", "__package__", "__spec__", "__loader__")  # of a module
PREFIX = "posembed.integrations.huggingface.patched."
ELSEWHERE = {"torch", "posembed", *sys.stdlib_module_names} - {"__main__"}
LIBRARIES = {"transformers", "diffusers"}  # whose models are in a package of that name
BIASES = re.compile(r"build\w*alibi")
FUNCTIONS = (types.FunctionType, functools.partial)
ROTATES = re.compile(r"_?(apply|rotate)\w*(rotary|rope|queries)|\w*(rotary|rope)_apply")


@dataclasses.dataclass
class Shadow:
    """The rotations of a modeling module.

    Args:
        original: The modeling module.
        rotations: Rotations, by the qualified name of the function that each replaces.
        unknown: Functions that look like rotations but follow no rule, by name.
        biases: Functions that make an ALiBi bias, by name.
        inline: Methods that rotate in their own code, by name.
        changed: Names that differ in the shadow.
        uses: Rotations, and functions like them, that a function's code has inside or imports.
    """

    original: types.ModuleType
    rotations: dict[str, Rotation] = dataclasses.field(default_factory=dict)
    unknown: dict[str, Any] = dataclasses.field(default_factory=dict)
    biases: dict[str, Any] = dataclasses.field(default_factory=dict)
    inline: dict[str, Any] = dataclasses.field(default_factory=dict)
    changed: set[str] = dataclasses.field(default_factory=set)
    uses: dict[types.CodeType, set[tuple[str, str]]] = dataclasses.field(default_factory=dict)

    def function(self, name: str) -> Any:
        """The function of that name if it is one of these, otherwise None."""
        if name in self.rotations:
            return self.rotations[name].original
        return self.unknown.get(name) or self.biases.get(name) or self.inline.get(name)


SHADOWS: dict[str, Shadow] = {}
CLASSES: dict[type, type] = {}
ORIGINALS: dict[type, type] = {}
EXACT: dict[type, type] = {}  # rotary modules that can return positions instead of tables
METHODS: dict[type, dict[str, types.FunctionType]] = {}  # methods that rotations replace


def original_of(cls: type) -> Any:
    """The model's own class that a class was made from, or the class itself."""
    return ORIGINALS.get(cls, cls)


def worth(module: str) -> bool:
    """Whether a module may hold model code: not torch, and not a library's infrastructure."""
    root, _, rest = module.partition(".")
    if module not in sys.modules:  # created by hand
        return False
    if root in ELSEWHERE or (root in LIBRARIES and not rest.startswith("models.")):
        return False
    return any(value is torch or value is nn for value in vars(sys.modules[module]).values())


def held(module: nn.Module) -> Iterator[Any]:
    """Objects with model code that a module holds beside modules, as diffusers' processors."""
    for value in list(vars(module).values()):
        other = not isinstance(value, nn.Module | torch.Tensor | type | types.FunctionType)
        if other and hasattr(value, "__dict__") and worth(original_of(type(value)).__module__):
            yield value


def shadow_of(module: str) -> types.ModuleType | None:
    """The shadow of a module, created on first use; None for modules without model code."""
    return importlib.import_module(PREFIX + module) if worth(module) else None


def shadow_class(cls: type) -> type:
    """The patched subclass of a model's class, or the class if nothing in it rotates."""
    if cls in ORIGINALS or cls in CLASSES:
        return CLASSES.get(cls, cls)
    for base in cls.__mro__:
        shadow_of(base.__module__)
    if not is_named(cls):
        _inherit(cls)
    return CLASSES.get(cls, cls)


def is_named(cls: type) -> bool:
    """Whether a class's module has it: not one that a function defines or makes."""
    module = sys.modules.get(cls.__module__)
    return module is not None and any(value is cls for value in list(vars(module).values()))


def _inherit(cls: type) -> None:
    """Creates the subclass of a class that no module has, as fully_shard's, from patched bases."""
    bases = [base for base in map(shadow_class, cls.__bases__) if base in ORIGINALS]
    if cls in CLASSES or not bases:
        return
    space = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = type(cls)(cls.__name__, (cls, *bases), {**space, "__reduce_ex__": _reduced})
    CLASSES[cls], ORIGINALS[made] = made, cls


def _reduced(self: Any, protocol: Any) -> Any:
    """For copies and pickle: the model's class, from which the subclass is made again."""
    return _remade, (original_of(type(self)),), self.__getstate__()


def _remade(original: type) -> Any:
    return object.__new__(shadow_class(original))


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
        self.changed = self.found.changed
        self._rebuilt: dict[int, Any] = {}
        self._wrapped: dict[types.FunctionType, Any] = {}  # what others wrap, and its rotation
        self._codes: dict[types.CodeType, types.CodeType] = {}

    def build(self) -> None:
        """Replaces rotations, then everything that reaches them."""
        kept = {name: self.space[name] for name in IDENTITY if name in self.space}
        self.space.update(self.globals)
        self.space.update(kept)
        items = [(n, v) for n, v in self.globals.items() if not n.startswith("__")]
        for name, value in items:
            self._replace(name, value)
        self._spread([(n, v) for n, v in items if isinstance(v, FUNCTIONS)])
        for name, value in items:
            if isinstance(value, type) and value.__module__ == self.original.__name__:
                self._shadow(value, name)
                if makes_tables(value) and value not in EXACT:
                    EXACT[value] = self._beside(value, "Exact", ExactAngles)

    def _replace(self, name: str, value: Any) -> None:
        """Replaces a function with a rotation, or an imported object with its shadow."""
        value = plain(value)
        module = getattr(value, "__module__", None)
        if isinstance(value, FUNCTIONS) and self._follow(value, name):
            return
        if isinstance(value, types.FunctionType):
            if not isinstance(module, str) or not worth(module):
                return
            rotation = self._rotation(value, name)
            if rotation is not None:
                self._set(name, rotation.function())
                return
        elif (
            callable(value)
            and not isinstance(value, type | nn.Module)
            and (ROTATES.match(name) or roles_of(value))
        ):
            self.found.unknown[name] = value
        if module == self.original.__name__ or not isinstance(module, str):
            return
        if isinstance(value, types.FunctionType | type) and worth(module):
            # Its name may be that of the function that it wraps.
            names = (n for n, x in list(vars(sys.modules[module]).items()) if plain(x) is value)
            other = getattr(shadow_of(module), next(names, ""), value)
            if other is not value:
                self._set(name, other)

    def _follow(self, value: Any, name: str) -> bool:
        """Puts a rotation in place of what a function or a partial wraps; whether it wraps one.

        The wrapper's code stays, with its effect. One that changes variables around it stays whole,
        since it shares them with that of other models.
        """
        found = False
        for function in inner(value):
            module = getattr(function, "__module__", None)
            if function is value or not isinstance(module, str) or not worth(module):
                continue
            if function not in self._wrapped or writes(value):
                rotation = self._rotation(function, name)
                if rotation is not None and writes(value):
                    self.found.rotations.pop(name)
                    self.found.unknown[name] = value
                if rotation is None or writes(value):
                    continue
                place = f"posembed_{name.replace('.', '_')}_{len(self._wrapped)}"
                rotation.__qualname__ = place
                self.space[place] = self._wrapped[function] = rotation.function()
            known = rotation_of(self._wrapped[function])
            assert known is not None
            self.found.rotations[known.__qualname__ if found else name] = known
            found = True
        return found

    def _set(self, name: str, value: Any) -> None:
        self.space[name] = value
        self.changed.add(name)

    def _rotation(
        self, function: Any, name: str, owner: type | None = None, *, bound: bool = False
    ) -> Rotation | None:
        """The rotation in place of a function; notes those that only look like one.

        Args:
            function: The function.
            name: Its qualified name.
            owner: Its class if it is a method.
            bound: Whether the method takes an instance.
        """
        instance = _bare(owner) if owner and bound else None
        called = function if instance is None else types.MethodType(function, instance)
        known = instance is not None or not bound
        rotation = recognise(called, self.name, owner=owner) if known else None
        if rotation is not None:
            rotation.__qualname__ = name
            self.found.rotations[name] = rotation
        elif BIASES.match(function.__name__):
            if not self._calls_bias(function):
                self.found.biases[name] = function
        elif self._looks_like_rotation(function, bound):
            self.found.unknown[name] = function
        return rotation

    @staticmethod
    def _looks_like_rotation(function: Any, bound: bool) -> bool:
        named = ROTATES.match(function.__name__) is not None
        return named or turns_otherwise(function) or (not bound and bool(roles_of(function)))

    def _calls_bias(self, function: Any) -> bool:
        """Whether a builder of biases leaves that to another, which has a row of its own."""
        biases = self.found.biases.keys()
        return any(names_in(part.__code__) & biases for part in inner(function))

    def _spread(self, functions: list[tuple[str, Any]]) -> None:
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
        """Whether a member uses a changed name of this module, or has or imports a rotation."""
        return any(
            (function in self._wrapped and function is not value and not writes(value))
            or (function.__globals__ is self.globals and self._has_changed(function))
            for function in inner(value)
        )

    def _has_changed(self, function: types.FunctionType) -> bool:
        changed = names_in(function.__code__) & self.changed
        return bool(changed) or self._code(function) is not function.__code__

    def _code(self, function: types.FunctionType) -> types.CodeType:
        """A function's code with rotations in place of functions that it defines or imports."""
        code = function.__code__
        if code not in self._codes:
            self._codes[code] = code  # of a function that contains itself
            names, imported = self._imported(code)
            constants = tuple(self._inside(function, x) for x in code.co_consts)
            self.found.uses.setdefault(code, set()).update(imported)
            changed = any(SHADOWS[module].changed & {name} for module, name in imported)
            if changed or any(map(operator.is_not, constants, code.co_consts)):
                self._codes[code] = code.replace(co_consts=constants, co_names=names)
        return self._codes[code]

    def _inside(self, function: types.FunctionType, constant: Any) -> Any:
        """The code that replaces a function inside a function; a constant of another kind stays."""
        if not isinstance(constant, types.CodeType) or constant.co_name.startswith("<"):
            return constant
        if not constant.co_flags & inspect.CO_OPTIMIZED or constant.co_freevars:
            return constant  # a class, or a function of variables around it
        name = f"{function.__qualname__}.<locals>.{constant.co_name}"
        inside = types.FunctionType(constant, self.globals, constant.co_name)
        rotation = self._rotation(inside, name)
        if self.found.function(name) is not None:
            self.found.uses.setdefault(function.__code__, set()).add((self.original.__name__, name))
        if rotation is None:
            return constant
        place = f"posembed_{constant.co_name}_{constant.co_firstlineno}"
        rotation.__qualname__ = place
        self.space[place] = rotation.function()
        return _calling(place, constant)

    def _imported(self, code: types.CodeType) -> tuple[tuple[str, ...], set[tuple[str, str]]]:
        """Names in a function's code, to import from shadows, and which of them have changed.

        The package of a shadow is that of shadows, so that only absolute names are replaced.
        """
        names, found = list(code.co_names), set()
        for level, sources, name in _imports(code):
            package = self.globals.get("__package__") or ""
            if level and not package:
                continue
            module = importlib.util.resolve_name("." * level + name, package) if level else name
            if not worth(module) or shadow_of(module) is None or module not in SHADOWS:
                continue
            shadow = SHADOWS[module]
            found |= {(module, x) for x in sources if x in shadow.changed or shadow.function(x)}
            if not level and shadow.changed.intersection(sources):
                names[names.index(name)] = PREFIX + name
        return tuple(names), found

    def _shadow(self, cls: type, name: str) -> None:
        """Creates the subclass if a method or base class has changed."""
        if cls in CLASSES:
            self.space[name] = CLASSES[cls]
            return
        members: dict[str, Any] = {}
        for key, value in vars(cls).items():
            called = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(value, staticmethod | functools.partial) and self._follow(
                called, f"{name}.{key}"
            ):
                members[key] = self.rebuild(value)
                continue
            if isinstance(value, staticmethod):
                rotation = self._rotation(value.__func__, f"{name}.{key}", cls)
                if rotation is not None:
                    members[key] = staticmethod(rotation.function())
                    continue
            if isinstance(value, types.FunctionType) and self._is_own(value, key):
                rotation = self._rotation(value, f"{name}.{key}", cls, bound=True)
                if rotation is not None:
                    members[key] = rotation.function(bound=True)
                    METHODS.setdefault(cls, {})[key] = value
                    continue
            if key == "forward" and self._turns_by_attributes(cls, value, name):
                members[key] = self.found.rotations[f"{name}.{key}"].function(bound=True)
                continue
            if self.reaches(value):
                members[key] = self.rebuild(value)
                self.found.unknown.pop(f"{name}.{key}", None)  # a composition of rotations
            elif isinstance(value, types.FunctionType) and turns_inline(value):
                self.found.inline[f"{name}.{key}"] = value
        for key, value in vars(cls).items():
            if any(names_in(part.__code__) & members.keys() for part in inner(value)):
                self.found.unknown.pop(f"{name}.{key}", None)  # it calls what has changed
        members |= _overridden(cls, members)
        bases = [shadow_class(base) for base in cls.__bases__ if worth(base.__module__)]
        bases = [base for base in bases if base in ORIGINALS]
        if not members and not bases:
            return
        # The patched bases follow the class, so that super() in the class finds their methods.
        space = {**members, "__module__": self.name, "__qualname__": cls.__qualname__}
        made = type(cls)(cls.__name__, (cls, *bases), {**space, "__doc__": cls.__doc__})
        CLASSES[cls], ORIGINALS[made] = made, cls
        self.space[name] = made

    def _turns_by_attributes(self, cls: type, method: Any, name: str) -> bool:
        """Whether a module's forward rotates by tables that it holds; if so, it has a rotation."""
        plain = isinstance(method, types.FunctionType) and method.__globals__ is self.globals
        if not plain or not issubclass(cls, nn.Module) or self.reaches(method):
            return False
        rotation = recognise_method(method, self.name) if subtracts(method) else None
        if rotation is None:
            return False
        rotation.__qualname__ = f"{name}.forward"
        self.found.rotations[rotation.__qualname__] = rotation
        return True

    def _is_own(self, method: types.FunctionType, key: str) -> bool:
        """Whether a method may be a rotation: called by name, and of this module."""
        special = key.startswith("__") or key == "forward"
        return not special and method.__globals__ is self.globals

    def _beside(self, cls: type, prefix: str, base: type) -> type:
        """Creates another subclass besides the shadow's, for modules with exact numerics."""
        path = f"{prefix}{cls.__name__}"
        space = {"__module__": self.name, "__qualname__": path, "__doc__": cls.__doc__}
        made = type(cls)(cls.__name__, (base, CLASSES.get(cls, cls)), space)
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
            return functools.partial(self._replaced(value.func), *value.args, **value.keywords)
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
            part = self._replaced(content) if content is not function else content
            cells.append(cell if part is content else types.CellType(part))
        made = types.FunctionType(
            self._code(function) if own else function.__code__,
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
            made.__dict__["__wrapped__"] = self._replaced(made.__dict__["__wrapped__"])
        return made

    def _replaced(self, value: Any) -> Any:
        """What a wrapper has in place of a value."""
        rotation = self._wrapped.get(value) if isinstance(value, types.FunctionType) else None
        return rotation or self.rebuild(value)


def writes(value: Any) -> bool:
    """Whether a function, or one that it wraps, changes variables of those around it."""
    return any(
        x.opname == "STORE_DEREF" and x.argval in function.__code__.co_freevars
        for function in inner(value)
        for x in dis.get_instructions(function.__code__)
    )


def _bare(cls: type) -> Any:
    """An instance without attributes: a method that runs with it does not depend on any.

    None for classes of which there is none: abstract ones, and those of dictionaries.
    """
    try:
        return object.__new__(cls)
    except TypeError:
        return None


def _overridden(cls: type, members: dict[str, Any]) -> dict[str, Any]:
    """Inherited rotations of which a class overrides a part: it keeps the model's methods."""
    kept = {}
    for base in cls.__mro__[1:]:
        for key, method in METHODS.get(base, {}).items():
            own = key in members or key in vars(cls)
            if not own and names_in(method.__code__) & vars(cls).keys():
                kept[key] = method
    return kept


def _imports(code: types.CodeType) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """What a function imports from modules: level, names, and the module."""
    before: list[Any] = []
    for x in dis.get_instructions(code):
        if x.opname == "IMPORT_NAME" and isinstance(before[-1], tuple):
            yield before[-2], before[-1], x.argval
        before = [*before[-1:], x.argval]


def _calling(name: str, code: types.CodeType) -> types.CodeType:
    """The code of a function that calls a global, in place of another function's code."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

    return function.__code__.replace(
        co_names=(name,),
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )


def turns_inline(function: types.FunctionType) -> bool:
    """Whether a method's code looks as if it rotated: it multiplies by variables cos and sin."""
    code = function.__code__
    variables, names = (*code.co_varnames, *code.co_cellvars), set(code.co_names)
    if {"view_as_complex", "view_as_real"} <= names:
        return True
    both = any(map(COS.match, variables)) and any(map(SIN.match, variables))
    both = both and not {"cos", "sin"} <= names  # otherwise it makes tables
    kinds = [x.argrepr if x.opname == "BINARY_OP" else x.opname for x in dis.get_instructions(code)]
    turned = any(kind in ("-", "UNARY_NEGATIVE", "BINARY_SUBTRACT") for kind in kinds)
    turned = turned or any("rotate" in name for name in names)
    return both and turned and sum(kind in ("*", "BINARY_MULTIPLY") for kind in kinds) >= 2


def fill(shadow: types.ModuleType) -> None:
    """Fills a new shadow from the module whose name follows the prefix."""
    original = importlib.import_module(shadow.__name__.removeprefix(PREFIX))
    if worth(original.__name__):
        builder = Builder(original, shadow)
        SHADOWS[original.__name__] = builder.found
        builder.build()
    # Functions of a shadow import from shadows: what these lack is the original's.
    vars(shadow).setdefault("__getattr__", functools.partial(getattr, original))
