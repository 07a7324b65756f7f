"""Finds out what a function computes: runs it on small tensors and compares bits with rules.

Names are no guide: half of the functions with the same name differ, and some rotate backwards.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import itertools
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posembed.integrations.huggingface._arithmetic import compared, has_wrapper, is_arithmetic
from posembed.integrations.huggingface._rotation import TOKENS_FIRST, Case, Rotation, part_of
from posembed.integrations.huggingface._rule import WHOLE, Packing, Part, Roles, Rule

BATCH, HEADS, KEY_HEADS, TOKENS, ROWS, HEAD = 2, 3, 4, 5, 7, 12
DIMS = [1, -2, 2, None, -3, 0]
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
NARROW = (torch.bfloat16, torch.float16)
PARTS: tuple[Part, ...] = ("first half", "second half", "even", "odd")
OTHER_PARTS: tuple[tuple[Part, Part], ...] = (
    ("whole", "exchanged"),
    ("exchanged", "whole"),
    ("even", "odd"),
    ("odd", "even"),
)
HALF, TABLES = ("half", "complex"), ("half", "whole")
PACKINGS: tuple[Packing, ...] = ("pair", "complex", "matrices", "stacked", "joint", "angles")
DIMENSIONS = (-2, -3, 1, 2)  # of heads or tokens, if a function takes one
OPTIONS = 48  # combinations of options that are tried
NUMBERS = {"int", "float", "bool", "str"}
ARGUMENTS = 8  # functions with more are no rotations
COS, SIN = re.compile(r"cos(_|$|ine)"), re.compile(r"sin(_|$|e$)")
JOINT, COMPLEX = re.compile("sinusoid"), re.compile("freqs?_(ci|complex)")
OPTIONAL = re.compile("(k|key|v|value)(_|$)")


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
    packing: Packing = "separate" if cos else "joint" if joint else "complex"
    second = sin[0] if cos else None
    return Roles(names, defaults, tensors, table, second, packing, unsqueeze, positions)


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
    """All roles that arguments may have, without regard to their names, but for the packing.

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
            yield from packings(roles)


