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

from posembed.integrations.huggingface._gate import arithmetic, codes_in, contents
from posembed.integrations.huggingface._reading import COS, SIN, recognise, roles_of, wrapped
from posembed.integrations.huggingface._rotation import OWN, Rotation

ELSEWHERE = {"torch", "posembed", *sys.stdlib_module_names} - {"__main__"}
LIBRARIES = {"transformers", "diffusers"}  # whose models are in a package of that name
BIASES = re.compile(r"build\w*alibi")
ROTATES = re.compile(r"_?(apply|rotate)\w*(rotary|rope|queries)|\w*(rotary|rope)_apply")
BIAS = "it makes one row for each head, too little to gain anything"
INLINE = "a method whose own code may rotate; posembed replaces functions"
LOOKS = (BIAS, INLINE)  # of what only looks as if it rotated
Path = tuple[int, ...]
CALLS: dict[str, Callable[..., Any]] = {}  # what code calls, by its name in globals

_lock = threading.RLock()
_own: dict[types.FunctionType, types.CodeType] = {}  # of functions that have other code now
_users: dict[Place, weakref.WeakSet[nn.Module]] = {}
# By function: of each path the rotation, the code that calls it and its name in CALLS; the code of
# the whole function for sets of paths; and of each path the code and what it does: a rotation, why
# it stays, or ''.
_calls: weakref.WeakKeyDictionary[Any, dict[Path, Any]] = weakref.WeakKeyDictionary()
_codes: weakref.WeakKeyDictionary[Any, dict[Any, types.CodeType]] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[Any, dict[Path, Any]] = weakref.WeakKeyDictionary()


class Place(NamedTuple):
    """Code of a model: that of a function, or of a function that its code defines.

    ``path`` is where the code is among the constants of the function's code; () is the whole.
    """

    function: Any
    path: Path = ()

    @property
    def code(self) -> types.CodeType:
        """The model's own code."""
        whole: Any = _own.get(self.function, self.function.__code__)
        return whole.co_consts[self.path[0]] if self.path else whole  # type: ignore[no-any-return]

    @property
    def title(self) -> tuple[str, str]:
        """The qualified name of the function, and its file and line."""
        if not isinstance(self.function, types.FunctionType):
            name = getattr(self.function, "name", "") or getattr(self.function, "__name__", "")
            kind = type(self.function)
            return name if name and isinstance(name, str) else kind.__name__, repr(kind)
        inner = f".<locals>.{self.code.co_name}" if self.path else ""
        where = f"{self.code.co_filename}:{self.code.co_firstlineno}"
        return self.function.__qualname__ + inner, where


def may_hold_models(module: Any) -> bool:
    """Whether a module may hold model code: not torch, and not a library's infrastructure."""
    root, _, rest = str(module).partition(".")
    if module not in sys.modules:  # created by hand
        return False
    if root in ELSEWHERE or (root in LIBRARIES and not rest.startswith("models.")):
        return False
    return not {id(torch), id(nn)}.isdisjoint(map(id, vars(sys.modules[module]).values()))


def parts_of(model: nn.Module) -> Iterator[Any]:
    """Modules, and objects with model code that they hold, as diffusers' processors."""
    seen = set()
    for module in model.modules():
        yield module
        for value in list(vars(module).values()):
            other = not isinstance(value, nn.Module | torch.Tensor | type | types.FunctionType)
            other = other and hasattr(value, "__dict__") and may_hold_models(type(value).__module__)
            if other and id(value) not in seen:
                seen.add(id(value))
                yield value


# ------------------------------------------------------------------------------------------ finding


