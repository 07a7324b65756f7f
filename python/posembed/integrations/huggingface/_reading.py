"""Reads the rotation that a function computes off its results, whatever its names are.

A rotation is linear in what it rotates. So the function runs on unit vectors, with tables whose
elements are all different: each output then says which element of which table multiplies which
component, with which sign. Random numbers of every dtype then tell how it rounds.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posembed.integrations.huggingface._gate import Branches, compared, plain_function
from posembed.integrations.huggingface._rotation import (
    INNER,
    NARROW,
    TOKENS_FIRST,
    Case,
    Columns,
    Form,
    Roles,
    Rotation,
    Rule,
    alike,
    equal,
)

BATCH, HEADS, KEY_HEADS, TOKENS, ROWS, HEAD = 2, 3, 4, 5, 7, 12
DIMS: list[int | None] = [1, -2, 2, None, -3, 0]
# Ordered so that the first ones distinguish most rules.
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
]
DOUBLE = [(torch.bfloat16, torch.float64), (torch.float32, torch.float64)]
PLAIN = (torch.float32, torch.float32)
FORMS: tuple[Form, ...] = ("pair", "complex", "matrices", "stacked", "joint", "angles")
DIMENSIONS = (-2, -3, 1, 2)  # of heads or tokens, if a function takes one
OPTIONS = 48  # combinations of options that are tried
NUMBERS = {"int", "float", "bool", "str"}
ARGUMENTS = 8  # functions with more are no rotations
COS, SIN = re.compile(r"cos(_|$|ine)"), re.compile(r"sin(_|$|e$)")
JOINT, COMPLEX = re.compile("sinusoid"), re.compile("freqs?_(ci|complex)")
OPTIONAL = re.compile("(k|key|v|value)(_|$)")
UNKNOWN = "computes no known rotation"
ROUNDS = "it rotates, but rounds its products in a way that the kernel has not"
DETACHED = "it rotates, but its results have no gradients"
MAKES = "it makes its cosines and sines itself, from positions or frequencies"
FIRST = 16  # of the numbers in tables; below are the factors 0 and 1


def contents(function: Callable[..., Any]) -> list[Any]:
    """The values in a function's closure; None for an empty cell."""
    found: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def wrapped(kind: type) -> Any:
    """The function that the kernels package has wrapped in a class; None for other classes."""
    if not issubclass(kind, nn.Module) or not hasattr(kind, "kernel_layer_name"):
        return None
    functions = [x for x in contents(kind.forward) if isinstance(x, types.FunctionType)]
    return functions[0] if len(functions) == 1 else None


def plain(value: Any) -> Any:
    """The function that the kernels package has wrapped in a module, or the value itself."""
    return wrapped(type(value)) or value


def roles_of(function: Callable[..., Any]) -> Roles | None:
    """The roles that names of arguments suggest; None if they suggest none."""
    found = _parameters(function)
    if found is None:
        return None
    names, defaults = found
    cos = [n for n in names if COS.match(n)]
    sin = [n for n in names if SIN.match(n) and not JOINT.match(n)]
    joint = [n for n in names if JOINT.match(n)]
    freqs = [n for n in names if COMPLEX.match(n)]
    if not (len(cos) == len(sin) == 1 or len(joint) == 1 or len(freqs) == 1):
        return None
    unsqueeze = next((n for n in names if n in ("unsqueeze_dim", "head_dim_axis")), None)
    positions = next((n for n in names if n in ("position_ids", "positions")), None)
    table = (cos or joint or freqs)[0]
    known = {table, *sin[:1], unsqueeze, positions}
    tensors = tuple(
        n
        for n in names
        if n not in known and (n not in defaults or (defaults[n] is None and OPTIONAL.match(n)))
    )
    if not 1 <= len(tensors) <= 3:
        return None
    form: Form = "separate" if cos else "joint" if joint else "complex"
    second = sin[0] if cos else None
    return Roles(names, defaults, tensors, table, second, form, unsqueeze, positions)


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Names of a function's arguments, and their defaults; None if there may be any number."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
        return None
    names = tuple(n for n, p in parameters.items() if p.kind != p.VAR_KEYWORD)
    empty = inspect.Parameter.empty
    return names, {n: p.default for n, p in parameters.items() if p.default is not empty}