def _numbers_of(function: Callable[..., Any]) -> set[str]:
    """Arguments that are annotated as numbers or texts, and so are no tensors."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name for p in parameters if getattr(p.annotation, "__name__", p.annotation) in NUMBERS
    }


def packings(roles: Roles) -> Iterator[Roles]:
    """The roles with every form of tables."""
    for packing in ("separate",) if roles.sin else PACKINGS:
        yield dataclasses.replace(roles, packing=packing)


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


def structures(roles: Roles) -> Iterator[Rule]:
    """What a function with these roles may do with whole heads, most common first."""
    tables: list[Any] = {
        "separate": ["whole", "half"],
        "complex": ["complex"],
        "stacked": ["half", "whole"],
        "matrices": ["whole", "half"],
    }.get(roles.packing, ["half", "whole"])
    known_order = roles.packing in ("complex", "matrices") or COS.match(roles.cos)
    pairings: list[Any] = ["adjacent"] if roles.packing == "complex" else ["halves", "adjacent"]
    if roles.packing != "complex":
        pairings.append("regrouped")
    for table, pairs, backwards, gathers, sine_first in itertools.product(
        tables,
        pairings,
        (False,) if roles.packing == "complex" else (False, True),
        (False, True) if roles.positions else (False,),
        (False,) if known_order else (False, True),
    ):
        numerics: Any = "float32_product" if table == "complex" else "float32"
        yield Rule(
            tables=table,
            pairs=pairs,
            backwards=backwards,
            gathers=gathers,
            sine_first=sine_first,
            numerics=numerics,
        )


def roundings(rule: Rule) -> Iterator[Rule]:
    """The rule with every way to round, most common first."""
    once: tuple[Any, bool, bool] = ("float32_product", False, False)
    wide: tuple[Any, bool, bool] = ("float64", True, False)
    found = [once, wide]
    if rule.tables != "complex":
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


def _tables(rule: Rule, sample: Sample, random: _Numbers) -> dict[str, Tensor]:
    """Tables of random numbers; whole ones have another for each component of a pair."""
    width = 8 if sample.narrow else HEAD
    shape = (ROWS,) if rule.gathers else _sizes(sample.table, HEADS)
    dtype = sample.dtypes[1]
    result = {}
    for name in ("cos", "sin"):
        result[name] = random((*shape, width // 2 if rule.tables in HALF else width), dtype)
    return result


def _packed(packing: Packing, tables: list[Tensor], halves: bool) -> Any:
    """Two tables in the form of a packing. Of matrices, halves are the first columns."""
    first, second = tables
    match packing:
        case "pair":
            return first, second
        case "joint":
            return torch.cat(tables, -1)
        case "stacked":
            return torch.stack(tables, -1)
        case "angles":
            return first
        case "matrices":
            more = (first.flip(-1) + 1, second.flip(-1) + 1)
            (a, b), (c, d) = zip(tables, more, strict=True) if halves else _in_halves(tables)
            return torch.stack((a, b, c, d), -1).view(*a.shape, 2, 2)
    double = first.dtype == torch.float64
    return torch.complex(*tables) if double else torch.complex(first.float(), second.float())


def _arguments(
    roles: Roles, rule: Rule, sample: Sample, known: tuple[Part, Part] = WHOLE
) -> dict[str, Any]:
    """Arguments of random numbers; beside the known parts, tables have other ones."""
    random = _Numbers()
    tables = _tables(rule, sample, random)
    pair = [  # of random numbers, so that either may be the sine
        _known_part(table, part) for table, part in zip(tables.values(), known, strict=True)
    ]
    arguments: dict[str, Any] = dict(roles.options)
    if roles.packing == "separate":
        arguments |= {roles.cos: pair[0], roles.sin or "": pair[1]}
    else:
        arguments[roles.cos] = _packed(roles.packing, pair, rule.tables in HALF)
    if roles.positions and (rule.gathers or roles.positions not in roles.defaults):
        arguments[roles.positions] = torch.randint(
            ROWS if rule.gathers else TOKENS,
            _sizes(sample.table, HEADS),
            generator=random.generator,
            device="cpu",
        )
    for at, name in enumerate(roles.tensors):
        heads = KEY_HEADS if at and "h" not in sample.table else HEADS
        tokens = TOKENS + sample.more - (0 if at else sample.fewer)
        shape = [heads if n == "h" else tokens if n == TOKENS else int(n) for n in sample.tensors]
        arguments[name] = random((*shape, HEAD), sample.dtypes[0])
    if roles.unsqueeze:
        arguments[roles.unsqueeze] = sample.unsqueeze
    return arguments


def _in_halves(tables: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    return (table.chunk(2, -1) for table in tables)


def _known_part(table: Tensor, part: Part) -> Tensor:
    if part == "whole":
        return table
    known = table.flip(-1) + 1
    part_of(known, part).copy_(part_of(table, part))
    return known


def _flat(result: Any) -> list[Tensor | None] | None:
    """The elements of a result; None if any is neither a tensor nor None."""
    parts = list(result) if isinstance(result, tuple) else [result]
    return parts if all(x is None or isinstance(x, Tensor) for x in parts) else None


def _alike(first: Any, second: Any, *, dtypes: bool = True) -> bool:
    """Whether results have the same elements, shapes and, unless ignored, dtypes."""
    parts, others = _flat(first), _flat(second)
    if parts is None or others is None or isinstance(first, tuple) != isinstance(second, tuple):
        return False

    def kind(x: Tensor | None) -> Any:
        return None if x is None else (x.shape, x.dtype if dtypes else None)

    return list(map(kind, parts)) == list(map(kind, others))


def _equal(first: Any, second: Any, exact: bool) -> bool:
    """Whether results are bitwise equal, or at most one rounding apart if not exact.

    PyTorch's complex product rounds differently in the remainder of a SIMD vector, so its bits
    depend on shape and strides.
    """
    for x, y in zip(_flat(first) or [], _flat(second) or [], strict=True):
        if x is None or y is None:
            continue
        step = max(1e-6, *(torch.finfo(z.dtype).eps for z in (x, y) if z.dtype in NARROW), 0.0)
        near = not exact and torch.allclose(x.to(y.dtype), y, rtol=step, atol=1e-6)
        if not (near or torch.equal(x, y)):
            return False
    return True


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The function's result; None if it rejects the arguments or changes them."""
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    try:
        result = function(**copies)
    except Exception:  # a function that takes other arguments may raise anything
        return None
    kept = all(torch.equal(v, copies[k]) for k, v in arguments.items() if isinstance(v, Tensor))
    return result if kept else None


