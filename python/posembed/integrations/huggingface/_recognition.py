"""Finds out what a function computes: runs it on small tensors and compares bits with rules.

Names are no guide: half of the functions with the same name differ, and some rotate backwards.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from posembed.integrations.huggingface._rotation import Rotation
from posembed.integrations.huggingface._rule import Roles, Rule

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
    """The roles of a function's arguments, by name; None if it cannot be a rotation."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
        return None
    names = tuple(n for n, p in parameters.items() if p.kind != p.VAR_KEYWORD)
    empty = inspect.Parameter.empty
    defaults = {n: p.default for n, p in parameters.items() if p.default is not empty}
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
    return Roles(
        names,
        defaults,
        tensors,
        table,
        sin[0] if cos else None,
        bool(joint),
        unsqueeze,
        positions,
    )


def rules(roles: Roles, narrow: bool, uneven: bool) -> Iterator[Rule]:
    """Every rule that a function with these roles may follow, most common first.

    Args:
        roles: The roles of its arguments.
        narrow: Whether it takes tables narrower than the head.
        uneven: Whether it takes tables with more or fewer tokens than the tensors.
    """
    joint = roles.cos if roles.joint else None
    tables = ["first half", "whole", "half"] if joint or roles.sin else ["complex"]
    if joint:
        tables = ["half", "whole"]
    dims = [None] if roles.unsqueeze else DIMS
    numerics = [
        ("float32", False),
        ("float32_product", False),
        ("float32", True),
        ("float64", True),
    ]
    for (number, keeps), table, pairs, dim in itertools.product(
        numerics, tables, ("halves", "adjacent", "regrouped"), dims
    ):
        if table == "complex" and (pairs, number) != ("adjacent", "float32_product"):
            continue
        for window, tokens, backwards, gathers, sine_first in itertools.product(
            ("first", "last", "all") if narrow else ("all",),
            ("last", "table's last", "all") if uneven else ("all",),
            (False, True) if table != "complex" else (False,),
            (False, True) if roles.positions else (False,),
            (False, True) if joint else (False,),
        ):
            if pairs == "regrouped" and window != "all":
                continue
            if tokens == "table's last" and len(roles.tensors) < 2:
                continue
            yield Rule(
                pairs=pairs,  # type: ignore[arg-type]
                tables=table,  # type: ignore[arg-type]
                numerics=number,  # type: ignore[arg-type]
                keeps_dtype=keeps,
                window=window,  # type: ignore[arg-type]
                backwards=backwards,
                unsqueeze=dim,
                gathers=gathers,
                tokens=tokens,  # type: ignore[arg-type]
                sine_first=sine_first,
            )


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
            ((b, s, "h"), (s, 1), None),
            ((s, "h"), (s, 1), None),
            (("h", s), (1, s), None),
        ]
    found = [Sample(*layout) for layout in layouts]
    found += [dataclasses.replace(x, narrow=True) for x in found]
    found += [Sample(*layout, more=3) for layout in layouts]
    found += [Sample(*layout, fewer=2) for layout in layouts]
    return [dataclasses.replace(x, dtypes=dtypes) for x in found for dtypes in DTYPES]


class _Numbers:
    """Random numbers that are the same in every call and do not use the global generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator("cpu").manual_seed(7)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return numbers.to(dtype)


def _tables(rule: Rule, sample: Sample, random: _Numbers) -> dict[str, Tensor]:
    """Tables of random angles; only whole tables repeat each value."""
    width = 8 if sample.narrow else HEAD
    shape = (ROWS,) if rule.gathers else tuple(int(n) for n in sample.table)
    dtype = sample.dtypes[1]
    result = {}
    for name in ("cos", "sin"):
        half = random((*shape, width // 2), dtype)
        if rule.tables == "whole":
            whole = half.repeat_interleave(2, -1)
            result[name] = whole if rule.pairs == "adjacent" else torch.cat((half, half), -1)
        elif rule.tables == "first half":
            result[name] = torch.cat((half, random(half.shape, dtype)), -1)
        else:
            result[name] = half
    return result


def _arguments(roles: Roles, rule: Rule, sample: Sample) -> dict[str, Any]:
    random = _Numbers()
    tables = _tables(rule, sample, random)
    arguments: dict[str, Any] = {}
    if roles.joint:
        order = ("sin", "cos") if rule.sine_first else ("cos", "sin")
        arguments[roles.cos] = torch.cat([tables[name] for name in order], -1)
    elif rule.tables == "complex":
        arguments[roles.cos] = torch.complex(tables["cos"].float(), tables["sin"].float())
    else:
        arguments[roles.cos] = tables["cos"]
        arguments[roles.sin or ""] = tables["sin"]
    if roles.positions and (rule.gathers or roles.positions not in roles.defaults):
        arguments[roles.positions] = torch.randint(
            ROWS if rule.gathers else TOKENS,
            tuple(int(n) for n in sample.table),
            generator=random.generator,
            device="cpu",
        )
    for at, name in enumerate(roles.tensors):
        heads = KEY_HEADS if at else HEADS
        tokens = TOKENS + sample.more - (0 if at else sample.fewer)
        shape = [heads if n == "h" else tokens if n == TOKENS else int(n) for n in sample.tensors]
        arguments[name] = random((*shape, HEAD), sample.dtypes[0])
    if roles.unsqueeze:
        arguments[roles.unsqueeze] = sample.unsqueeze
    return arguments


def _flat(result: Any) -> list[Tensor | None] | None:
    """The elements of a result; None if any is neither a tensor nor None."""
    parts = list(result) if isinstance(result, tuple) else [result]
    return parts if all(x is None or isinstance(x, Tensor) for x in parts) else None


def _alike(first: Any, second: Any) -> bool:
    """Whether results have the same elements, shapes and dtypes."""
    parts, others = _flat(first), _flat(second)
    if parts is None or others is None or isinstance(first, tuple) != isinstance(second, tuple):
        return False

    def kind(x: Tensor | None) -> Any:
        return None if x is None else (x.shape, x.dtype)

    return list(map(kind, parts)) == list(map(kind, others))


def _equal(first: Any, second: Any, exact: bool) -> bool:
    """Whether results are bitwise equal, or at most one rounding apart if not exact.

    PyTorch's complex product rounds differently in the remainder of a SIMD vector, so its bits
    depend on shape and strides.
    """
    for x, y in zip(_flat(first) or [], _flat(second) or [], strict=True):
        if x is None or y is None:
            continue
        step = 1e-6 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
        if not (torch.equal(x, y) if exact else torch.allclose(x, y, rtol=step, atol=1e-6)):
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


def _layout(rule: Rule, sample: Sample) -> tuple[int, int, int]:
    """The sample's entry in ``Rule.layouts``."""
    dim = rule.unsqueeze if sample.unsqueeze is None else sample.unsqueeze
    if dim is None:  # the head dimension of the tensors
        dim = -2 if sample.tensors[-1] == "h" else -3
    return len(sample.tensors) + 1, len(sample.table) + 1, dim


