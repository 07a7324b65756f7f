"""Whether a function only does arithmetic that is linear in what it rotates, so that it may be run.

It allows what it knows: every name is resolved from the function's globals, and ends in a function
of one list. Anything else may have an effect, or depend on values, and the function stays.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
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
    *("zeros_like", "ones_like", "empty", "zeros", "ones", "new_empty", "new_zeros"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "arange", "cos", "sin"),
    *("polar", "outer", "div", "autocast", "is_tensor", "is_complex", "is_floating_point"),
}
FACTS = {
    *("shape", "dtype", "device", "ndim", "dim", "size", "numel", "T", "mT", "real", "imag"),
    *("itemsize", "append", "extend", "insert", "items", "keys", "values", "format", "pop"),
    *("dtypes", "get"),
}
READS = {"get", "items", "keys", "values"}  # of dictionaries
PRODUCTS = {"*", "*=", "mul", "multiply", "mul_", "addcmul", "addcmul_", "einsum", "matmul", "bmm"}
CHANGES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "YIELD_FROM"}
LOADS = ("LOAD_ATTR", "LOAD_METHOD")
# Conditions that do not count: on None, on how a with block ends, on kinds of arguments.
FREE, KINDS = {"IS_OP", "WITH_EXCEPT_START"}, {"isinstance", "is_tensor", "is_complex", "device"}
PLAIN = (int, float, str, torch.dtype, type(None))
CONTAINERS = (dict, list, set)
ENDS = ("RAISE", "RETURN", "JUMP", "POP_JUMP")  # of straight code
WRAPPED = "a function wraps it, whose effect is not known"
UNKNOWN = "computes no known rotation"
FOREIGN = "it uses {}, which is not known to be linear and free of effects"
# A conditional jump: the offsets after it and at its target, what its condition reads, variables
# that decide it alone, and their types if they are options of a call.
Jump = tuple[int, int, str, list[str], tuple[type, ...]]
SYMBOLS = {"BINARY_MULTIPLY": "*", "BINARY_SUBTRACT": "-", "UNARY_NEGATIVE": "-"}  # in Python 3.10


class Gate:
    """Reads the code of a function and of all that it calls, and sees which of its sides run.

    Jumps on None, on kinds of arguments and on arguments that are booleans or texts are decided by
    the options of a call and do not count, nor do those on devices or sets of their names, since
    calls on each device are compared, or sides that only raise.

    Args:
        functions: What it reads.
        attributes: Names of attributes that functions may read.
        owner: The class of methods that functions may call.
        more: Names of other functions of PyTorch that they may call.

    Attributes:
        codes: What it has read.
        names: Names and operators in it.
        jumps: The jumps that count, by offset, for each code that has any.
        reason: Why the functions must not be run, or ''.
    """

    def __init__(
        self,
        functions: Iterable[types.FunctionType],
        attributes: Collection[str],
        owner: type | None,
        more: Collection[str] = (),
    ) -> None:
        self.functions, self.owner = LINEAR.union(more), owner
        self.known = self.functions | FACTS | set(attributes)
        self.codes: set[types.CodeType] = set()
        self.names: set[str] = set()
        self.jumps: dict[types.CodeType, dict[int, Jump]] = {}
        self.taken: set[tuple[types.CodeType, int, int]] = set()
        self.optional: set[tuple[types.CodeType, int]] = set()
        self.reason = next(filter(None, map(self.effect, functions)), "")

    def effect(self, function: types.FunctionType) -> str:
        """What a function does beside arithmetic, or ''."""
        while hasattr(function, "__wrapped__"):  # as no_grad does; only autocast is known
            root = str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0]
            if root != "torch" or function.__code__.co_name != "decorate_autocast":
                return WRAPPED
            function = function.__wrapped__
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(isinstance(value, CONTAINERS) for value in (*defaults, *contents(function))):
            return "it holds a list or a dictionary that it may change"
        for value in contents(function):
            if effect := self._use("a variable around it", value):
                return effect
        for code in codes_in(function.__code__):
            if code not in self.codes:
                self.codes.add(code)
                self.names.update(code.co_names, arithmetic(code))
                if jumps := dict(_jumps(code)):
                    self.jumps[code] = jumps
                if effect := self._of_code(code, function.__globals__):
                    return effect
        return ""

    def _of_code(self, code: types.CodeType, space: dict[str, Any]) -> str:
        steps, at = list(dis.get_instructions(code)), 0
        while at < len(steps):
            operation, name = steps[at].opname, steps[at].argval
            at += 1
            if operation in CHANGES or operation.startswith("IMPORT"):
                return f"it has an effect: {operation} {name}"
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name not in space and not hasattr(builtins, name):
                    return f"it uses {name}, which is not defined"
                value = space.get(name, getattr(builtins, name, None))
                while at < len(steps) and steps[at].opname in LOADS:
                    last, at = steps[at].argval, at + 1
                    name += "." + last
                    if isinstance(value, types.ModuleType):
                        known = value.__name__ in LIBRARIES and hasattr(value, last)
                        value = getattr(value, last, None)
                    elif isinstance(value, PLAIN) or callable(value):
                        known, value = True, inspect.getattr_static(value, last, None)
                    else:
                        known = type(value) is dict and last in READS
                    if not known:
                        return f"it uses {last}, which is not known to be free of effects"
                if effect := self._use(name, value):
                    return effect
                if isinstance(value, CONTAINERS) and "STORE_SUBSCR" in [x.opname for x in steps]:
                    return f"it changes {name}"
            elif operation in LOADS and name not in self.known:  # a pure method of the class
                value = inspect.getattr_static(self.owner, name, None) if self.owner else None
                value = value.__func__ if isinstance(value, staticmethod) else value
                if not isinstance(value, types.FunctionType):
                    return FOREIGN.format(name)
                if effect := self.effect(value):
                    return effect
        return ""

    def _use(self, name: str, value: Any) -> str:
        """Why a value may not be used, or ''."""
        last, unknown = name.rpartition(".")[2], FOREIGN.format(name)
        if isinstance(value, (*PLAIN, *CONTAINERS, tuple, frozenset)) or value is Tensor:
            return ""
        if isinstance(value, types.ModuleType):
            return unknown
        if getattr(builtins, last, None) is value:
            error = isinstance(value, type) and issubclass(value, Exception)
            return "" if error or last in BUILTINS or last in self.known else unknown
        inner = inspect.unwrap(value) if callable(value) else value
        root = str(getattr(inner, "__module__", None) or "").partition(".")[0]
        if isinstance(inner, types.FunctionType) and root not in ("torch", "einops"):
            effect = self.effect(value)
            return unknown if effect == WRAPPED else effect
        if (self.owner is not None and value in self.owner.__mro__) or root == "typing":
            return ""
        if inner in vars(math).values():
            return ""
        known = last in self.functions or value in (torch.finfo, torch.Size, torch.device)
        return "" if known and root in ("torch", "einops", "_VariableFunctionsClass") else unknown

    # ---------------------------------------------------------------------------------- branches

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sees the sides of jumps that run in the block."""
        before: dict[types.FrameType, int] = {}

        def step(frame: types.FrameType, event: str, _: Any) -> Any:
            code, at = frame.f_code, frame.f_lasti
            jumps = self.jumps.get(code)
            if not jumps:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                last = before.get(frame, -1)
                if last in jumps:
                    self.taken.add((code, last, at != jumps[last][0]))
                before[frame] = at
                if at in jumps:
                    _, _, _, options, kinds = jumps[at]
                    values = [frame.f_locals.get(name) for name in options]
                    if values and all(isinstance(x, kinds) for x in values):
                        self.optional.add((code, at))
            return step

        outer = sys.gettrace()
        sys.settrace(step)
        try:
            yield
        finally:
            sys.settrace(outer)

    def unseen(self) -> str:
        """What a jump depends on of which one side has not run, or ''."""
        for code, jumps in self.jumps.items():
            steps = [x for x in dis.get_instructions(code) if x.opname.startswith(ENDS)]
            for offset, (after, target, names, *_) in jumps.items():
                ran = [side for side in (0, 1) if (code, offset, side) in self.taken]
                if len(ran) == 1 and (code, offset) not in self.optional:
                    other = (after, target)[1 - ran[0]]
                    ends = (x.opname for x in steps if x.offset >= other)
                    if next(ends, "") != "RAISE_VARARGS":
                        return f"it branches on {names}"
        return ""