def _layout(rule: Rule, sample: Sample) -> tuple[int, int, int | None]:
    """The sample's entry in ``Rule.layouts``."""
    by_head = sample.table in (("h", TOKENS), (1, "h", TOKENS), sample.tensors)
    dim = rule.unsqueeze if sample.unsqueeze is None else sample.unsqueeze
    if sample.table == (TOKENS, 1, 1):
        dim = TOKENS_FIRST
    elif dim is None and not by_head:  # the head dimension of the tensors
        dim = -2 if sample.tensors[-1] == "h" else -3
    return len(sample.tensors) + 1, len(sample.table) + 1, dim


class _Trial:
    """A function and its results for the samples, each computed once."""

    def __init__(self, function: Callable[..., Any], roles: Roles) -> None:
        self.function = function
        self.roles = roles
        self.turns = False  # whether results are those of a rotation, up to rounding
        dtypes = (*DTYPES, *DOUBLE) if roles.packing == "complex" else DTYPES
        self.samples = [
            dataclasses.replace(x, dtypes=kinds)
            for x in samples(roles.unsqueeze is not None)
            for kinds in (dtypes if x.is_whole else (DTYPES[0], PLAIN))
        ]
        self._arguments: dict[Any, dict[str, Any]] = {}
        self._results: dict[Any, Any] = {}
        self._parts: dict[bool, tuple[Part, Part]] = {}

    def arguments(self, rule: Rule, at: int) -> dict[str, Any]:
        """The arguments of one sample."""
        key = self._key(rule, at)
        if key not in self._arguments:
            self._arguments[key] = _arguments(self.roles, rule, self.samples[at])
        return self._arguments[key]

    def result(self, rule: Rule, at: int) -> Any:
        """The results of the function."""
        key = self._key(rule, at)
        if key not in self._results:
            self._results[key] = _run(self.function, self.arguments(rule, at))
        return self._results[key]

    def runs(self) -> bool:
        """Whether the function takes any sample, and keeps the shapes of tensors."""
        kinds: tuple[Any, ...] = ("complex",) if self.roles.packing == "complex" else TABLES
        return any(
            self._keeps_shapes(Rule(tables=kind), at)
            for at, sample in enumerate(self.samples)
            if sample.dtypes == PLAIN and sample.is_whole
            for kind in kinds
        )

    def _keeps_shapes(self, rule: Rule, at: int) -> bool:
        parts = _flat(self.result(rule, at))
        given = self.arguments(rule, at)
        shapes = [given[name].shape for name in self.roles.tensors]
        return parts is not None and [None if x is None else x.shape for x in parts] == shapes

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
            if not _alike(found, expected):
                if strict or not _alike(found, expected, dtypes=False):
                    foreign.add(layout)
                others.add(sample.dtypes)
                continue
            if not _equal(found, expected, rule.tables != "complex"):
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

    def near(self, rule: Rule, chosen: Callable[[Sample], bool]) -> bool:
        """Whether a rule holds in the first chosen float32 sample that it takes, up to rounding."""
        case = Case(self.roles, rule)
        for at, sample in enumerate(self.samples):
            if sample.dtypes != PLAIN or not chosen(sample) or self.result(rule, at) is None:
                continue
            found = case.rotate(self.given(rule, at))
            if found is not None and _alike(found, self.result(rule, at), dtypes=False):
                return _equal(found, self.result(rule, at), False)
        return False

    def given(self, rule: Rule, at: int) -> dict[str, Any]:
        """All arguments of one sample."""
        roles = self.roles
        return {**dict.fromkeys(roles.names), **roles.defaults, **self.arguments(rule, at)}

    def structures(self) -> Iterator[tuple[Rule, list[int | None]]]:
        """Rules that hold up to rounding, and the dimensions that they may insert."""
        dims = [None] if self.roles.unsqueeze else DIMS
        found = False
        for rules in (self.usual_structures, self.other_structures):
            for rule in () if found else rules():
                tried = {dim: dataclasses.replace(rule, unsqueeze=dim) for dim in dims}
                near = [dim for dim, x in tried.items() if self.near(x, lambda s: s.is_whole)]
                if near:
                    found = True
                    yield self._in_part(tried[near[0]]), near

    def _in_part(self, rule: Rule) -> Rule:
        """The rule with the components and the tokens that rotate."""
        rule = self._part(rule, "window", ("first", "last"), lambda s: s.narrow)
        parts = ("last", "table's last", "table's first")
        return self._part(rule, "tokens", parts, lambda s: s.more + s.fewer > 0)

    def usual_structures(self) -> Iterator[Rule]:
        """What a function may do, with the parts of whole tables that it is seen to read."""
        for rule in structures(self.roles):
            parts = self.parts(rule.gathers) if rule.tables == "whole" else WHOLE
            yield dataclasses.replace(rule, parts=parts)

    def other_structures(self) -> Iterator[Rule]:
        """The same where both values of each pair are read, but not one for each component."""
        if self.roles.packing in ("matrices", "complex"):
            return
        for rule, parts in itertools.product(structures(self.roles), OTHER_PARTS):
            if rule.tables == "whole" and self.parts(rule.gathers) == WHOLE:
                yield dataclasses.replace(rule, parts=parts)

    def parts(self, gathers: bool) -> tuple[Part, Part]:
        """What the function reads of whole tables: all, or one of the two values of each pair."""
        if gathers not in self._parts:
            rule = Rule(gathers=gathers)
            plain = (
                at
                for at, sample in enumerate(self.samples)
                if sample.dtypes == PLAIN and sample.is_whole and self.result(rule, at) is not None
            )
            at = next(plain, None)
            if at is None or self.roles.packing in ("matrices", "complex"):
                self._parts[gathers] = WHOLE
            else:
                first = self._reads(rule, at, 0)
                both = self.roles.packing == "angles"
                self._parts[gathers] = first, first if both else self._reads(rule, at, 1)
        return self._parts[gathers]

    def _reads(self, rule: Rule, at: int, index: int) -> Part:
        """The part of one table that alone decides on the result."""
        expected = self.result(rule, at)
        for part in PARTS:
            known = (part, WHOLE[1]) if index == 0 else (WHOLE[0], part)
            given = _arguments(self.roles, rule, self.samples[at], known)
            found = _run(self.function, given)
            if found is not None and _alike(found, expected) and _equal(found, expected, True):
                return part
        return "whole"

    def _part(
        self, rule: Rule, field: str, values: tuple[str, ...], chosen: Callable[[Sample], bool]
    ) -> Rule:
        """The rule with the first value of a field that holds in the chosen samples, if any."""
        changes: list[dict[str, Any]] = [{field: value} for value in values]
        tried = (dataclasses.replace(rule, **change) for change in changes)
        return next((x for x in tried if self.near(x, chosen)), rule)

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
                same = _alike(found, expected)
                return same and _equal(found, expected, rule.tables != "complex")
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
            parts = _flat(_run(self.function, given)) or []
            return all(x is None or x.is_contiguous() for x in parts)
        return False

    def cases(self) -> list[Case]:
        """What the function computes in these roles, for each layout of tables; none if unknown."""
        structures = list(self.structures())
        self.turns = bool(structures)
        for strict, (structure, dims) in itertools.product((True, False), structures):
            for rule in roundings(structure):
                tried = [dataclasses.replace(rule, unsqueeze=dim) for dim in dims]
                held = list(filter(None, (self.followed(x, strict=strict) for x in tried)))
                if held:
                    held.sort(key=lambda found: -len(found.layouts or ()))
                    return [Case(self.roles, self.lone(found)) for found in held]
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
                return (
                    found is not None and _alike(found, expected) and _equal(found, expected, True)
                )
        return False

    def exact_cases(self) -> list[Case]:
        """The same, with results in the memory order of the function's."""
        cases = self.cases()
        packs = bool(cases) and self.packs(cases[0].rule)
        return [Case(self.roles, dataclasses.replace(case.rule, packs=packs)) for case in cases]

    def equals(self, other: _Trial) -> bool:
        """Whether the function gives the same with other options, in all samples."""
        if self.roles.packing != other.roles.packing:
            return False
        kinds: tuple[Any, ...] = ("complex",) if self.roles.packing == "complex" else TABLES
        for kind, at in itertools.product(kinds, range(len(self.samples))):
            rule = Rule(tables=kind)
            found, expected = self.result(rule, at), other.result(rule, at)
            if (found is None) != (expected is None):
                return False
            alike = found is None or _alike(found, expected)
            if not alike or (found is not None and not _equal(found, expected, True)):
                return False
        return True

    def copies(self, cases: list[Case]) -> list[Case]:
        """The same cases with this trial's options."""
        return [Case(self.roles, case.rule) for case in cases]

    @staticmethod
    def _key(rule: Rule, at: int) -> tuple[Any, ...]:
        return rule.tables in HALF, rule.gathers, at


