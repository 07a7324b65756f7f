"""Puts rotations where a model's functions are: a function keeps its identity and gets other code.

Whatever holds the function follows: imports, partials, decorators, closures, classes, instances.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from posembed.integrations.huggingface._gate import codes_in, subtracts
from posembed.integrations.huggingface._reading import (
    COS,
    SIN,
    contents,
    plain,
    recognise,
    recognise_method,
    roles_of,
)
from posembed.integrations.huggingface._rotation import OWN, Rotation

ELSEWHERE = {"torch", "posembed", *sys.stdlib_module_names} - {"__main__"}
LIBRARIES = {"transformers", "diffusers"}  # whose models are in a package of that name
BIASES = re.compile(r"build\w*alibi")
ROTATES = re.compile(r"_?(apply|rotate)\w*(rotary|rope|queries)|\w*(rotary|rope)_apply")
BIAS = "it makes one row for each head, too little to gain anything"
INLINE = "a method whose own code may rotate; posembed replaces functions"
Path = tuple[int, ...]
CALLS: dict[str, Callable[..., Any]] = {}  # what code calls, by its name in globals

_lock = threading.RLock()
_own: dict[types.FunctionType, types.CodeType] = {}  # of functions that have other code now
_users: dict[Place, weakref.WeakSet[nn.Module]] = {}
_calls: weakref.WeakKeyDictionary[Any, dict[Path, tuple[Rotation, types.CodeType]]] = (
    weakref.WeakKeyDictionary()
)
_codes: weakref.WeakKeyDictionary[Any, dict[Any, types.CodeType]] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[Any, tuple[Any, Found]] = weakref.WeakKeyDictionary()
_inside: dict[tuple[types.CodeType, int], tuple[Any, Rotation | str]] = {}


class Place(NamedTuple):
    """Code of a model: that of a function, or of a function that its code defines.

    Args:
        function: The function.
        path: Where the code is among the constants of the function's code, and of theirs.
    """

    function: Any
    path: Path = ()

    @property
    def code(self) -> types.CodeType:
        """The model's own code."""
        found: Any = _own.get(self.function, self.function.__code__)
        for at in self.path:
            found = found.co_consts[at]
        return found  # type: ignore[no-any-return]

    @property
    def location(self) -> str:
        """Its file and line."""
        if not isinstance(self.function, types.FunctionType):
            return repr(type(self.function))
        return f"{self.code.co_filename}:{self.code.co_firstlineno}"

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        if not isinstance(self.function, types.FunctionType):
            names = (getattr(self.function, name, "") for name in ("name", "__name__"))
            return next(
                (x for x in names if x and isinstance(x, str)), type(self.function).__name__
            )
        inner = f"{self.function.__qualname__}.<locals>.{self.code.co_name}"
        return inner if self.path else self.function.__qualname__


class Found(NamedTuple):
    """What a place does: a rotation, or why the code stays; ``rotates`` if it looks like one."""

    rotation: Rotation | None
    reason: str = ""
    rotates: bool = True


def worth(module: Any) -> bool:
    """Whether a module may hold model code: not torch, and not a library's infrastructure."""
    root, _, rest = str(module).partition(".")
    if module not in sys.modules:  # created by hand
        return False
    if root in ELSEWHERE or (root in LIBRARIES and not rest.startswith("models.")):
        return False
    return any(value is torch or value is nn for value in vars(sys.modules[module]).values())


def parts_of(model: nn.Module) -> Iterator[Any]:
    """Modules, and objects with model code that they hold, as diffusers' processors."""
    seen = set()
    for module in model.modules():
        yield module
        for value in list(vars(module).values()):
            other = not isinstance(value, nn.Module | torch.Tensor | type | types.FunctionType)
            other = other and hasattr(value, "__dict__") and worth(type(value).__module__)
            if other and id(value) not in seen:
                seen.add(id(value))
                yield value


# ------------------------------------------------------------------------------------------ finding


def own_of(function: types.FunctionType) -> types.FunctionType:
    """A function with the model's own code, whatever the function runs now."""
    code, closure = _own.get(function, function.__code__), function.__closure__
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    made.__annotations__ = function.__annotations__
    vars(made).update(vars(function))
    return made