def possible_roles(function: Callable[..., Any]) -> Iterator[Roles]:
    """All roles that arguments may have, without regard to their names, but for the form of tables.

    Tensors and tables are neighbours, in either order; other arguments are options with a default.
    """
    found = _parameters(function)
    if found is None or len(found[0]) > ARGUMENTS:
        return
    names, defaults = found
    free = [n for n in names if defaults.get(n) is None]
    if not _numbers_of(function).isdisjoint(n for n in free if n not in defaults):
        return
    needed = {n for n in free if n not in defaults}
    for count, tables in itertools.product((1, 2, 3), (1, 2)):
        for start in range(len(free) - count - tables + 1):
            block = free[start : start + count + tables]
            if needed <= set(block):
                for tensors, table in (
                    (block[:count], block[count:]),
                    (block[tables:], block[:tables]),
                ):
                    sin = table[1] if tables == 2 else None
                    yield Roles(names, defaults, tuple(tensors), table[0], sin)


def with_attributes(method: types.FunctionType) -> Callable[..., Any] | None:
    """A function of a method's arguments and of the attributes that it reads, up to two.

    Its ``attributes`` are their names, which come after the arguments. None if the method does
    anything else with its instance.
    """
    code, found = method.__code__, _parameters(method)
    if not code.co_varnames or found is None or code.co_cellvars:
        return None
    this = code.co_varnames[0]
    steps = list(dis.get_instructions(code))
    uses = [i for i, x in enumerate(steps) if x.argval == this or _holds(x.argval, this)]
    read = [steps[i + 1] for i in uses if steps[i].opname.startswith("LOAD_FAST")]
    attributes = tuple(dict.fromkeys(x.argval for x in read))
    if len(read) < len(uses) or any(x.opname != "LOAD_ATTR" for x in read):
        return None
    if not 1 <= len(attributes) <= 2 or set(attributes) & set(found[0]):
        return None

    def function(*args: Any, **kwargs: Any) -> Any:
        held = {name: kwargs.pop(name) for name in attributes}
        return method(types.SimpleNamespace(**held), *args, **kwargs)

    signature = inspect.signature(method)
    own = [x.replace(kind=x.KEYWORD_ONLY) for x in list(signature.parameters.values())[1:]]
    tables = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in attributes]
    made: Any = function
    made.__signature__ = signature.replace(parameters=[*own, *tables])
    made.__wrapped__, made.attributes, made.__name__ = method, attributes, method.__name__
    return function


def _holds(value: Any, name: str) -> bool:
    return isinstance(value, tuple) and name in value


def roles_with_attributes(function: Any) -> Iterator[Roles]:
    """Roles of a method whose attributes are the tables; an optional argument has positions."""
    found = _parameters(function)
    assert found is not None
    names, defaults = found
    given = [name for name in names if name not in function.attributes]
    tensors = tuple(name for name in given if name not in defaults)
    positions = next((name for name in given if defaults.get(name, 0) is None), None)
    if 1 <= len(tensors) <= 3:
        for cos, *rest in itertools.permutations(function.attributes):
            sin = rest[0] if rest else None
            roles = Roles(names, defaults, tensors, cos, sin, positions=positions)
            yield from forms(roles)


def _numbers_of(function: Callable[..., Any]) -> set[str]:
    """Arguments that are annotated as numbers or texts, and so are no tensors."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name for p in parameters if getattr(p.annotation, "__name__", p.annotation) in NUMBERS
    }


def forms(roles: Roles) -> Iterator[Roles]:
    """The roles with every form of tables."""
    for form in ("separate",) if roles.sin else FORMS:
        yield dataclasses.replace(roles, form=form)


def other_options(function: Any, roles: Roles) -> Iterator[Roles]:
    """The roles with every combination of options but the defaults.

    Booleans have two values; other options have those that the function's code compares with, and
    numbers that may be dimensions are tried as such.
    """
    constants = compared(inspect.unwrap(function))
    values: dict[str, list[Any]] = {}
    for name, default in roles.others().items():
        if isinstance(default, bool):
            values[name] = [default, not default]
        elif isinstance(default, int | str):
            kind = type(default)
            tried = [*DIMENSIONS, *constants] if default in DIMENSIONS else constants
            values[name] = [default, *(x for x in tried if type(x) is kind and x != default)]
    for chosen in itertools.islice(itertools.product(*values.values()), 1, OPTIONS):
        changed = [(n, x) for n, x in zip(values, chosen, strict=True) if x != roles.defaults[n]]
        yield dataclasses.replace(roles, options=tuple(changed))


def roundings(rule: Rule) -> Iterator[Rule]:
    """The rule with every way to round, most common first."""
    once: tuple[Any, bool, bool] = ("float32_product", False, False)
    wide: tuple[Any, bool, bool] = ("float64", True, False)
    found = [once, wide]
    if not rule.is_complex:
        found = [("float32", False, False), once, ("float32", True, False), wide]
        found.append(("float32", False, True))
    for numerics, keeps, casts in found:
        yield dataclasses.replace(rule, numerics=numerics, keeps_dtype=keeps, casts=casts)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Shapes of one call. ``heads`` is the dimension of heads in the tensors."""

    tensors: tuple[int | str, ...]
    table: tuple[int | str, ...]
    unsqueeze: int | None = None
    narrow: bool = False
    more: int = 0
    fewer: int = 0
    dtypes: tuple[torch.dtype, torch.dtype] = DTYPES[0]

    @property
    def is_whole(self) -> bool:
        """Whether every component of every token has a table entry."""
        return not (self.narrow or self.more or self.fewer)