def recognise(
    function: Callable[..., Any], home: str, *, owner: type | None = None
) -> Rotation | None:
    """The rotation that computes the same as the function, or None if no rule does.

    Args:
        function: A function of tensors, or any other callable with a signature.
        home: The module that will hold the rotation, for pickle.
        owner: The class of a static method, or of one bound to an instance without attributes.
    """
    function = plain(function)
    key = getattr(function, "__func__", function)
    try:
        cases = _known.get(key)
    except TypeError:  # a callable that cannot be hashed
        cases, key = None, None
    if cases is None:
        cases = _cases(function, owner)
        if isinstance(key, types.FunctionType):
            _known[key] = cases
    return Rotation(function, cases, home) if cases else None


def recognise_method(method: types.FunctionType, home: str) -> Rotation | None:
    """The rotation of a method by tables that are attributes of its instance, or None."""
    function = with_attributes(method)
    if function is None or not is_arithmetic(method, attributes=set(function.attributes)):  # type: ignore[attr-defined]
        return None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for roles in roles_with_attributes(function):
            trial = _Trial(function, roles)
            cases = trial.exact_cases() if trial.runs() else []
            if cases and _learns(function, cases[0]):
                return Rotation(function, tuple(trial.positioned(cases)), home)
    return None


_rounds_otherwise: weakref.WeakSet[Any] = weakref.WeakSet()
_without_gradients: weakref.WeakSet[Any] = weakref.WeakSet()


