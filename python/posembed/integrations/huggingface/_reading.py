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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posembed.integrations.huggingface._gate import (
    UNKNOWN,
    Branches,
    compared,
    contents,
    plain_function,
)
from posembed.integrations.huggingface._rotation import (
    INNER,
    NARROW,
    TOKENS_FIRST,
    Columns,
    Form,
    Roles,
    Rotation,
    Rule,
    alike,
    equal,
    parts_of,
)

BATCH, HEADS, KEY_HEADS, TOKENS, ROWS, HEAD = 2, 3, 4, 5, 7, 12
# Leading dimensions of tensors and of tables: batch, heads, tokens or 1; and the dimension of heads
# to insert. Functions that take no such dimension get tables that have it, too.
LAYOUTS: list[tuple[str, str, int | None]] = [
    *(("bhs", "bs", 1), ("bsh", "bs", 2), ("bhs", "bs", -3), ("bsh", "bs", -2)),
    *(("bhs", "1s", 1), ("bsh", "1s", 2), ("sh", "s", 1), ("hs", "s", 0), ("sh", "s", -2)),
    *(("hs", "s", -3), ("bhs", "1s", -3), ("bsh", "1s", -2), ("bhs", "s", 0), ("bsh", "s", 1)),
]
INSERTED = [
    *(("bhs", "b1s"), ("bhs", "11s"), ("bsh", "bs1"), ("bsh", "1s1"), ("bsh", "s1"), ("sh", "s1")),
    *(("hs", "1s"), ("bhs", "hs"), ("bhs", "1hs"), ("bhs", "bhs"), ("bs", "bs"), ("bs", "1s")),
    ("sbh", "s11"),
]
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
# Numerics, whether the dtype stays and whether tables are converted, of complex and real products.
ROUNDINGS: tuple[list[tuple[Any, bool, bool]], ...] = (
    [("float32_product", False, False), ("float64", True, False)],
    [
        *(("float32", False, False), ("float32_product", False, False), ("float32", True, False)),
        *(("float64", True, False), ("float32", False, True)),
    ],
)
FORMS: tuple[Form, ...] = ("pair", "complex", "matrices", "stacked", "joint", "angles")
DIMENSIONS = (-2, -3, 1, 2)  # of heads or tokens, if a function takes one
OPTIONS = 48  # combinations of options that are tried
NUMBERS = {"int", "float", "bool", "str"}
ARGUMENTS = 8  # functions with more are no rotations
COS, SIN = re.compile(r"cos(_|$|ine)"), re.compile(r"sin(_|$|e$)")
JOINT, COMPLEX = re.compile("sinusoid"), re.compile("freqs?_(ci|complex)")
OPTIONAL = re.compile("(k|key|v|value)(_|$)")
ROUNDS = "it rotates, but rounds its products in a way that the kernel has not"
DETACHED = "it rotates, but its results have no gradients"
MAKES = "it makes its cosines and sines itself, from positions or frequencies"
FIRST = 16  # of the numbers in tables; below are the factors 0 and 1


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
            yield Roles(names, defaults, tensors, cos, sin, positions=positions)