def samples(inserted: bool) -> list[Sample]:
    """Calls in every layout, with whole and narrow tables.

    Args:
        inserted: Whether the function takes the dimension to insert as an argument. Other functions
            also get tables that already have it.
    """
    b, s = BATCH, TOKENS
    layouts: list[tuple[tuple[int | str, ...], tuple[int | str, ...], int | None]] = [
        ((b, "h", s), (b, s), 1),
        ((b, s, "h"), (b, s), 2),
        ((b, "h", s), (b, s), -3),
        ((b, s, "h"), (b, s), -2),
        ((b, "h", s), (1, s), 1),
        ((b, s, "h"), (1, s), 2),
        ((s, "h"), (s,), 1),
        (("h", s), (s,), 0),
        ((s, "h"), (s,), -2),
        (("h", s), (s,), -3),
        ((b, "h", s), (1, s), -3),
        ((b, s, "h"), (1, s), -2),
        ((b, "h", s), (s,), 0),
        ((b, s, "h"), (s,), 1),
    ]
    if not inserted:
        layouts = [(x, table, None) for x, table, _ in layouts]
        layouts += [
            ((b, "h", s), (b, 1, s), None),
            ((b, "h", s), (1, 1, s), None),
            ((b, s, "h"), (b, s, 1), None),
            ((b, s, "h"), (1, s, 1), None),
            ((b, s, "h"), (s, 1), None),
            ((s, "h"), (s, 1), None),
            (("h", s), (1, s), None),
            ((b, "h", s), ("h", s), None),
            ((b, "h", s), (1, "h", s), None),
            ((b, "h", s), (b, "h", s), None),
            ((b, s), (b, s), None),
            ((b, s), (1, s), None),
            ((s, b, "h"), (s, 1, 1), None),
        ]
    found = [Sample(*layout) for layout in layouts]
    found += [dataclasses.replace(x, narrow=True) for x in found]
    found += [Sample(*layout, more=3) for layout in layouts]
    found += [Sample(*layout, fewer=2) for layout in layouts]
    return found


class _Numbers:
    """Random numbers that are the same in every call and do not use the global generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(7)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return numbers.to(dtype)


def _sizes(shape: tuple[int | str, ...], heads: int) -> tuple[int, ...]:
    return tuple(heads if n == "h" else int(n) for n in shape)


def _arguments(
    roles: Roles, sample: Sample, tables: Any, gathers: bool, tensors: Callable[..., Tensor]
) -> dict[str, Any]:
    """All that a function takes in a sample.

    Args:
        roles: The roles of its arguments.
        sample: The shapes.
        tables: The tables, in the form that it takes.
        gathers: Whether it gathers their rows by position.
        tensors: Makes what it rotates, by shape.
    """
    arguments: dict[str, Any] = dict(roles.options)
    if roles.form == "separate":
        arguments |= {roles.cos: tables[0], roles.sin or "": tables[1]}
    else:
        arguments[roles.cos] = tables
    if roles.positions and (gathers or roles.positions not in roles.defaults):
        # Backwards, so that rows tell whether positions count.
        sizes = _sizes(sample.table, HEADS)
        backwards = -1 - torch.arange(torch.Size(sizes).numel(), device="cpu")
        arguments[roles.positions] = backwards.view(sizes) % (ROWS if gathers else TOKENS)
    for at, name in enumerate(roles.tensors):
        heads = KEY_HEADS if at and "h" not in sample.table else HEADS
        tokens = TOKENS + sample.more - (0 if at else sample.fewer)
        shape = [heads if n == "h" else tokens if n == TOKENS else int(n) for n in sample.tensors]
        arguments[name] = tensors((*shape, HEAD))
    if roles.unsqueeze:
        arguments[roles.unsqueeze] = sample.unsqueeze
    return arguments


def _formed(form: Form, first: Tensor, second: Tensor) -> Any:
    """Two tables in the form that a function takes, with other numbers for the rest of matrices."""
    match form:
        case "joint":
            return torch.cat((first, second), -1)
        case "stacked":
            return torch.stack((first, second), -1)
        case "matrices":
            wide = torch.cat((first, second), -1)  # of twice as many columns
            return wide.view(*first.shape[:-1], first.shape[-1] // 2, 2, 2)
        case "complex":
            double = first.dtype == torch.float64
            return (
                torch.complex(first, second)
                if double
                else torch.complex(first.float(), second.float())
            )
        case "angles":
            return first
    return first, second


def _flat_tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The function's result; None if it rejects the arguments or changes them."""
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    try:
        result = function(**copies)
    except Exception:  # a function that takes other arguments may raise anything
        return None
    kept = all(torch.equal(v, copies[k]) for k, v in arguments.items() if isinstance(v, Tensor))
    return (
        result
        if kept and all(x is None or isinstance(x, Tensor) for x in _flat_tensors(result))
        else None
    )