def turns_otherwise(function: Any) -> bool:
    """Whether a function was seen to rotate, but not as the kernel."""
    seen = (_rounds_otherwise, _without_gradients)
    return isinstance(function, types.FunctionType) and any(function in x for x in seen)


def refusal(function: Any) -> str:
    """Why a function was not recognised, as far as it is known."""
    if not isinstance(function, types.FunctionType):
        return f"it is no function, but of the type {type(function).__name__}"
    if has_wrapper(function):
        return "a function wraps it, whose effect is not known"
    if function in _without_gradients:
        return "it rotates, but its results have no gradients"
    if turns_otherwise(function):
        return "it rotates, but rounds its products in a way that the kernel has not"
    codes = [part.__code__ for part in _unwrapped(function)]
    if any({"cos", "sin"} <= set(code.co_names) for code in codes):
        return "it makes its cosines and sines itself, from positions or frequencies"
    return "computes no known rotation"


def _unwrapped(function: Any) -> Iterator[types.FunctionType]:
    """A function and those that it wraps, as far as they have code."""
    while function is not None:
        if isinstance(function, types.FunctionType):
            yield function
        function = getattr(function, "__wrapped__", None)


_known: weakref.WeakKeyDictionary[Any, tuple[Case, ...]] = weakref.WeakKeyDictionary()


def _cases(function: Callable[..., Any], owner: type | None) -> tuple[Case, ...]:
    """What a function computes; names of its arguments are tried first."""
    if has_wrapper(getattr(function, "__func__", function)):
        return ()
    named = roles_of(function)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = _Trial(function, named) if named else None
        cases = trial.positioned(trial.cases()) if trial else []
        if not cases and is_arithmetic(getattr(function, "__func__", function), owner):
            cases = _cases_by_trial(function)
        if cases and not _learns(function, cases[0]):
            _without_gradients.add(getattr(function, "__func__", function))
            return ()
    return tuple(cases)


def _learns(function: Callable[..., Any], case: Case) -> bool:
    """Whether gradients flow through a function, in the first sample that it takes."""
    trial = _Trial(function, case.roles)
    for at in range(len(trial.samples)):
        given = dict(trial.arguments(case.rule, at))
        for name in case.roles.tensors:
            given[name] = given[name].clone().requires_grad_()
        with torch.enable_grad():
            result = _run(function, given)
        if result is not None:
            return all(x is None or x.requires_grad for x in _flat(result) or [])
    return False


def _cases_by_trial(function: Callable[..., Any]) -> list[Case]:
    """What a function computes, whatever its arguments are called."""
    for roles in possible_roles(function):
        trials = [_Trial(function, packed) for packed in packings(roles)]
        known = {trial: trial.exact_cases() for trial in trials if trial.runs()}
        if any(trial.turns for trial in known):
            _rounds_otherwise.add(getattr(function, "__func__", function))
        if not any(known.values()):
            continue
        for optional in other_options(function, roles):
            for packed in packings(optional):
                trial = _Trial(function, packed)
                if trial.runs():
                    same = next((x for x in known if known[x] and trial.equals(x)), None)
                    cases = trial.exact_cases() if same is None else trial.copies(known[same])
                    known[trial] = cases
        return [case for cases in known.values() for case in cases]
    return []