def _numbers_of(function: Callable[..., Any]) -> set[str]:
    """Arguments that are annotated as numbers or texts, and so are no tensors."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name for p in parameters if getattr(p.annotation, "__name__", p.annotation) in NUMBERS
    }


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


# -------------------------------------------------------------------------------------- samples


class Sample(NamedTuple):
    """Shapes of one call: letters of ``LAYOUTS``, and what tensors have more or less of."""

    tensors: str
    table: str
    unsqueeze: int | None = None
    narrow: bool = False
    more: int = 0
    fewer: int = 0
    dtypes: tuple[torch.dtype, torch.dtype] = DTYPES[0]

    @property
    def is_whole(self) -> bool:
        """Whether every component of every token has a table entry."""
        return not (self.narrow or self.more or self.fewer)

    def layout(self, rule: Rule) -> tuple[int, int, int | None]:
        """The entry in ``Rule.layouts``."""
        dim = rule.unsqueeze if self.unsqueeze is None else self.unsqueeze
        if self.table == "s11":
            dim = TOKENS_FIRST
        elif dim is None and self.table not in ("hs", "1hs", self.tensors):
            dim = -2 if self.tensors[-1] == "h" else -3
        return len(self.tensors) + 1, len(self.table) + 1, dim


def _samples(roles: Roles) -> Iterator[Sample]:
    """Calls in every layout, with whole and narrow tables, and with other numbers of tokens."""
    layouts = list(LAYOUTS)
    if roles.unsqueeze is None:
        layouts = [(*x[:2], None) for x in (*LAYOUTS, *INSERTED)]  # type: ignore[misc]
    every = (*DTYPES, *DOUBLE) if roles.form == "complex" else DTYPES
    for change in ({}, {"narrow": True}, {"more": 3}, {"fewer": 2}):
        for layout in layouts:
            for dtypes in every if not change else (DTYPES[0], PLAIN):
                yield Sample(*layout, dtypes=dtypes, **change)


def _sizes(letters: str, heads: int = HEADS, tokens: int = TOKENS) -> tuple[int, ...]:
    sizes = {"b": BATCH, "h": heads, "s": tokens, "1": 1}
    return tuple(sizes[x] for x in letters)


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
        sizes = _sizes(sample.table)
        backwards = -1 - torch.arange(torch.Size(sizes).numel(), device="cpu")
        arguments[roles.positions] = backwards.view(sizes) % (ROWS if gathers else TOKENS)
    for at, name in enumerate(roles.tensors):
        heads = KEY_HEADS if at and "h" not in sample.table else HEADS
        tokens = TOKENS + sample.more - (0 if at else sample.fewer)
        arguments[name] = tensors((*_sizes(sample.tensors, heads, tokens), HEAD))
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
            if first.dtype != torch.float64:
                first, second = first.float(), second.float()
            return torch.complex(first, second)
        case "angles":
            return first
    return first, second


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The function's result; None if it rejects the arguments or changes them."""
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    try:
        result = function(**copies)
    except Exception:  # a function that takes other arguments may raise anything
        return None
    kept = all(torch.equal(v, copies[k]) for k, v in arguments.items() if isinstance(v, Tensor))
    known = all(x is None or isinstance(x, Tensor) for x in parts_of(result))
    return result if kept and known else None