def _layout(rule: Rule, sample: Sample) -> tuple[int, int, int | None]:
    """The sample's entry in ``Rule.layouts``."""
    by_head = sample.table in (("h", TOKENS), (1, "h", TOKENS), sample.tensors)
    dim = rule.unsqueeze if sample.unsqueeze is None else sample.unsqueeze
    if sample.table == (TOKENS, 1, 1):
        dim = TOKENS_FIRST
    elif dim is None and not by_head:  # the head dimension of the tensors
        dim = -2 if sample.tensors[-1] == "h" else -3
    return len(sample.tensors) + 1, len(sample.table) + 1, dim


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What one run says: the rule, and the row of the tables that each token takes, if any."""

    rule: Rule
    rows: list[int | None]


class _Trial:
    """A function in some roles, and its results for the samples, each computed once."""

    def __init__(self, function: Callable[..., Any], roles: Roles) -> None:
        self.function = function
        self.roles = roles
        self.turns = False  # whether it was read to rotate
        self.wide = roles.form != "complex"  # whether tables have a value for each component
        dtypes = (*DTYPES, *DOUBLE) if roles.form == "complex" else DTYPES
        self.samples = [
            dataclasses.replace(x, dtypes=kinds)
            for x in samples(roles.unsqueeze is not None)
            for kinds in (dtypes if x.is_whole else (DTYPES[0], PLAIN))
        ]
        self._arguments: dict[Any, dict[str, Any]] = {}
        self._results: dict[Any, Any] = {}

    def _shape(self, sample: Sample, gathers: bool) -> tuple[int, ...]:
        width = 8 if sample.narrow else HEAD
        rows = (ROWS,) if gathers else _sizes(sample.table, HEADS)
        return (*rows, width if self.wide else width // 2)

    # ------------------------------------------------------------------------------------- reading

    def read(self, sample: Sample, gathers: bool) -> _Reading | None:
        """What unit vectors and numbered tables say of whole heads in a sample."""
        shape, form = self._shape(sample, gathers), self.roles.form
        count = torch.Size(shape).numel()
        ids = torch.arange(2 * count, dtype=torch.float64, device="cpu").view(2, *shape)
        if form == "angles":  # below a quarter of pi: no cosine is the sine of another
            angles = (0.2 + ids[0] / (2 * count)).float()
            given, values = angles, [angles.cos(), angles.sin()]
        else:
            given = _formed(form, *(ids + FIRST))
            values = list(ids + FIRST)
            if form in ("joint", "stacked", "matrices"):
                values = [given.flatten(-1 - INNER.get(form, 0))]
        width = values[0].shape[-1]
        known = {
            round(number, 5): (table, at // width, at % width)
            for table, x in enumerate(values)
            for at, number in enumerate(x.flatten().tolist())
        }
        found = self._matrices(sample, given, gathers)
        if found is None or "s" in sample.tensors:
            return None
        axis = list(sample.tensors).index(TOKENS)
        index = [0] * (found.dim() - 2)
        rows: list[int | None] = []
        rule: Rule | None = None
        for token in range(found.shape[axis]):
            index[axis] = token
            matrix = found[tuple(index)]
            if torch.equal(matrix, torch.eye(HEAD, dtype=matrix.dtype, device="cpu")):
                rows.append(None)
                continue
            read = _rule_of(matrix, known, width, form == "complex")
            if read is None or rule not in (None, read[0]):
                return None
            rule, row = read
            rows.append(row)
        order = [row for row in rows if row is not None]
        if rule is None or order != sorted(order, reverse=gathers):
            return None
        return _Reading(dataclasses.replace(rule, gathers=gathers), rows)

    def _matrices(self, sample: Sample, tables: Any, gathers: bool) -> Tensor | None:
        """[..., output, input]: what the function multiplies each component by."""
        columns = []
        for i in range(HEAD):

            def unit(shape: tuple[int, ...], i: int = i) -> Tensor:
                made = torch.zeros(shape, dtype=torch.float64, device="cpu")
                made[..., i] = 1
                return made

            given = _arguments(self.roles, sample, tables, gathers, unit)
            found = _flat_tensors(_run(self.function, given))
            first = given[self.roles.tensors[0]]
            if not isinstance(found[0], Tensor) or found[0].shape != first.shape:
                return None
            if len(found) != len(self.roles.tensors) or found[0].is_complex():
                return None
            columns.append(found[0].double())
        return torch.stack(columns, -1)

    def structures(self) -> Iterator[tuple[Rule, bool]]:
        """Rules that hold up to rounding, and whether tables have a value for each component."""
        plain = [x for x in self.samples if x.dtypes == PLAIN]
        whole = [x for x in plain if x.is_whole]
        for gathers in (False, True) if self.roles.positions else (False,):
            for wide in (False,) if self.roles.form == "complex" else (True, False):
                self.wide = wide
                read = next(filter(None, (self.read(x, gathers) for x in whole)), None)
                if read is None or read.rule.window != "all":
                    continue
                rule = read.rule
                if self.roles.form == "matrices" and rule.ratio != 4:
                    continue  # it views two columns a pair, and takes them in any form
                for sample in plain:
                    part = None if sample.is_whole else self.read(sample, gathers)
                    if part is None:
                        continue
                    if sample.narrow and rule.window == "all":
                        rule = dataclasses.replace(rule, window=part.rule.window)
                    elif not sample.narrow and rule.tokens == "all":
                        rule = dataclasses.replace(rule, tokens=_tokens(sample, part.rows))
                self.turns = True
                yield rule, wide

    # ------------------------------------------------------------------------------------ rounding

    def arguments(self, rule: Rule, at: int) -> dict[str, Any]:
        """The arguments of one sample, of random numbers."""
        key = self.wide, rule.gathers, at
        if key not in self._arguments:
            random, sample = _Numbers(), self.samples[at]
            shape = self._shape(sample, rule.gathers)
            first, second = (random(shape, sample.dtypes[1]) for _ in range(2))
            tables = _formed(self.roles.form, first, second)
            self._arguments[key] = _arguments(
                self.roles, sample, tables, rule.gathers, lambda x: random(x, sample.dtypes[0])
            )
        return self._arguments[key]

    def result(self, rule: Rule, at: int) -> Any:
        """The results of the function."""
        key = self.wide, rule.gathers, at
        if key not in self._results:
            self._results[key] = _run(self.function, self.arguments(rule, at))
        return self._results[key]

    def given(self, rule: Rule, at: int) -> dict[str, Any]:
        """All arguments of one sample."""
        roles = self.roles
        return {**dict.fromkeys(roles.names), **roles.defaults, **self.arguments(rule, at)}

    def followed(self, rule: Rule, *, strict: bool) -> Rule | None:
        """The rule with the layouts in which it holds; None if any result differs.

        Args:
            rule: The rule.
            strict: Whether it has to hold for every dtype that the function takes.
        """
        case = Case(self.roles, rule)
        layouts: set[tuple[int, int, int | None]] = set()
        foreign: set[tuple[int, int, int | None]] = set()
        seen = dict.fromkeys(("narrow", "more", "fewer"), False)
        dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[torch.dtype, torch.dtype]] = {}
        others = set()
        for at, sample in enumerate(self.samples):
            expected = self.result(rule, at)
            if expected is None:
                continue
            given = self.given(rule, at)
            found = case.rotate(given)
            if found is None:
                continue
            layout = _layout(rule, sample)
            if not alike(found, expected):
                if strict or not alike(found, expected, dtypes=False):
                    foreign.add(layout)
                others.add(sample.dtypes)
                continue
            if not equal(found, expected, not rule.is_complex):
                if strict or sample.dtypes[1] not in NARROW:
                    return None
                others.add(sample.dtypes)
                continue
            layouts.add(layout)
            dtypes[sample.dtypes] = case.dtypes(given)
            seen["narrow"] |= sample.narrow
            seen["more"] |= sample.more > 0
            seen["fewer"] |= sample.fewer > 0
        needed = ["narrow"] * (rule.window != "all")
        needed += {"all": [], "last": ["more"]}.get(rule.tokens, ["fewer"])
        layouts -= foreign
        if not all(seen[x] for x in needed) or not layouts:
            return None
        every = set(DTYPES) <= set(dtypes)
        if strict and not every:
            return None
        verified = None if every else frozenset(dtypes[x] for x in dtypes.keys() - others)
        if verified is not None and not verified:
            return None
        return dataclasses.replace(rule, layouts=frozenset(layouts), dtypes=verified)

    def lone(self, rule: Rule) -> Rule:
        """The rule, completed with what the function returns without its last tensors."""
        number = len(self.roles.tensors)
        for least, lone in itertools.product(range(1, number), ("alone", "padded")):
            found = dataclasses.replace(rule, least=least, lone=lone)  # type: ignore[arg-type]
            if all(self.holds(found, count) for count in range(least, number)):
                return found
        return rule

    def holds(self, rule: Rule, count: int) -> bool:
        """Whether a rule holds for the first tensors, in the first sample that both take."""
        case = Case(self.roles, rule)
        missing = dict.fromkeys(self.roles.tensors[count:])
        for at in range(len(self.samples)):
            given = {**self.arguments(rule, at), **missing}
            expected = _run(self.function, given)
            if expected is None:
                continue
            found = case.rotate({**dict.fromkeys(self.roles.names), **self.roles.defaults, **given})
            if found is not None:
                same = alike(found, expected)
                return same and equal(found, expected, not rule.is_complex)
        return False

    def packs(self, rule: Rule) -> bool:
        """Whether results are contiguous where tensors are not.

        Attention in transformers gives the same bits in either order; other code may not.
        """
        for at, sample in enumerate(self.samples):
            if len(sample.tensors) < 3 or self.result(rule, at) is None:
                continue
            given = dict(self.arguments(rule, at))
            for name in self.roles.tensors:
                given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
            parts = _flat_tensors(_run(self.function, given))
            return all(x is None or x.is_contiguous() for x in parts)
        return False

    def cases(self) -> list[Case]:
        """What the function computes in these roles; none if unknown."""
        dims = [None] if self.roles.unsqueeze else DIMS
        structures = list(self.structures())
        for strict in (True, False):
            held: list[tuple[Rule, bool]] = []
            for structure, self.wide in structures:
                for rule in roundings(structure):
                    tried = [dataclasses.replace(rule, unsqueeze=dim) for dim in dims]
                    found = list(filter(None, (self.followed(x, strict=strict) for x in tried)))
                    held += [(x, self.wide) for x in found]
                    if found:
                        break
            if held:
                rule, self.wide = max(held, key=lambda x: len(x[0].layouts or ()))
                return [Case(self.roles, self.lone(rule))]
        return []

    def positioned(self, cases: list[Case]) -> list[Case]:
        """The cases, divided into calls with and without positions if these are optional."""
        roles, rule = self.roles, cases[0].rule if cases else Rule()
        if not cases or rule.gathers or roles.positions not in roles.defaults:
            return cases
        if self.ignores_positions(rule):
            return cases
        needed = {k: v for k, v in roles.defaults.items() if k != roles.positions}
        other = _Trial(self.function, dataclasses.replace(roles, defaults=needed))
        without = dataclasses.replace(roles, positions=None)
        gathering = [case for case in other.cases() if case.rule.gathers]
        return [*[Case(without, case.rule) for case in cases], *gathering]

    def ignores_positions(self, rule: Rule) -> bool:
        """Whether positions change nothing, in the first sample that the function takes."""
        for at, sample in enumerate(self.samples):
            expected = self.result(rule, at)
            if expected is not None and sample.is_whole:
                positions = torch.zeros(_sizes(sample.table, HEADS), dtype=torch.long)
                given = {**self.arguments(rule, at), self.roles.positions or "": positions}
                found = _run(self.function, given)
                return found is not None and alike(found, expected) and equal(found, expected, True)
        return False

    def exact_cases(self) -> list[Case]:
        """The same, with results in the memory order of the function's."""
        cases = self.cases()
        packs = bool(cases) and self.packs(cases[0].rule)
        return [Case(self.roles, dataclasses.replace(case.rule, packs=packs)) for case in cases]

    def equals(self, other: _Trial) -> bool:
        """Whether the function gives the same with other options, in all samples."""
        if self.roles.form != other.roles.form:
            return False
        own = self.wide
        try:
            for wide, at in itertools.product((True, False), range(len(self.samples))):
                self.wide = other.wide = wide
                found, expected = self.result(Rule(), at), other.result(Rule(), at)
                if found is None and expected is None:
                    continue
                if not alike(found, expected) or not equal(found, expected, True):
                    return False
        finally:
            self.wide = other.wide = own
        return True

    def repeat(self, case: Case) -> None:
        """Runs the function again in all samples that the case gives, and without tokens."""
        empty = False
        for at in range(len(self.samples)):
            expected = self.result(case.rule, at)
            if expected is None:
                continue
            given = self.arguments(case.rule, at)
            found = case.rotate(self.given(case.rule, at))
            if found is None or not alike(found, expected):
                continue
            _run(self.function, given)
            for name in () if empty else self.roles.tensors:
                axis = self.samples[at].tensors.index(TOKENS)
                less = {**given, name: given[name].narrow(axis, 0, 0)}
                if case.rotate({**self.given(case.rule, at), **less}) is None:  # own code
                    _run(self.function, less)
            empty = True

    def copies(self, cases: list[Case]) -> list[Case]:
        """The same cases with this trial's options."""
        return [Case(self.roles, case.rule) for case in cases]