def own_of(function: types.FunctionType) -> types.FunctionType:
    """A function with the model's own code, whatever the function runs now."""
    code, space = _own.get(function, function.__code__), function.__globals__
    made = types.FunctionType(code, space, None, function.__defaults__, function.__closure__)
    functools.update_wrapper(made, function)
    vars(made).pop("__wrapped__")
    vars(made).update(vars(function))
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def functions_behind(value: Any, names: Any = None) -> Iterator[types.FunctionType]:
    """The functions behind a value; of a class, only members with these names."""
    value = wrapped(type(value)) or value
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        yield from functions_behind(value.__func__)
    elif isinstance(value, functools.partial):
        yield from functions_behind(value.func)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_behind(part)
    elif isinstance(value, types.FunctionType):
        yield value
    elif names and isinstance(value, types.ModuleType | type):
        if isinstance(value, type) and issubclass(value, nn.Module):
            return  # its instances are parts of the model themselves
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        members = vars(value) if may_hold_models(module) else {}
        for name in names & members.keys():
            if not isinstance(members[name], type | types.ModuleType):
                yield from functions_behind(members[name])


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """What a function's code names, imports, or has in its closure: name, value, names it reads."""
    space, code = function.__globals__, _own.get(function, function.__code__)
    for part in codes_in(code):
        names, before = set(part.co_names), [None, None]
        yield from ((name, space[name], names) for name in part.co_names if name in space)
        imports = dis.opmap["IMPORT_NAME"] in part.co_code[::2]
        for x in dis.get_instructions(part) if imports else ():
            if x.opname == "IMPORT_NAME" and isinstance(before[1], tuple):
                level, where = before[0] or 0, x.argval
                with contextlib.suppress(ImportError):
                    package = space.get("__package__") or ""
                    where = importlib.util.resolve_name("." * level + where, package)
                    members = vars(sys.modules[where]) if may_hold_models(where) else {}
                    yield from ((n, members[n], names) for n in before[1] if n in members)
            before = [before[1], x.argval]
    yield from (("", value, None) for value in contents(function))


def _members(part: Any) -> Iterator[tuple[types.FunctionType, type | None, bool]]:
    """Functions that an object's class has, and that itself holds: with owner, whether bound."""
    taken: set[str] = set()
    for base in filter(lambda x: may_hold_models(x.__module__), type(part).__mro__):
        for name, value in list(vars(base).items()):
            functions = [] if name in taken else list(functions_behind(value))
            yield from ((f, base, isinstance(value, types.FunctionType)) for f in functions)
            # super() also runs that of the class's bases.
            if not any("__class__" in f.__code__.co_freevars for f in functions):
                taken.add(name)
    for value in list(vars(part).values()):
        function = value.func if isinstance(value, functools.partial) else value
        if isinstance(function, types.FunctionType):
            yield function, None, False


def reach(part: Any) -> dict[Place, Rotation | str]:
    """Rotations that the methods of a module, or of an object, reach, and why other code stays."""
    found: dict[Place, Rotation | str] = {}
    pending = [(Place(function), owner, bound) for function, owner, bound in _members(part)]
    seen = set()
    while pending:
        place, owner, bound = pending.pop()
        function, code = place.function, place.code
        if place in seen or not may_hold_models(function.__module__):
            continue
        seen.add(place)
        known = _found.setdefault(function, {})
        if known.get(place.path, (None,))[0] is not code:
            known[place.path] = code, _examined(place, owner, bound)
        result = known[place.path][1]
        if result:
            found[place] = result
        if isinstance(result, Rotation):
            continue
        if place.path:
            continue
        for at, x in enumerate(code.co_consts):  # functions inside, without variables around them
            if not isinstance(x, types.CodeType) or x.co_name.startswith("<"):
                continue
            if x.co_flags & inspect.CO_OPTIMIZED and not x.co_freevars:
                pending.append((Place(function, (at,)), None, False))
        for name, value, names in _used(function):
            behind = list(functions_behind(value, names))
            pending += [(Place(f), None, False) for f in behind]
            if behind or not callable(value) or isinstance(value, type | nn.Module):
                continue
            if ROTATES.match(name) or (may_hold_models(type(value).__module__) and roles_of(value)):
                found[Place(value)] = f"it is no function, but of the type {type(value).__name__}"
    return {place: x for place, x in found.items() if not _composes(place, x, found)}


def _composes(place: Place, result: Any, others: dict[Place, Rotation | str]) -> bool:
    """Whether code that looks like a rotation only calls others that have a place of their own."""
    if isinstance(result, Rotation) or place.path or type(place.function) is not types.FunctionType:
        return False
    called = {name for part in codes_in(place.code) for name in part.co_names}
    inner = [Place(f) for value in contents(place.function) for f in functions_behind(value)]
    for x, other in others.items():
        turns = isinstance(other, Rotation)
        if turns and x.function is place.function:
            return True
        near = x in inner or x.title[0].rpartition(".")[2] in called
        if near and x != place and (turns or result in LOOKS):
            return True
    return False


