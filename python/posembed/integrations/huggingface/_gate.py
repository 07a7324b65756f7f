"""Whether a function only does arithmetic that is linear in what it rotates, so that it may be run.

It allows what it knows: every name is resolved from the function's globals, and ends in a function
of one list. Anything else may have an effect, or depend on values, and the function stays.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import math
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

BUILTINS = {
    *("abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "isinstance", "len"),
    *("list", "max", "min", "range", "reversed", "slice", "sorted", "str", "sum", "tuple", "zip"),
}
LIBRARIES = {"torch", "torch.nn.functional", "torch.nn", "torch.amp", "math", "einops", "typing"}
# Functions and methods that are linear or structural in what rotates, and those that make tables.
LINEAR = {
    *("add", "add_", "addcmul", "addcmul_", "bmm", "copy_", "einsum", "matmul", "mul", "mul_"),
    *("multiply", "neg", "neg_", "negative", "sub", "sub_", "subtract", "sum", "complex", "conj"),
    *("cat", "chunk", "clone", "concat", "contiguous", "expand", "expand_as", "flatten", "flip"),
    *("broadcast_tensors", "broadcast_to", "gather", "hstack", "index_select", "movedim", "narrow"),
    *("pad", "permute", "ravel", "rearrange", "repeat", "repeat_interleave", "reshape"),
    *("reshape_as", "roll", "select", "split", "split_with_sizes", "squeeze", "stack", "swapaxes"),
    *("swapdims", "take_along_dim", "tensor_split", "tile", "transpose", "unbind", "unflatten"),
    *("unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "t", "empty_like"),
    *("zeros_like", "ones_like", "empty", "zeros", "ones", "tensor", "new_empty", "new_zeros"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "arange", "cos", "sin"),
    *("polar", "outer", "div", "autocast", "is_tensor", "is_complex", "is_floating_point"),
}
FACTS = {
    *("shape", "dtype", "device", "ndim", "dim", "size", "numel", "T", "mT", "real", "imag"),
    *("itemsize", "append", "extend", "insert", "items", "keys", "values", "format", "pop"),
    *("dtypes", "get"),
}
READS = {"get", "items", "keys", "values"}  # of dictionaries
PRODUCTS = {"mul", "multiply", "mul_", "addcmul", "addcmul_", "einsum", "matmul", "bmm"}
CHANGES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "YIELD_FROM"}
PLAIN = (int, float, str, torch.dtype, type(None))
CONTAINERS = (dict, list, set)


def plain_function(function: Any, *, attributes: Collection[str] = (), owner: Any = None) -> Gate:
    """What the gate knows of a function, of those that it wraps, and of those that it calls.

    Args:
        function: The function.
        attributes: Names of attributes that it may read from its instance.
        owner: Its class if it is a method, which may call others of the class.
    """
    gate = Gate(attributes, owner)
    if has_wrapper(function):
        gate.reason = "a function wraps it, whose effect is not known"
        return gate
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount < 2:
        gate.reason = "computes no known rotation"
    else:
        gate.reason = gate.effect(function)
        if not gate.reason and not any(map(_multiplies, gate.codes)):
            gate.reason = "computes no known rotation"
    return gate


def has_wrapper(function: Any) -> bool:
    """Whether another function wraps a function; it may have any effect."""
    while hasattr(function, "__wrapped__"):
        if str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] != "torch":
            return True
        if function.__code__.co_name != "decorate_autocast":
            return True  # no_grad, and others that change gradients
        function = function.__wrapped__
    return False


class Gate:
    """Reads the code of a function and of all that it calls.

    Args:
        attributes: Names of attributes that functions may read.
        owner: The class of methods that functions may call.
        more: Names of other functions of PyTorch that they may call.

    Attributes:
        codes: What it has read.
        reason: Why the function must not be run, or ''.
    """

    def __init__(
        self, attributes: Collection[str], owner: type | None, more: Collection[str] = ()
    ) -> None:
        self.functions = LINEAR.union(more)
        self.known = self.functions | FACTS | set(attributes)
        self.owner = owner
        self.codes: dict[types.CodeType, None] = {}
        self.reason = ""

    def effect(self, function: types.FunctionType) -> str:
        """What a function does beside arithmetic, or ''."""
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        held = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
        if any(isinstance(x, CONTAINERS) for x in (*defaults, *held)):
            return "it holds a list or a dictionary that it may change"
        for value in held:
            if effect := self._use("a variable around it", value):
                return effect
        for code in codes_in(function.__code__):
            if code not in self.codes:
                self.codes[code] = None
                if effect := self._of_code(code, function.__globals__):
                    return effect
        return ""

    def _of_code(self, code: types.CodeType, space: dict[str, Any]) -> str:
        writes = any(x.opname == "STORE_SUBSCR" for x in dis.get_instructions(code))
        chain: tuple[str, Any] | None = None
        for x in itertools.chain(dis.get_instructions(code), [None]):
            load = x is not None and x.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if chain is not None and load:
                assert x is not None
                chain = _attribute(chain, x.argval)
                if chain is None:
                    return f"it uses {x.argval}, which is not known to be free of effects"
                continue
            if chain is not None:
                if effect := self._use(*chain):
                    return effect
                if writes and isinstance(chain[1], CONTAINERS):
                    return f"it changes {chain[0]}"
                chain = None
            if x is None:
                return ""
            if x.opname in CHANGES or x.opname.startswith("IMPORT"):
                return f"it has an effect: {x.opname} {x.argval}"
            if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if x.argval not in space and not hasattr(builtins, x.argval):
                    return f"it uses {x.argval}, which is not defined"
                chain = x.argval, space.get(x.argval, getattr(builtins, x.argval, None))
            elif load and x.argval not in self.known and (effect := self._method(x.argval)):
                return effect
        return ""

    def _method(self, name: str) -> str:
        """Why a method may not be called: it is no pure one of the class."""
        value = inspect.getattr_static(self.owner, name, None) if self.owner else None
        value = value.__func__ if isinstance(value, staticmethod) else value
        if isinstance(value, types.FunctionType):
            return self.effect(value)
        return f"it uses {name}, which is not known to be linear and free of effects"

    def _use(self, name: str, value: Any) -> str:
        """Why a value may not be used, or ''."""
        unknown = f"it uses {name}, which is not known to be linear and free of effects"
        if isinstance(value, (*PLAIN, *CONTAINERS, tuple, frozenset)) or value is Tensor:
            return ""
        if isinstance(value, types.ModuleType):
            return unknown
        last = name.rpartition(".")[2]
        if getattr(builtins, last, None) is value:
            error = isinstance(value, type) and issubclass(value, Exception)
            return "" if error or last in BUILTINS or last in self.known else unknown
        inner = inspect.unwrap(value) if callable(value) else value
        root = str(getattr(inner, "__module__", None) or "").partition(".")[0]
        if isinstance(inner, types.FunctionType) and root not in ("torch", "einops"):
            return unknown if has_wrapper(value) else self.effect(inner)
        if (self.owner is not None and value in self.owner.__mro__) or root == "typing":
            return ""
        if inner in vars(math).values():
            return ""
        known = last in self.functions or value in (torch.finfo, torch.Size, torch.device)
        return "" if known and root in ("torch", "einops", "_VariableFunctionsClass") else unknown


def _attribute(chain: tuple[str, Any], name: str) -> tuple[str, Any] | None:
    """What an attribute of a global is; None if it may not be read."""
    path, value = f"{chain[0]}.{name}", chain[1]
    if isinstance(value, types.ModuleType):
        known = value.__name__ in LIBRARIES and hasattr(value, name)
        return (path, getattr(value, name)) if known else None
    if isinstance(value, PLAIN) or callable(value):
        return path, inspect.getattr_static(value, name, None)
    if type(value) is dict and name in READS:
        return path, value
    return None


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def compared(function: Any) -> list[Any]:
    """Constants that a function's code compares something with."""
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