def _tokens(sample: Sample, rows: list[int | None]) -> Any:
    """The tokens that rotate, by the rows that each takes where lengths differ."""
    taken = [row for row in rows if row is not None]
    if sample.more:
        last = None in rows[: sample.more] and None not in rows[sample.more :]
        return "last" if last else "all"
    if len(taken) != TOKENS - sample.fewer or None in rows:
        return "all"
    return "table's last" if taken[0] > 0 else "table's first"


def _rule_of(
    matrix: Tensor, known: dict[float, tuple[int, int, int]], width: int, is_complex: bool
) -> tuple[Rule, int] | None:
    """The rule that the matrix [output, input] of one token shows, and the row of its tables."""
    turned, terms = [], []
    for j in range(HEAD):
        row: dict[int, tuple[int, tuple[int, int, int]]] = {}
        for i in matrix[j].nonzero().flatten().tolist():
            value = float(matrix[j, i])
            element = known.get(round(abs(value), 5))
            if element is not None:
                row[i] = (1 if value > 0 else -1), element
            elif value != 1.0 or i != j:
                return None
        if row:
            turned.append(j)
            terms.append(row)
    start, count = (turned or [0])[0], len(turned)
    if not turned or count % 2 or turned != list(range(start, start + count)):
        return None
    half = count // 2
    read = [tuple(i - start for i in sorted(row)) for row in terms]
    found: Any
    for found, ends in {  # noqa: B007 (inputs and outputs of each pair)
        "halves": [((j, j + half), (j, j + half)) for j in range(half)],
        "adjacent": [((2 * j, 2 * j + 1), (2 * j, 2 * j + 1)) for j in range(half)],
        "regrouped": [((2 * j, 2 * j + 1), (j, j + half)) for j in range(half)],
    }.items():
        if all(read[x] == inputs for inputs, outputs in ends for x in outputs):
            break
    else:
        return None
    pairs = found
    slices, signs, rows = [], [], set()
    for k in (0, 1):  # the first and the second component of each pair
        own = [terms[outputs[k]][start + inputs[k]] for inputs, outputs in ends]
        other = [terms[outputs[k]][start + inputs[1 - k]] for inputs, outputs in ends]
        sign = {s for s, _ in other}
        if {s for s, _ in own} != {1} or len(sign) != 1:
            return None
        signs.append(sign.pop())
        rows |= {element[1] for _, element in (*own, *other)}
        slices.append(tuple(_columns([e for _, e in x], width) for x in (own, other)))
    if len(rows) != 1 or width % half or any(None in x for x in slices):
        return None
    place: Any = "all" if count == HEAD else "first" if start == 0 else "last"
    if count < HEAD and start not in (0, HEAD - count):
        return None
    rule = Rule(
        pairs=pairs,
        first=slices[0],  # type: ignore[arg-type]
        second=slices[1],  # type: ignore[arg-type]
        ratio=width // half,
        signs=(signs[0], signs[1]),
        window=place,
    )
    if is_complex:
        if rule.pairs != "adjacent" or not rule.is_plain:
            return None
        rule = Rule(pairs="adjacent", window=place, numerics="float32_product")
    return rule, rows.pop()