def _examined(place: Place, owner: type | None, bound: bool) -> Rotation | str:
    """What code does."""
    function = place.function
    own = types.FunctionType(place.code, function.__globals__) if place.path else own_of(function)
    name, found = own.__name__, None
    if bound and name == "forward":
        module = issubclass(owner or object, nn.Module)
        if module and not {"-", "-="}.isdisjoint(arithmetic(own.__code__)):
            found = recognise(own, attributes=True)
    elif bound and not name.startswith("__"):
        # A method that runs with an instance without attributes does not depend on any.
        with contextlib.suppress(TypeError):  # abstract classes, and those of dictionaries
            instance: Any = object.__new__(owner)  # type: ignore[arg-type]
            found = recognise(types.MethodType(own, instance), owner=owner)
    elif not bound:
        found = recognise(own, owner=owner)
    if isinstance(found, Rotation):
        return found
    if BIASES.match(name):
        return BIAS
    result = found or ""
    named = ROTATES.match(name) is not None or result.startswith("it rotates")
    code = getattr(inspect.unwrap(own), "__code__", own.__code__)
    if named or (not bound and code.co_varnames[:1] != ("self",) and roles_of(own)):
        return result or INLINE
    return INLINE if bound and turns_inline(own.__code__) else ""


def turns_inline(code: types.CodeType) -> bool:
    """Whether a method's code looks as if it rotated: it multiplies by variables cos and sin."""
    variables, names = (*code.co_varnames, *code.co_cellvars), set(code.co_names)
    if {"view_as_complex", "view_as_real"} <= names:
        return True
    both = any(map(COS.match, variables)) and any(map(SIN.match, variables))
    both = both and not {"cos", "sin"} <= names  # otherwise it makes tables
    operators = arithmetic(code)
    turned = "-" in operators or any("rotate" in name for name in names)
    return both and turned and operators.count("*") >= 2


# ----------------------------------------------------------------------------------------- swapping


def _guarded(turned: Any, own: types.FunctionType, owner: type) -> Any:
    """A rotation that is a method: a subclass that overrides what it calls runs the model's own."""
    names = {name for part in codes_in(own.__code__) for name in part.co_names}
    parts = {n: inspect.getattr_static(owner, n) for n in names if hasattr(owner, n)}
    known: dict[type, bool] = {owner: True}

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(instance)
        alike = not parts or known.get(kind)
        if alike is None and not torch.compiler.is_compiling():
            found = (inspect.getattr_static(kind, name, None) is x for name, x in parts.items())
            alike = known[kind] = all(found)
        return turned(*args, **kwargs) if alike else own(instance, *args, **kwargs)

    return method


def _calling(place: Place, rotation: Rotation) -> tuple[types.CodeType, str]:
    """Code with the same arguments that calls the rotation in place of the model's own, and a name.

    The rotation is a global while the code is there. A thread that is in the code when it is
    exchanged finds it in ``CALLS``.
    """
    own, called = place.code, rotation.original
    name = re.sub(r"\W", "_", f"posembed_{own.co_name}_{len(CALLS)}")  # or a lambda
    CALLS[name] = rotation.function()
    if isinstance(called, types.MethodType):
        CALLS[name] = _guarded(CALLS[name], own_of(place.function), type(called.__self__))
    cells = tuple(types.CellType() for _ in own.co_freevars)
    signature = inspect.signature(types.FunctionType(own, {}, closure=cells))
    forms = {"VAR_POSITIONAL": "*{0}", "VAR_KEYWORD": "**{0}", "KEYWORD_ONLY": "{0}={0}"}
    every = signature.parameters.values()
    passed = [forms.get(x.kind.name, "{0}").format(x.name) for x in every]
    if held := getattr(called, "attributes", ()):  # tables of the instance
        passed = [*passed[1:], *(f"{table}={passed[0]}.{table}" for table in held)]
    text = f"""def function{signature}:
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
    facts |= {"co_filename": own.co_filename, "co_firstlineno": own.co_firstlineno}
    return code.replace(**facts), name


def swap(place: Place, rotation: Rotation, model: nn.Module) -> None:
    """Makes code run a rotation, for this model and all that share it."""
    with _lock:
        _users.setdefault(place, weakref.WeakSet()).add(model)
        _own.setdefault(place.function, place.function.__code__)
        calls = _calls.setdefault(place.function, {})
        if place.path not in calls or calls[place.path][0] is not rotation:
            calls[place.path] = rotation, *_calling(place, rotation)
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
        code, constants = _own[function], list(_own[function].co_consts)
        for path in paths:
            if path:
                constants[path[0]] = calls[path][1]
            code = code.replace(co_consts=tuple(constants)) if path else calls[path][1]
        known[paths] = code
    for path, (_, _, name) in calls.items():
        if path in paths:
            function.__globals__[name] = CALLS[name]
        else:
            function.__globals__.pop(name, None)
    if function.__code__ is not known[paths]:
        function.__code__ = known[paths]
    if not paths:
        del _own[function]