def _multiplies(code: types.CodeType) -> bool:
    return not PRODUCTS.isdisjoint(code.co_names) or any(
        x.opname in ("BINARY_MULTIPLY", "INPLACE_MULTIPLY")
        or (x.opname == "BINARY_OP" and x.argrepr in ("*", "*="))
        for x in dis.get_instructions(code)
    )


def subtracts(function: types.FunctionType) -> bool:
    """Whether a function's own code has a difference or a change of sign, as a rotation has."""
    return any(
        x.opname in ("UNARY_NEGATIVE", "BINARY_SUBTRACT") or x.argrepr in ("-", "-=")
        for x in dis.get_instructions(function.__code__)
        if x.opname.startswith(("BINARY_", "UNARY_"))
    )


# ---------------------------------------------------------------------------------------- branches


class Branches:
    """Conditional jumps of some code, and which of their sides have run.

    Jumps on None, on kinds of arguments and on arguments that are booleans or texts are decided by
    the options of a call and do not count, nor do those on devices or sets of their names, since
    calls on each device are compared, or sides that only raise.
    """

    def __init__(self, codes: Collection[types.CodeType]) -> None:
        self.jumps = {code: dict(_jumps(code)) for code in codes}
        self.taken: set[tuple[types.CodeType, int, bool]] = set()
        self.optional: set[tuple[types.CodeType, int]] = set()

    def __bool__(self) -> bool:
        return any(self.jumps.values())

    def _all(self) -> Iterator[_Jump]:
        for jumps in self.jumps.values():
            yield from jumps.values()

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        """Traces a frame, for ``sys.settrace``."""
        jumps = self.jumps.get(frame.f_code)
        if not jumps:
            return None
        frame.f_trace_opcodes, before = True, -1

        def step(frame: types.FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                if before in jumps:
                    self.taken.add((frame.f_code, before, frame.f_lasti == jumps[before].next))
                before = frame.f_lasti
                if before in jumps and jumps[before].is_option(frame.f_locals):
                    self.optional.add((frame.f_code, before))
            return step

        return step

    def __enter__(self) -> None:
        """Sees the sides that run in the block."""
        self.before = sys.gettrace()
        if self:
            sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        if self:
            sys.settrace(self.before)

    def first(self) -> str:
        """What the first jump depends on."""
        return next(f"it branches on {x.names}" for x in self._all())

    def unknown(self) -> str:
        """What a jump depends on of which one side has not run, or ''."""
        for code, jumps in self.jumps.items():
            for offset, jump in jumps.items():
                sides = [(code, offset, side) in self.taken for side in (True, False)]
                if any(sides) and not all(sides) and (code, offset) not in self.optional:
                    missing = [
                        where for ran, where in zip(sides, jump.ends, strict=True) if not ran
                    ]
                    if not all(_raises(code, where) for where in missing):
                        return f"it branches on {jump.names}"
        return ""


class _Jump:
    """A conditional jump: the offsets after it, and what its condition reads."""

    def __init__(self, code: types.CodeType, condition: list[dis.Instruction], following: int):
        self.next = following
        self.ends = following, int(condition[-1].argval)
        names = [x.argval for x in condition if x.opname.startswith("LOAD_FAST")]
        self.read = [n for name in names for n in (name if isinstance(name, tuple) else (name,))]
        facts = [x.argval for x in condition if x.opname in ("LOAD_ATTR", "LOAD_METHOD")]
        self.names = ", ".join(map(str, facts or self.read)) or "a value"
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.is_plain = not facts and bool(self.read)
        self.of_arguments = set(self.read) <= set(given)

    def is_option(self, values: dict[str, Any]) -> bool:
        """Whether the condition only reads arguments that are booleans, texts or None, or sets."""
        kinds = (bool, str, type(None)) if self.of_arguments else (set, frozenset)
        return self.is_plain and all(isinstance(values.get(n), kinds) for n in self.read)


def _jumps(code: types.CodeType) -> Iterator[tuple[int, _Jump]]:
    condition: list[dis.Instruction] = []
    steps = list(dis.get_instructions(code))
    for x, after in zip(steps, [*steps[1:], None], strict=True):
        condition = [x] if x.starts_line else [*condition, x]
        if "JUMP" not in x.opname or "_IF_" not in x.opname or after is None:
            continue
        opposite = "NONE" in x.opname or any(y.opname == "IS_OP" for y in condition)
        kinds = any(y.argval in ("isinstance", "is_tensor", "is_complex") for y in condition)
        if not opposite and not kinds and not any(y.argval == "device" for y in condition):
            yield x.offset, _Jump(code, condition, after.offset)
        condition = []


def _raises(code: types.CodeType, offset: int) -> bool:
    """Whether the code from an offset on only raises."""
    for x in dis.get_instructions(code):
        if x.offset >= offset:
            if x.opname == "RAISE_VARARGS":
                return True
            if x.opname.startswith("RETURN") or "JUMP" in x.opname:
                return False
    return False