class _Trial:
    """A function in some roles, and its results for the samples, each computed once."""

    def __init__(self, function: Callable[..., Any], roles: Roles) -> None:
        self.function, self.roles = function, roles
        self.turns = False  # whether it was read to rotate
        self.wide = roles.form != "complex"  # whether tables have a value for each component
        self.samples = list(_samples(roles))
        self._arguments: dict[Any, dict[str, Any]] = {}
        self._results: dict[Any, Any] = {}

    def _shape(self, sample: Sample, gathers: bool) -> tuple[int, ...]:
        width = 8 if sample.narrow else HEAD
        rows = (ROWS,) if gathers else _sizes(sample.table)
        return (*rows, width if self.wide else width // 2)

    # ------------------------------------------------------------------------------------- reading

    def read(self, sample: Sample, gathers: bool) -> tuple[Rule, list[int | None]] | None:
        """What unit vectors and numbered tables say of whole heads in a sample.

        Returns:
            The rule, and the row of the tables that each token takes, if any.
        """
        shape, form = self._shape(sample, gathers), self.roles.form
        count = torch.Size(shape).numel()
        ids = torch.arange(2 * count, dtype=torch.float64, device="cpu").view(2, *shape)
        given: Any = (0.2 + ids[0] / (2 * count)).float()
        if form == "angles":  # below a quarter of pi: no cosine is the sine of another
            values = [given.cos(), given.sin()]
        else:
            given, values = _formed(form, *(ids + FIRST)), list(ids + FIRST)
            if form in ("joint", "stacked", "matrices"):
                values = [given.flatten(-1 - INNER.get(form, 0))]
        width = values[0].shape[-1]
        known = {
            round(number, 5): (table, at // width, at % width)
            for table, x in enumerate(values)
            for at, number in enumerate(x.flatten().tolist())
        }
        found = self._matrices(sample, given, gathers)
        if found is None:
            return None
        # Of the first sequence and head.
        index = [slice(None) if x == "s" else 0 for x in sample.tensors]
        rows: list[int | None] = []
        rules: list[Rule] = []
        for matrix in found[tuple(index)]:
            if torch.equal(matrix, torch.eye(HEAD, dtype=matrix.dtype, device="cpu")):
                rows.append(None)
                continue
            read = _rule_of(matrix, known, width, form == "complex")
            if read is None or read[0] not in (rules or [read[0]]):
                return None
            rules.append(read[0])
            rows.append(read[1])
        order = [row for row in rows if row is not None]
        if not rules or order != sorted(order, reverse=gathers):
            return None
        return dataclasses.replace(rules[0], roles=self.roles, gathers=gathers), rows

    def _matrices(self, sample: Sample, tables: Any, gathers: bool) -> Tensor | None:
        """[..., output, input]: what the function multiplies each component by."""
        columns = []
        for i in range(HEAD):

            def unit(shape: tuple[int, ...], i: int = i) -> Tensor:
                made = torch.zeros(shape, dtype=torch.float64, device="cpu")
                made[..., i] = 1
                return made

            given = _arguments(self.roles, sample, tables, gathers, unit)
            found = parts_of(_run(self.function, given))
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
        for gathers in (False, True) if self.roles.positions else (False,):
            for wide in (False,) if self.roles.form == "complex" else (True, False):
                self.wide = wide
                whole = (self.read(x, gathers) for x in plain if x.is_whole)
                rule, _ = next(filter(None, whole), (None, []))
                if rule is None or rule.window != "all":
                    continue
                if self.roles.form == "matrices" and rule.ratio != 4:
                    continue  # it views two columns a pair, and takes them in any form
                for sample in plain:
                    part = None if sample.is_whole else self.read(sample, gathers)
                    if part is not None and sample.narrow and rule.window == "all":
                        rule = dataclasses.replace(rule, window=part[0].window)
                    elif part is not None and not sample.narrow and rule.tokens == "all":
                        rule = dataclasses.replace(rule, tokens=_tokens(sample, part[1]))
                self.turns = True
                yield rule, wide

    # ------------------------------------------------------------------------------------ rounding

    def arguments(self, gathers: bool, at: int) -> dict[str, Any]:
        """The arguments of one sample, of random numbers that are the same in every call."""
        key = self.wide, gathers, at
        if key not in self._arguments:
            generator, sample = torch.Generator("cpu").manual_seed(7), self.samples[at]

            def random(shape: tuple[int, ...], dtype: torch.dtype = sample.dtypes[0]) -> Tensor:
                made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                return made.to(dtype)

            shape = self._shape(sample, gathers)
            first, second = (random(shape, sample.dtypes[1]) for _ in range(2))
            tables = _formed(self.roles.form, first, second)
            self._arguments[key] = _arguments(self.roles, sample, tables, gathers, random)
        return self._arguments[key]

    def result(self, gathers: bool, at: int) -> Any:
        """The results of the function."""
        key = self.wide, gathers, at
        if key not in self._results:
            self._results[key] = _run(self.function, self.arguments(gathers, at))
        return self._results[key]

    def compared(
        self, rule: Rule, changed: dict[str, None] | None = None
    ) -> Iterator[tuple[int, dict[str, Any], Any, Any]]:
        """Samples that a function and a rule take: place, arguments, and results of both.

        Args:
            rule: The rule.
            changed: Other values of arguments.
        """
        roles = rule.roles
        for at in range(len(self.samples)):
            given = {**self.arguments(rule.gathers, at), **(changed or {})}
            expected = _run(self.function, given) if changed else self.result(rule.gathers, at)
            if expected is None:
                continue
            given = {**dict.fromkeys(roles.names), **roles.defaults, **given}
            found = rule.rotate(given)
            if found is not None:
                yield at, given, found, expected

    def followed(self, rule: Rule, *, strict: bool) -> Rule | None:
        """The rule with the layouts in which it holds; None if any result differs.

        Args:
            rule: The rule.
            strict: Whether it has to hold for every dtype that the function takes.
        """
        layouts: set[tuple[int, int, int | None]] = set()
        foreign: set[tuple[int, int, int | None]] = set()
        seen: set[str] = set()
        dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[torch.dtype, torch.dtype]] = {}
        others = set()
        for at, given, found, expected in self.compared(rule):
            sample = self.samples[at]
            layout = sample.layout(rule)
            if not alike(found, expected):
                if strict or not alike(found, expected, dtypes=False):
                    foreign.add(layout)
                others.add(sample.dtypes)
                continue
            if not equal(found, expected, rule.cos is not None):
                if strict or sample.dtypes[1] not in NARROW:
                    return None
                others.add(sample.dtypes)
                continue
            layouts.add(layout)
            query = given[rule.roles.tensors[0]]
            dtypes[sample.dtypes] = query.dtype, rule.tables(given, query)[0].dtype
            seen |= {name for name in ("narrow", "more", "fewer") if getattr(sample, name)}
        needed = {"narrow"} if rule.window != "all" else set()
        needed |= {"all": set(), "last": {"more"}}.get(rule.tokens, {"fewer"})
        layouts -= foreign
        every = set(DTYPES) <= set(dtypes)
        if not needed <= seen or not layouts or (strict and not every):
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
            for count in range(least, number):
                missing = dict.fromkeys(self.roles.tensors[count:])
                first = next(self.compared(found, missing), None)
                if first is None or not alike(*first[2:]):
                    break
                if not equal(first[2], first[3], rule.cos is not None):
                    break
            else:
                return found
        return rule

    def packs(self, rule: Rule) -> bool:
        """Whether results are contiguous where tensors are not.

        Attention in transformers gives the same bits in either order; other code may not.
        """
        for at, sample in enumerate(self.samples):
            if len(sample.tensors) < 3 or self.result(rule.gathers, at) is None:
                continue
            given = dict(self.arguments(rule.gathers, at))
            for name in self.roles.tensors:
                given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
            parts = parts_of(_run(self.function, given))
            return all(x is None or x.is_contiguous() for x in parts)
        return False

    def cases(self, *, packs: bool) -> list[Rule]:
        """What the function computes in these roles; none if unknown.

        Args:
            packs: Whether results get the memory order of the function's.
        """
        dims = [None] if self.roles.unsqueeze else DIMS
        structures = list(self.structures())
        for strict in (True, False):
            held: list[tuple[Rule, bool]] = []
            for structure, self.wide in structures:
                for numerics, keeps, casts in ROUNDINGS[structure.cos is not None]:
                    ways = {"numerics": numerics, "keeps_dtype": keeps, "casts": casts}
                    tried = [dataclasses.replace(structure, unsqueeze=dim, **ways) for dim in dims]
                    found = list(filter(None, (self.followed(x, strict=strict) for x in tried)))
                    held += [(x, self.wide) for x in found]
                    if found:
                        break
            if held:
                rule, self.wide = max(held, key=lambda x: len(x[0].layouts or ()))
                rule = self.lone(rule)
                return [dataclasses.replace(rule, packs=packs and self.packs(rule))]
        return []

    def positioned(self, cases: list[Rule]) -> list[Rule]:
        """The cases, divided into calls with and without positions if these are optional."""
        roles = self.roles
        if not cases or cases[0].gathers or roles.positions not in roles.defaults:
            return cases
        for at, sample in enumerate(self.samples):
            expected = self.result(False, at)
            if expected is not None and sample.is_whole:
                positions = torch.zeros(_sizes(sample.table), dtype=torch.long)
                given = {**self.arguments(False, at), roles.positions or "": positions}
                found = _run(self.function, given)
                if found is not None and alike(found, expected) and equal(found, expected, True):
                    return cases  # positions change nothing
                break
        needed = {k: v for k, v in roles.defaults.items() if k != roles.positions}
        other = _Trial(self.function, dataclasses.replace(roles, defaults=needed))
        without = dataclasses.replace(roles, positions=None)
        gathering = [rule for rule in other.cases(packs=False) if rule.gathers]
        return [*[dataclasses.replace(rule, roles=without) for rule in cases], *gathering]

    def equals(self, other: _Trial) -> bool:
        """Whether the function gives the same with other options, in all samples."""
        if self.roles.form != other.roles.form:
            return False
        own = self.wide
        try:
            for wide, at in itertools.product((True, False), range(len(self.samples))):
                self.wide = other.wide = wide
                found, expected = self.result(False, at), other.result(False, at)
                if found is None and expected is None:
                    continue
                if not alike(found, expected) or not equal(found, expected, True):
                    return False
        finally:
            self.wide = other.wide = own
        return True

    def repeat(self, rule: Rule) -> None:
        """Runs the function again in all samples that the rule gives, and without tokens."""
        empty = False
        for at, given, found, expected in self.compared(rule):
            if not alike(found, expected):
                continue
            arguments = self.arguments(rule.gathers, at)
            _run(self.function, arguments)
            for name in () if empty else self.roles.tensors:
                axis = self.samples[at].tensors.index("s")
                less = {name: arguments[name].narrow(axis, 0, 0)}
                if rule.rotate({**given, **less}) is None:  # own code
                    _run(self.function, {**arguments, **less})
            empty = True


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
    terms: dict[int, dict[int, tuple[int, tuple[int, int, int]]]] = {}
    for j, i in matrix.nonzero().tolist():
        value = float(matrix[j, i])
        element = known.get(round(abs(value), 5))
        if element is not None:
            terms.setdefault(j, {})[i] = (1 if value > 0 else -1), element
        elif value != 1.0 or i != j:
            return None
    start, count = min(terms, default=0), len(terms)
    if not terms or count % 2 or list(terms) != list(range(start, start + count)):
        return None
    half, end = count // 2, start + count
    halves = [(j, j + half) for j in range(start, start + half)]
    adjacent = [(j, j + 1) for j in range(start, end, 2)]
    pairs: Any
    for pairs, inputs, outputs in (  # noqa: B007
        ("halves", halves, halves),
        ("adjacent", adjacent, adjacent),
        ("regrouped", adjacent, halves),
    ):
        ends = list(zip(inputs, outputs, strict=True))
        if all(set(terms[x]) == set(read) for read, written in ends for x in written):
            break
    else:
        return None
    slices, signs, rows = [], [], set()
    for k in (0, 1):  # the first and the second component of each pair
        own = [terms[written[k]][read[k]] for read, written in ends]
        other = [terms[written[k]][read[1 - k]] for read, written in ends]
        if {s for s, _ in own} != {1} or len({s for s, _ in other}) != 1:
            return None
        signs.append(other[0][0])
        rows |= {element[1] for _, element in (*own, *other)}
        slices.append([_columns([e for _, e in x], width) for x in (own, other)])
    if len(rows) != 1 or width % half or any(None in x for x in slices):
        return None
    window: Any = "all" if count == HEAD else "first" if start == 0 else "last"
    if window == "last" and end != HEAD:
        return None
    (cos, sin), ratio = zip(*slices, strict=True), width // half
    places: Any = {"cos": cos, "sin": sin, "ratio": ratio, "signs": tuple(signs)}
    rule = Rule(pairs=pairs, window=window, **places)
    if is_complex:
        if pairs != "adjacent" or not rule.is_plain:
            return None
        rule = Rule(pairs="adjacent", window=window, numerics="float32_product")
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
        trials: dict[_Trial, list[Rule]] = {}
        if named:
            trial = _Trial(function, named)
            trials[trial] = trial.positioned(trial.cases(packs=False))
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
        every = (_trials(function, roles) for roles in roles_with_attributes(function))
        for trial in itertools.chain.from_iterable(every):
            cases = trial.cases(packs=True)
            if cases:
                return _checked(function, {trial: trial.positioned(cases)}, gate.codes)
    return UNKNOWN


def _checked(function: Any, trials: dict[_Trial, list[Rule]], codes: Any) -> Rotation | str:
    """The rotation of a function in all its roles, if gradients flow and no branch is unknown."""
    cases = [rule for found in trials.values() for rule in found]
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
                for rule in found:
                    trial.repeat(rule)
        if branches.unknown():
            return branches.unknown()
    return Rotation(function, tuple(cases))


def _learns(function: Callable[..., Any], rule: Rule) -> bool:
    """Whether gradients flow through a function, in the first sample that it takes."""
    trial = _Trial(function, rule.roles)
    for wide, at in itertools.product((True, False), range(len(trial.samples))):
        trial.wide = wide
        given = dict(trial.arguments(rule.gathers, at))
        for name in rule.roles.tensors:
            given[name] = given[name].clone().requires_grad_()
        with torch.enable_grad():
            result = _run(function, given)
        if result is not None:
            return all(x is None or x.requires_grad for x in parts_of(result))
    return False


def _by_trial(function: Callable[..., Any]) -> dict[_Trial, list[Rule]]:
    """What a function computes, whatever its arguments are called, by roles."""
    trials: dict[_Trial, list[Rule]] = {}
    for roles in possible_roles(function):
        known = {trial: trial.cases(packs=True) for trial in _trials(function, roles)}
        trials |= {trial: [] for trial in known if trial.turns}
        if not any(known.values()):
            continue
        for optional in other_options(function, roles):
            for trial in _trials(function, optional):
                same = next((x for x in known if known[x] and trial.equals(x)), None)
                if same is None:
                    known[trial] = trial.cases(packs=True)
                else:
                    known[trial] = [dataclasses.replace(x, roles=trial.roles) for x in known[same]]
        return known
    return trials


def _trials(function: Callable[..., Any], roles: Roles) -> Iterator[_Trial]:
    """The function in these roles, with every form of tables."""
    for form in ("separate",) if roles.sin else FORMS:
        yield _Trial(function, dataclasses.replace(roles, form=form))