def _columns(elements: list[tuple[int, int, int]], width: int) -> Columns | None:
    """The strided slice that elements of a table form, by pair."""
    tables, columns = {e[0] for e in elements}, [e[2] for e in elements]
    steps = {y - x for x, y in itertools.pairwise(columns)} or {1}
    if len(tables) != 1 or len(steps) != 1 or min(steps) < 1:
        return None
    for quarter in (3, 2, 1, 0):
        offset = columns[0] - width * quarter // 4
        if 0 <= offset < 4 and (quarter == 0 or offset < width // 4):
            return Columns(tables.pop(), quarter, offset, steps.pop())
    return None


# ------------------------------------------------------------------------------------- recognition


def recognise(function: Callable[..., Any], *, owner: type | None = None) -> Rotation | str:
    """The rotation that computes the same as a function, or why none does.

    Args:
        function: A function of tensors, or a method that is bound to an instance.
        owner: The class of a static method, or of one bound to an instance without attributes.
    """
    function = plain(function)
    key = getattr(function, "__func__", function)
    if not isinstance(key, types.FunctionType):
        return f"it is no function, but of the type {type(function).__name__}"
    gate = plain_function(key, owner=owner)
    if gate.reason:
        return gate.reason
    named = roles_of(function)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials: dict[_Trial, list[Case]] = {}
        if named:
            trial = _Trial(function, named)
            trials[trial] = trial.positioned(trial.cases())
        if not any(trials.values()):
            trials |= _by_trial(function)
        return _checked(function, trials, gate.codes)


def recognise_method(method: types.FunctionType) -> Rotation | str:
    """The rotation of a method by tables that are attributes of its instance, or why not."""
    function = with_attributes(method)
    if function is None:
        return UNKNOWN
    gate = plain_function(method, attributes=function.attributes)  # type: ignore[attr-defined]
    if gate.reason:
        return gate.reason
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for roles in roles_with_attributes(function):
            trial = _Trial(function, roles)
            cases = trial.exact_cases()
            if cases:
                return _checked(function, {trial: trial.positioned(cases)}, gate.codes)
    return UNKNOWN


def _checked(function: Any, trials: dict[_Trial, list[Case]], codes: Any) -> Rotation | str:
    """The rotation of a function in all its roles, if gradients flow and no branch is unknown."""
    cases = [case for found in trials.values() for case in found]
    if not cases:
        if any(trial.turns for trial in trials):
            return ROUNDS
        return MAKES if any({"cos", "sin"} <= set(code.co_names) for code in codes) else UNKNOWN
    if not _learns(function, cases[0]):
        return DETACHED
    branches = Branches(codes)
    if branches:
        with branches:
            for trial, found in trials.items():
                for case in found:
                    trial.repeat(case)
        if branches.unknown():
            return branches.unknown()
    return Rotation(function, tuple(cases))


def _learns(function: Callable[..., Any], case: Case) -> bool:
    """Whether gradients flow through a function, in the first sample that it takes."""
    trial = _Trial(function, case.roles)
    for wide, at in itertools.product((True, False), range(len(trial.samples))):
        trial.wide = wide
        given = dict(trial.arguments(case.rule, at))
        for name in case.roles.tensors:
            given[name] = given[name].clone().requires_grad_()
        with torch.enable_grad():
            result = _run(function, given)
        if result is not None:
            return all(x is None or x.requires_grad for x in _flat_tensors(result))
    return False


def _by_trial(function: Callable[..., Any]) -> dict[_Trial, list[Case]]:
    """What a function computes, whatever its arguments are called, by roles."""
    trials: dict[_Trial, list[Case]] = {}
    for roles in possible_roles(function):
        known = {}
        for form in forms(roles):
            trial = _Trial(function, form)
            known[trial] = trial.exact_cases()
        trials |= {trial: [] for trial in known if trial.turns}
        if not any(known.values()):
            continue
        for optional in other_options(function, roles):
            for form in forms(optional):
                trial = _Trial(function, form)
                same = next((x for x in known if known[x] and trial.equals(x)), None)
                known[trial] = trial.exact_cases() if same is None else trial.copies(known[same])
        return known
    return trials