# ------------------------------------------------------------------------------------------- code


def contents(function: Callable[..., Any]) -> list[Any]:
    """The values in a function's closure; None for an empty cell."""
    found: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        found.append(None)
        with contextlib.suppress(ValueError):
            found[-1] = cell.cell_contents
    return found


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def arithmetic(code: types.CodeType) -> list[str]:
    """The operators in some code, as "*", "-" and "-="."""
    steps = dis.get_instructions(code)
    return [x.argrepr if x.opname == "BINARY_OP" else SYMBOLS.get(x.opname, "") for x in steps]


def _jumps(code: types.CodeType) -> Iterator[tuple[int, Jump]]:
    """The jumps that count, by offset."""
    condition: list[dis.Instruction] = []
    steps = list(dis.get_instructions(code))
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for x, after in itertools.pairwise(steps):
        condition = [x] if x.starts_line else [*condition, x]
        if "JUMP" not in x.opname or "_IF_" not in x.opname:
            continue
        free = any(y.opname in FREE or str(y.argval) in KINDS for y in condition)
        if "NONE" not in x.opname and not free:
            loads = [y.argval for y in condition if y.opname.startswith("LOAD_FAST")]
            read = [n for name in loads for n in (name if isinstance(name, tuple) else (name,))]
            facts = [y.argval for y in condition if y.opname in LOADS]
            names = ", ".join(map(str, facts or read)) or "a value"
            options = (bool, str, type(None)) if set(read) <= set(given) else (set, frozenset)
            yield x.offset, (after.offset, x.argval, names, [] if facts else read, options)
        condition = []