class _Trial:
    """A function and its results for the samples, each computed once."""

    def __init__(self, function: Callable[..., Any], roles: Roles) -> None:
        self.function = function
        self.roles = roles
        self.samples = samples(roles.unsqueeze is not None)
        self._arguments: dict[Any, dict[str, Any]] = {}
        self._results: dict[Any, Any] = {}

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

    def runs(self, chosen: Callable[[Sample], bool]) -> bool:
        """Whether the function takes any of the chosen samples."""
        kinds: tuple[Any, ...] = (
            ("half", "whole") if self.roles.sin or self.roles.joint else ("complex",)
        )
        return any(
            self.result(Rule(tables=kind), at) is not None
            for kind in kinds
            for at, sample in enumerate(self.samples)
            if sample.dtypes == DTYPES[0] and chosen(sample)
        )

    def followed(self, rule: Rule) -> Rule | None:
        """The rule with the layouts in which it holds; None if any result differs."""
        rotation = Rotation(self.function, self.roles, rule, "")
        layouts: set[tuple[int, int, int]] = set()
        foreign: set[tuple[int, int, int]] = set()
        seen = dict.fromkeys((*DTYPES, "narrow", "more", "fewer"), False)
        for at, sample in enumerate(self.samples):
            expected = self.result(rule, at)
            if expected is None:
                continue
            found = rotation.rotate({**self.roles.defaults, **self.arguments(rule, at)})
            if found is None:
                continue
            layout = _layout(rule, sample)
            if not _alike(found, expected):
                foreign.add(layout)
                continue
            if not _equal(found, expected, rule.tables != "complex"):
                return None
            layouts.add(layout)
            seen[sample.dtypes] = True
            seen["narrow"] |= sample.narrow
            seen["more"] |= sample.more > 0
            seen["fewer"] |= sample.fewer > 0
        needed = [*DTYPES, *["narrow"] * (rule.window != "all")]
        needed += {"all": [], "last": ["more"], "table's last": ["fewer"]}[rule.tokens]
        if not all(seen[x] for x in needed):
            return None
        layouts -= foreign
        return dataclasses.replace(rule, layouts=frozenset(layouts)) if layouts else None

    def widest(self, rule: Rule) -> list[Rule]:
        """The rule and those that insert another dimension, if they hold; most layouts first."""
        dims = [None] if self.roles.unsqueeze else DIMS
        held = [self.followed(dataclasses.replace(rule, unsqueeze=dim)) for dim in dims]
        return sorted(filter(None, held), key=lambda found: -len(found.layouts or ()))

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
        rotation = Rotation(self.function, self.roles, rule, "")
        missing = dict.fromkeys(self.roles.tensors[count:])
        for at in range(len(self.samples)):
            given = {**self.arguments(rule, at), **missing}
            expected = _run(self.function, given)
            if expected is None:
                continue
            found = rotation.rotate({**self.roles.defaults, **given})
            if found is not None:
                same = _alike(found, expected)
                return same and _equal(found, expected, rule.tables != "complex")
        return False

    @staticmethod
    def _key(rule: Rule, at: int) -> tuple[Any, ...]:
        neighbours = rule.tables == "whole" and rule.pairs == "adjacent"
        return rule.tables, neighbours, rule.gathers, rule.sine_first, at


def recognise(function: Callable[..., Any], home: str) -> Rotation | None:
    """The rotation that computes the same as the function, or None if no rule does.

    Args:
        function: A function of tensors, or any other callable with a signature.
        home: The module that will hold the rotation, for pickle.
    """
    function = plain(function)
    roles = roles_of(function)
    if roles is None:
        return None
    trial = _Trial(function, roles)
    with torch.no_grad():
        narrow = trial.runs(lambda sample: sample.narrow)
        uneven = trial.runs(lambda sample: bool(sample.more or sample.fewer))
        for rule in rules(roles, narrow, uneven):
            if trial.followed(rule):
                held = [trial.lone(found) for found in trial.widest(rule)]
                first, *others = [Rotation(function, roles, found, home) for found in held]
                first.alternatives = tuple(others)
                return first
    return None
