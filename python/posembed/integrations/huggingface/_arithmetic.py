"""Whether a function does arithmetic on its arguments alone, so that it is safe to run it.

Its code, and that of functions it calls, uses only operators and tensor methods that have no effect
but their result.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

BUILTINS = {
    *("abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len"),
    *("list", "object"),
    *("max", "min", "NotImplementedError", "range", "reversed", "round", "slice", "sorted", "sum"),
    *("tuple", "type", "TypeError", "ValueError", "AssertionError", "RuntimeError", "zip", "set"),
    *("Exception", "hasattr", "callable", "map", "str", "repr"),
}
LIBRARIES = {"torch", "torch.nn.functional", "math", "einops", "typing", "torch.amp", "torch.nn"}
# Names in torch that change something, or give other results each time.
FORBIDDEN = {
    *("save", "load", "hub", "jit", "ops", "distributed", "compile", "seed", "manual_seed", "cuda"),
    *("set_default_dtype", "set_default_device", "set_num_threads", "rand", "randn", "randint"),
    *("rand_like", "randn_like", "randint_like", "randperm", "dropout", "bernoulli", "multinomial"),
    *("normal", "uniform_", "normal_", "random_", "exponential_", "backward", "tofile", "numpy"),
    *("utils", "library", "multiprocessing", "set_", "storage", "from_file", "open", "exec"),
}
KNOWN = {
    name
    for owner in (Tensor, torch, torch.nn.functional, torch.Size, str, list, dict, torch.dtype)
    for name in dir(owner)
} | {"type", "index", "autocast", "amp", "nn", "functional", "finfo", "pi", "Tensor", "enabled"}
PRODUCTS = {"mul", "multiply", "mul_", "addcmul", "addcmul_", "einsum", "matmul", "bmm"}
MUTATORS = {"append", "add", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
CHANGES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"}


def is_arithmetic(
    function: Any, owner: type | None = None, *, attributes: Collection[str] = ()
) -> bool:
    """Whether a function only computes, and with at least one product.

    Args:
        function: The function.
        owner: Its class if it is a method, which may call others of the class.
        attributes: Names of other attributes that it may read from its instance.
    """
    if has_wrapper(function):
        return False
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount < 2:
        return False
    reader = _Reader(owner, attributes)
    return reader.is_pure(function) and any(_multiplies(f.__code__) for f in reader.seen)


def has_wrapper(function: Any) -> bool:
    """Whether another function than PyTorch's wraps a function; it may have any effect."""
    while hasattr(function, "__wrapped__"):
        if not _is_of_torch(function):
            return True
        function = function.__wrapped__
    return False


def _is_of_torch(wrapper: Any) -> bool:
    """Whether a function that wraps another is PyTorch's, as those of autocast and no_grad."""
    space = getattr(wrapper, "__globals__", {})
    return str(space.get("__name__")).partition(".")[0] == "torch"


def compared(function: Any) -> list[Any]:
    """Constants that a function's code compares something with.

    Python 3.14 loads small integers by an instruction of their own.
    """
    code = getattr(function, "__code__", None)
    steps = list(dis.get_instructions(code)) if code is not None else []
    return list(
        dict.fromkeys(
            first.argval
            for first, second in itertools.pairwise(steps)
            if first.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
            and second.opname == "COMPARE_OP"
        )
    )


class _Reader:
    """Reads the code of a function and of all that it calls."""

    def __init__(self, owner: type | None, attributes: Collection[str]) -> None:
        self.owner = owner
        self.known = (KNOWN - FORBIDDEN).union(attributes)
        self.seen: set[types.FunctionType] = set()

    def is_pure(self, function: types.FunctionType) -> bool:
        """Whether a function has no effect."""
        if function in self.seen:
            return True
        self.seen.add(function)
        values = {**vars(builtins), **function.__globals__}
        codes = list(_codes(function.__code__))
        stores = any(
            x.opname == "STORE_SUBSCR" for code in codes for x in dis.get_instructions(code)
        )
        for code in codes:
            attributes = set(code.co_names)
            stores = stores or not MUTATORS.isdisjoint(attributes)
            for x in dis.get_instructions(code):
                if x.opname in CHANGES or x.opname.startswith("IMPORT"):
                    return False
                if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    attributes.discard(x.argval)
                    if x.argval not in values:
                        return False
                    value = values[x.argval]
                    if isinstance(value, dict | list | set) and not stores:
                        continue
                    if not self.is_harmless(x.argval, value):
                        return False
            if not all(map(self.is_method, attributes - self.known)):
                return False
        return all(self.is_harmless("", content) for content in _contents(function))

    def is_method(self, name: str) -> bool:
        """Whether a name is one of the class's own methods, and a pure one."""
        value = inspect.getattr_static(self.owner, name, None) if self.owner else None
        value = value.__func__ if isinstance(value, staticmethod) else value
        return isinstance(value, types.FunctionType) and self.is_pure(value)

    def is_harmless(self, name: str, value: Any) -> bool:
        """Whether a global value may be used."""
        if isinstance(value, types.ModuleType):
            return value.__name__ in LIBRARIES
        if isinstance(value, int | float | str | tuple | frozenset | torch.dtype | type(None)):
            return True
        if name and getattr(builtins, name, None) is value:
            return name in BUILTINS
        unwrapped = inspect.unwrap(value) if callable(value) else value
        root = str(getattr(unwrapped, "__module__", None) or "").partition(".")[0]
        if isinstance(unwrapped, types.FunctionType) and root not in ("torch", "einops"):
            return self.is_pure(unwrapped)
        if isinstance(value, type):
            return value is Tensor or root in ("typing", "builtins", "torch") or value is self.owner
        return name not in FORBIDDEN and root in ("torch", "einops", "math", "typing")


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield object()


def _multiplies(code: types.CodeType) -> bool:
    codes = list(_codes(code))
    if any(not PRODUCTS.isdisjoint(part.co_names) for part in codes):
        return True
    return any(_is_product(x) for part in codes for x in dis.get_instructions(part))


def subtracts(function: types.FunctionType) -> bool:
    """Whether a function's own code has a difference or a change of sign, as a rotation has."""
    return any(
        x.opname in ("UNARY_NEGATIVE", "BINARY_SUBTRACT") or x.argrepr in ("-", "-=")
        for x in dis.get_instructions(function.__code__)
        if x.opname.startswith(("BINARY_", "UNARY_"))
    )


def _is_product(x: dis.Instruction) -> bool:
    return x.opname in ("BINARY_MULTIPLY", "INPLACE_MULTIPLY") or (
        x.opname == "BINARY_OP" and x.argrepr in ("*", "*=")
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