def functions_behind(value: Any, names: Any = None) -> Iterator[types.FunctionType]:
    """The functions behind a value; of a class, only members with these names."""
    value = plain(value)
    if isinstance(value, staticmethod | classmethod):
        yield from functions_behind(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_behind(part)
    elif isinstance(value, functools.partial):
        yield from functions_behind(value.func)
    elif isinstance(value, types.MethodType):
        yield from functions_behind(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, types.ModuleType | type) and names and not issubclass_module(value):
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        members = vars(value) if worth(module) else {}
        for name in names & members.keys():
            if not isinstance(members[name], type | types.ModuleType):
                yield from functions_behind(members[name])


def issubclass_module(value: Any) -> bool:
    """Whether a value is a class of modules, whose instances are parts of the model themselves."""
    return isinstance(value, type) and issubclass(value, nn.Module)


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """What a function's code names, imports, or has in its closure: name, value, names it reads."""
    space, code = function.__globals__, _own.get(function, function.__code__)
    for part in codes_in(code):
        names = set(part.co_names)
        yield from ((name, space[name], names) for name in part.co_names if name in space)
        for level, sources, source in _imports(part):
            package = space.get("__package__") or ""
            try:
                where = (
                    importlib.util.resolve_name("." * level + source, package) if level else source
                )
            except ImportError:
                continue
            if worth(where):
                members = vars(sys.modules[where])
                yield from ((n, members[n], names) for n in sources or () if n in members)
    yield from (("", value, None) for value in contents(function))


def _imports(code: types.CodeType) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """What a function imports from modules: level, names, and the module."""
    before: list[Any] = []
    for x in dis.get_instructions(code) if "IMPORT_NAME" in _operations(code) else ():
        if x.opname == "IMPORT_NAME" and isinstance(before[-1], tuple):
            yield before[-2], before[-1], x.argval
        before = [*before[-1:], x.argval]


def _operations(code: types.CodeType) -> set[str]:
    return {dis.opname[x] for x in code.co_code[::2]}


def _members(part: Any) -> Iterator[tuple[types.FunctionType, type | None, bool]]:
    """Functions that an object's class has, and that itself holds: with owner, whether bound."""
    taken: set[str] = set()
    for base in type(part).__mro__:
        if worth(base.__module__):
            for name, value in list(vars(base).items()):
                if name not in taken and not isinstance(value, type):
                    bound = isinstance(value, types.FunctionType)
                    yield from ((f, base, bound) for f in functions_behind(value))
        taken |= {name for name, x in vars(base).items() if not _calls_super(x)}
    for value in list(vars(part).values()):
        function = value.func if isinstance(value, functools.partial) else value
        if isinstance(function, types.FunctionType):
            yield function, None, False


def _calls_super(member: Any) -> bool:
    """Whether a member of a class also runs that of the class's bases."""
    return any("__class__" in f.__code__.co_freevars for f in functions_behind(member))


def reach(part: Any) -> dict[Place, Found]:
    """Rotations that the methods of a module, or of an object, reach, and code that looks so."""
    found: dict[Place, Found] = {}
    pending, seen = list(_members(part)), set()
    while pending:
        function, owner, bound = pending.pop()
        if function in seen or not worth(function.__module__):
            continue
        seen.add(function)
        place, code = Place(function), Place(function).code
        if _found.get(function, (None,))[0] is not code:
            _found[function] = code, _examined(function, owner, bound)
        examined = _found[function][1]
        if examined.rotation is not None:
            found[place] = examined
            continue
        inner = list(_inner(function))
        found |= {inside: x for inside, x in inner if x.rotation or x.reason}
        for name, value, names in _used(function):
            behind = list(functions_behind(value, names))
            pending += [(f, None, False) for f in behind]
            if not behind and _is_other(name, value):
                found[Place(value)] = Found(
                    None, f"it is no function, but of the type {type(value).__name__}"
                )
        if examined.reason and not any(x.rotation for _, x in inner):
            found[place] = examined
    return {place: x for place, x in found.items() if not _composes(place, x, found)}


def _is_other(name: str, value: Any) -> bool:
    """Whether something callable that is no function looks like a rotation."""
    if not callable(value) or isinstance(value, type | nn.Module):
        return False
    return bool(ROTATES.match(name) or (worth(type(value).__module__) and roles_of(value)))


def _composes(place: Place, found: Found, others: dict[Place, Found]) -> bool:
    """Whether code that looks like a rotation only calls others that have a place of their own."""
    if (
        found.rotation is not None
        or place.path
        or not isinstance(place.function, types.FunctionType)
    ):
        return False
    called = {name for part in codes_in(place.code) for name in part.co_names}
    inner = [Place(f) for value in contents(place.function) for f in functions_behind(value)]
    kinds = [x for x, y in others.items() if x != place and (y.rotation or not found.rotates)]
    names = {x.name.rpartition(".")[2] for x in kinds}
    return not names.isdisjoint(called) or any(x in inner for x in kinds)


def _examined(function: types.FunctionType, owner: type | None, bound: bool) -> Found:
    """What a function does."""
    own = own_of(function)
    result: Rotation | str = ""
    if bound and function.__name__ == "forward":
        made = subtracts(own) and issubclass(owner or object, nn.Module)
        result = recognise_method(own) if made else ""
    elif bound and not function.__name__.startswith("__"):
        instance = _bare(owner)
        if instance is not None:
            result = recognise(types.MethodType(own, instance), owner=owner)
    elif not bound:
        result = recognise(own, owner=owner)
    if isinstance(result, Rotation):
        return Found(result)
    if BIASES.match(function.__name__):
        return Found(None, BIAS, rotates=False)
    named = ROTATES.match(function.__name__) is not None or result.startswith("it rotates")
    code = getattr(inspect.unwrap(function), "__code__", function.__code__)
    if named or (not bound and code.co_varnames[:1] != ("self",) and roles_of(own)):
        return Found(None, result or INLINE)
    if bound and turns_inline(own):
        return Found(None, INLINE, rotates=False)
    return Found(None)


def _bare(cls: Any) -> Any:
    """An instance without attributes: a method that runs with it does not depend on any."""
    try:
        return object.__new__(cls)
    except TypeError:  # abstract classes, and those of dictionaries
        return None


def _inner(function: types.FunctionType) -> Iterator[tuple[Place, Found]]:
    """Functions that a function's code defines, without variables around them."""

    def walk(code: types.CodeType, path: tuple[int, ...]) -> Iterator[tuple[Place, types.CodeType]]:
        for at, x in enumerate(code.co_consts):
            if not isinstance(x, types.CodeType) or x.co_name.startswith("<"):
                continue
            if x.co_flags & inspect.CO_OPTIMIZED and not x.co_freevars:
                yield Place(function, (*path, at)), x
                yield from walk(x, (*path, at))

    for place, code in walk(_own.get(function, function.__code__), ()):
        key = code, id(function.__globals__)
        if key not in _inside:
            made = types.FunctionType(code, function.__globals__, code.co_name)
            result = recognise(made)
            if isinstance(result, str) and not result.startswith("it rotates"):
                named = ROTATES.match(code.co_name) or roles_of(made)
                result = result if named else ""
            _inside[key] = function.__globals__, result
        result = _inside[key][1]
        yield place, Found(result) if isinstance(result, Rotation) else Found(None, result)


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


# ----------------------------------------------------------------------------------------- swapping


def _guarded(turned: Any, own: types.FunctionType, owner: type) -> Any:
    """A rotation that is a method: a subclass that overrides what it calls runs the model's own."""
    names = {name for part in codes_in(own.__code__) for name in part.co_names}
    parts = {n: inspect.getattr_static(owner, n) for n in names if hasattr(owner, n)}

    known: dict[type, bool] = {owner: True}

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(instance)
        alike = known.get(kind)
        if alike is None and not torch.compiler.is_compiling():
            found = (inspect.getattr_static(kind, name, None) is x for name, x in parts.items())
            alike = known[kind] = all(found)
        return (turned if alike else own)(instance, *args, **kwargs)

    return method if parts else turned


def _calling(place: Place, rotation: Rotation) -> types.CodeType:
    """Code with the same arguments that calls the rotation, in the place of the model's own.

    The rotation is a global while the code is there. A thread that is in the code when it is
    exchanged finds it in ``CALLS``.
    """
    own, function = place.code, place.function
    name = re.sub(r"\W", "_", f"posembed_{own.co_name}_{len(CALLS)}")  # or a lambda
    called = rotation.original
    bound = isinstance(called, types.MethodType) or hasattr(called, "attributes")
    made: Any = rotation.function(bound=bound)
    if isinstance(called, types.MethodType):
        made = _guarded(made, own_of(function), type(called.__self__))
    CALLS[name] = made
    count, alone = own.co_argcount, own.co_kwonlyargcount
    names = list(own.co_varnames)
    heads, only = names[:count], names[count : count + alone]
    rest = names[count + alone :]
    some = [f"*{rest.pop(0)}"] if own.co_flags & inspect.CO_VARARGS else []
    more = [f"**{rest.pop(0)}"] if own.co_flags & inspect.CO_VARKEYWORDS else []
    star = some or (["*"] if only else [])
    positional = heads[: own.co_posonlyargcount]
    given = [*positional, *["/"] * bool(positional), *heads[len(positional) :], *star, *only, *more]
    passed = [*heads, *some, *(f"{x}={x}" for x in only), *more]
    text = f"""def function({", ".join(given)}):
    try:
        call = {name}
    except NameError:
        from {__name__} import CALLS
        call = CALLS[{name!r}]
    return call({", ".join(passed)})
"""
    space: dict[str, Any] = {}
    exec(compile(text, own.co_filename, "exec"), space)
    code: types.CodeType = space["function"].__code__
    facts: dict[str, Any] = {"co_name": own.co_name, "co_freevars": own.co_freevars}
    if hasattr(own, "co_qualname"):
        facts["co_qualname"] = own.co_qualname
    return code.replace(co_filename=own.co_filename, co_firstlineno=own.co_firstlineno, **facts)


def _replaced(code: types.CodeType, path: tuple[int, ...], new: types.CodeType) -> types.CodeType:
    if not path:
        return new
    constants = list(code.co_consts)
    constants[path[0]] = _replaced(constants[path[0]], path[1:], new)
    return code.replace(co_consts=tuple(constants))


def swap(place: Place, rotation: Rotation, model: nn.Module) -> None:
    """Makes code run a rotation, for this model and all that share it."""
    with _lock:
        _users.setdefault(place, weakref.WeakSet()).add(model)
        _own.setdefault(place.function, place.function.__code__)
        calls = _calls.setdefault(place.function, {})
        if place.path not in calls or calls[place.path][0] is not rotation:
            calls[place.path] = rotation, _calling(place, rotation)
            _codes.pop(place.function, None)
        _renew(place.function)


def restore(model: nn.Module) -> None:
    """Gives functions their own code back that no other patched model uses."""
    with _lock:
        for place, users in list(_users.items()):
            users.discard(model)
            if not users:
                del _users[place]
                _renew(place.function)


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """For the block, all functions have the models' own code."""
    with _lock:
        functions = {f: f.__code__ for f in _own}
        for function, code in _own.items():
            function.__code__ = code
        OWN.append(None)
        try:
            yield
        finally:
            OWN.pop()
            for function, code in functions.items():
                function.__code__ = code


def _renew(function: types.FunctionType) -> None:
    """Gives a function the code for all its places that are in use; the same each time."""
    paths = tuple(sorted(place.path for place in _users if place.function is function))
    known, calls = _codes.setdefault(function, {}), _calls[function]
    if paths not in known:
        code = _own[function]
        for path in paths:
            code = _replaced(code, path, calls[path][1])
        known[paths] = code
    names = {path: {n for n in code.co_names if n in CALLS} for path, (_, code) in calls.items()}
    used = set().union(*(names[path] for path in paths))
    function.__globals__.update((name, CALLS[name]) for name in used)
    if function.__code__ is not known[paths]:
        function.__code__ = known[paths]
    for name in set().union(*names.values()) - used:
        function.__globals__.pop(name, None)
    if not paths:
        del _own[function]
