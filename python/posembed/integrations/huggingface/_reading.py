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

from posembed.integrations.huggingface._gate import PRODUCTS, UNKNOWN, Gate, contents
from posembed.integrations.huggingface._rotation import (
    NARROW,
    Columns,
    Form,
    Plan,
    Roles,
    Rotation,
    Rule,
    difference,
    parts_of,
)

BATCH, HEADS, KEY_HEADS, TOKENS, ROWS, HEAD = 2, 3, 4, 5, 7, 12
# Leading dimensions of tensors and of tables: batch, heads, tokens or 1; and the dimension of heads
# to insert. Functions that take no such dimension get tables that have it, too.
LAYOUTS: list[tuple[str, str, int | None]] = [
    *(("bhs", "bs", 1), ("bsh", "bs", 2), ("bhs", "1s", 1), ("bsh", "1s", 2)),
    *(("sh", "s", 1), ("hs", "s", 0), ("bhs", "s", 0), ("bsh", "s", 1)),
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
# How products round, those of complex tables, and others.
COMPLEX_ROUNDINGS: list[dict[str, Any]] = [{}, {"numerics": "float64", "keeps_dtype": True}]
ROUNDINGS: list[dict[str, Any]] = [
    *({}, {"numerics": "float32_product"}, {"keeps_dtype": True}),
    *(COMPLEX_ROUNDINGS[1], {"casts": True}),
]
FORMS: tuple[Form, ...] = ("pair", "complex", "matrices", "stacked", "joint", "angles")
DIMENSIONS = (-2, -3, 1, 2)  # of heads or tokens, if a function takes one
OPTIONS = 48  # combinations of options that are tried
NUMBERS = {"int", "float", "bool", "str"}
ARGUMENTS = 8  # functions with more are no rotations
COS, SIN = re.compile(r"cos(_|$|ine)"), re.compile(r"sin(_|$|e$)")
JOINT, COMPLEX = re.compile("sinusoid"), re.compile("freqs?_(ci|complex)")
OPTIONAL = re.compile("(k|key|v|value)(_|$)")
ROUNDS = "it rotates, but rounds its products in a way that the kernel has not"
MAKES = "it makes its cosines and sines itself, from positions or frequencies"
FIRST = 16  # of the numbers in tables; below are the factors 0 and 1
# One call: leading dimensions of tensors and of tables, the dimension of heads to insert, what is
# changed ("narrow" tables, "more" tokens than tables, or "fewer" in the first tensor), and dtypes.
Sample = tuple[str, str, int | None, str, tuple[torch.dtype, torch.dtype]]
Element = tuple[int, int, int, int]  # of tables: its sign in a sum, and its table, row and column


def wrapped(kind: type) -> Any:
    """The function that the kernels package has wrapped in a class; None for other classes."""
    if not issubclass(kind, nn.Module) or not hasattr(kind, "kernel_layer_name"):
        return None
    functions = [x for x in contents(kind.forward) if isinstance(x, types.FunctionType)]
    return functions[0] if len(functions) == 1 else None


# ---------------------------------------------------------------------------------------- arguments


def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of a function's arguments, and their defaults; none if there may be any number."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return (), {}
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return (), {}
    names = tuple(p.name for p in parameters if p.kind != p.VAR_KEYWORD)
    return names, {p.name: p.default for p in parameters if p.default is not p.empty}


def roles_of(function: Callable[..., Any]) -> Roles | None:
    """The roles that names of arguments suggest; None if they suggest none."""
    names, defaults = _parameters(function)
    cos = [n for n in names if COS.match(n)]
    sin = [n for n in names if SIN.match(n) and not JOINT.match(n)]
    joint = [n for n in names if JOINT.match(n)]
    freqs = [n for n in names if COMPLEX.match(n)]
    if not (len(cos) == len(sin) == 1 or len(joint) == 1 or len(freqs) == 1):
        return None
    unsqueeze = next((n for n in names if n in ("unsqueeze_dim", "head_dim_axis")), None)
    positions = next((n for n in names if n in ("position_ids", "positions")), None)
    table, second = (cos or joint or freqs)[0], sin[0] if cos else None
    tensors = []
    for n in names:
        optional = defaults.get(n, 0) is None and OPTIONAL.match(n)
        if n not in (table, *sin[:1], unsqueeze, positions) and (n not in defaults or optional):
            tensors.append(n)
    if not 1 <= len(tensors) <= 3:
        return None
    form: Form = "separate" if cos else "joint" if joint else "complex"
    return Roles(names, defaults, tuple(tensors), table, second, form, unsqueeze, positions)


def possible_roles(function: Any) -> Iterator[Roles]:
    """All roles that arguments may have, without regard to their names, but for the form of tables.

    Tensors and tables are neighbours, in either order; other arguments are options with a default.
    Attributes of an instance are its tables, and an optional argument then has positions.
    """
    names, defaults = _parameters(function)
    needed = tuple(n for n in names if n not in defaults)
    held = getattr(function, "attributes", ())
    if held:
        tensors = tuple(n for n in needed if n not in held)
        positions = next((n for n in names if defaults.get(n, 0) is None), None)
        for cos, *rest in itertools.permutations(held) if 1 <= len(tensors) <= 3 else ():
            sin = rest[0] if rest else None
            yield Roles(names, defaults, tensors, cos, sin, positions=positions)
        return
    parameters = inspect.signature(function).parameters if names else {}
    for name in needed:
        kind = parameters[name].annotation
        if len(names) > ARGUMENTS or getattr(kind, "__name__", kind) in NUMBERS:
            return
    free = [n for n in names if defaults.get(n) is None]
    for count, tables in itertools.product((1, 2, 3), (1, 2)):
        for start in range(len(free) - count - tables + 1):
            block = tuple(free[start : start + count + tables])
            if set(needed) <= set(block):
                for tensors, table in (
                    (block[:count], block[count:]),
                    (block[tables:], block[:tables]),
                ):
                    sin = table[1] if tables == 2 else None
                    yield Roles(names, defaults, tensors, table[0], sin)


def with_attributes(method: types.FunctionType) -> Callable[..., Any] | None:
    """A function of a method's arguments and of the attributes that it reads, up to two.

    Its ``attributes`` are their names, which come after the arguments. None if the method does
    anything else with its instance.
    """
    code = method.__code__
    names, this = _parameters(method)[0], code.co_varnames[:1]
    steps: list[Any] = list(dis.get_instructions(code))
    attributes: list[str] = []
    for x, after in itertools.pairwise(steps):
        if x.argval in this or (isinstance(x.argval, tuple) and set(this) & set(x.argval)):
            if not x.opname.startswith("LOAD_FAST") or after.opname != "LOAD_ATTR":
                return None
            attributes.append(after.argval)
    attributes = list(dict.fromkeys(attributes))
    if not names or code.co_cellvars or not 1 <= len(attributes) <= 2 or {*names} & {*attributes}:
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


def other_options(function: Any, roles: Roles) -> Iterator[Roles]:
    """The roles with every combination of options but the defaults.

    Booleans have two values; other options have those that the function's code compares with, and
    numbers that may be dimensions are tried as such.
    """
    steps = list(dis.get_instructions(inspect.unwrap(function)))
    constants = dict.fromkeys(
        x.argval
        for x, after in itertools.pairwise(steps)
        if x.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and after.opname == "COMPARE_OP"
    )
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


# ------------------------------------------------------------------------------------------ samples


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
    for k, v in arguments.items():
        if isinstance(v, Tensor) and not torch.equal(v, copies[k]):
            return None
    known = all(x is None or isinstance(x, Tensor) for x in parts_of(result))
    return result if known else None


class Trial:
    """A function in some roles, and its results for the samples, each computed once.

    Samples are calls in every layout, with whole and narrow tables, and other numbers of tokens.
    """

    def __init__(self, function: Callable[..., Any], roles: Roles) -> None:
        self.function, self.roles = function, roles
        self.turns = False  # whether it was read to rotate
        self.rule: Rule | None = None
        # Columns for each pair, if tables have a value for each component.
        self.wide = 4 if roles.form in ("joint", "stacked", "matrices") else 2
        layouts = list(LAYOUTS)
        if roles.unsqueeze is None:
            layouts = [(*x[:2], None) for x in (*LAYOUTS, *INSERTED)]  # type: ignore[misc]
        self.samples: list[Sample] = []
        for change in ("", "narrow", "more", "fewer"):
            dtypes = [DTYPES[0], PLAIN] if change else list(DTYPES)
            dtypes += DOUBLE if roles.form == "complex" and not change else []
            self.samples += [(*x, change, y) for x in layouts for y in dtypes]
        self._calls: dict[Any, tuple[dict[str, Any], Any]] = {}

    def given(
        self, sample: Sample, wide: bool, gathers: bool, *, numbered: bool = False
    ) -> dict[str, Any]:
        """The arguments in a sample: random numbers, the same each time.

        ``wide``: tables have a value for each component, not for each pair. ``gathers``: positions
        say which rows of the tables count. ``numbered``: all numbers in the tables are different.
        """
        roles, (letters, rows, dim, change, dtypes) = self.roles, sample
        sizes = {"b": BATCH, "h": HEADS, "s": TOKENS, "1": 1}
        lead, width = [sizes[x] for x in rows], 8 if change == "narrow" else HEAD
        shape = [2, *([ROWS] if gathers else lead), width if wide else width // 2]
        random: Any = {"generator": torch.Generator("cpu").manual_seed(7)}
        random |= {"dtype": torch.float32, "device": "cpu"}
        if numbered:
            numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device="cpu")
            pair = numbers.view(shape) + FIRST
            if roles.form == "angles":  # below a quarter of pi: no cosine is the sine of another
                pair = (0.2 + numbers.view(shape) / numbers.numel()).float()
        else:
            pair = torch.randn(shape, **random).to(dtypes[1])
        given: dict[str, Any] = dict(roles.options)
        given[roles.cos] = _formed(roles.form, *pair)
        if roles.form == "separate":
            given |= {roles.cos: pair[0], roles.sin or "": pair[1]}
        if roles.positions and (gathers or roles.positions not in roles.defaults):
            # Backwards, so that rows tell whether positions count.
            backwards = -1 - torch.arange(torch.Size(lead).numel(), device="cpu")
            given[roles.positions] = backwards.view(lead) % (ROWS if gathers else TOKENS)
        for at, name in enumerate(roles.tensors):
            sizes["h"] = KEY_HEADS if at and "h" not in rows else HEADS
            less = 2 if change == "fewer" and not at else 0
            sizes["s"] = TOKENS + (3 if change == "more" else -less)
            shape = [*[sizes[x] for x in letters], HEAD]
            given[name] = torch.randn(shape, **random).to(dtypes[0])
        if roles.unsqueeze:
            given[roles.unsqueeze] = dim
        return {**dict.fromkeys(roles.names), **roles.defaults, **given}

    # ------------------------------------------------------------------------------------- reading

    def read(self, sample: Sample, wide: bool, gathers: bool) -> Rule | None:
        """What unit vectors and numbered tables say of whole heads in a sample."""
        roles, given = self.roles, self.given(sample, wide, gathers, numbered=True)
        tables, names = roles.tables(given), roles.tensors
        if roles.form == "complex":
            tables = [tables[0].real, tables[0].imag]
        width = tables[0].shape[-1]
        known = {}
        for table, x in enumerate(tables):
            for at, number in enumerate(x.flatten().tolist()):
                known[round(number, 5)] = table, *divmod(at, width)
        columns = []
        for unit in torch.eye(HEAD, dtype=torch.float64, device="cpu"):
            given |= {name: unit.expand(given[name].shape) for name in names}
            found = parts_of(_run(self.function, given))
            if not isinstance(found[0], Tensor) or found[0].shape != given[names[0]].shape:
                return None
            if len(found) != len(names) or found[0].is_complex():
                return None
            columns.append(found[0].double())
        # [tokens, output, input] of the first sequence and head: what components are multiplied by.
        index = [slice(None) if x == "s" else 0 for x in sample[0]]
        untouched = torch.eye(HEAD, dtype=torch.float64, device="cpu")
        rule, rows = None, list[int | None]()
        for matrix in torch.stack(columns, -1)[tuple(index)]:
            if torch.equal(matrix, untouched):
                rows.append(None)
                continue
            read = _rule_of(matrix, known, width, roles.form == "complex")
            if read is None or (rule is not None and rule != read[0]):
                return None
            rule, row = read
            rows.append(row)
        order: list[int] = [row for row in rows if row is not None]
        tokens: Any = "all"
        if rule is None or order != sorted(order, reverse=gathers):
            return None
        if len(rows) > TOKENS and rows[0] is None and None not in rows[-TOKENS:]:
            tokens = "last"
        elif len(order) == len(rows) < TOKENS:
            tokens = "table's last" if order[0] > 0 else "table's first"
        return dataclasses.replace(rule, roles=roles, gathers=gathers, tokens=tokens)

    # ------------------------------------------------------------------------------------ rounding

    def compared(
        self, rule: Rule, changed: dict[str, None] | None = None
    ) -> Iterator[tuple[Sample, Plan, dict[str, Any], Any, Any]]:
        """Samples that a function and a rule take: with plan, arguments, and results of both.

        Arguments may be changed to others.
        """
        wide = rule.ratio == self.wide
        for sample in self.samples:
            key = wide, rule.gathers, sample
            if key not in self._calls:
                given = self.given(sample, wide, rule.gathers)
                self._calls[key] = given, _run(self.function, given)
            given, expected = self._calls[key]
            if changed:
                given = {**given, **changed}
                expected = _run(self.function, given)
            plan = None if expected is None else rule.plan(given)
            if plan is not None:
                yield sample, plan, given, rule.run(given, plan), expected

    def followed(self, rule: Rule, *, strict: bool) -> Rule | None:
        """The rule with the layouts in which it holds; None if any result differs.

        If strict, it has to hold for every dtype that the function takes.
        """
        layouts, foreign, others, seen = set(), set(), set(), set()
        dtypes: dict[Any, tuple[torch.dtype, torch.dtype]] = {}
        for sample, (layout, *_), given, found, expected in self.compared(rule):
            differs, narrow = difference(found, expected, rule.cos is not None), sample[-1][1]
            if differs == "bits" and (strict or narrow not in NARROW):
                return None
            if differs == "shapes" or (differs == "dtypes" and strict):
                foreign.add(layout)
            if differs:
                others.add(sample[-1])
                continue
            layouts.add(layout)
            query = given[rule.roles.tensors[0]]
            dtypes[sample[-1]] = query.dtype, rule.tables(given, query)[0].dtype
            seen.add(sample[3])
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

    def completed(self, rule: Rule, packs: bool) -> Rule:
        """The rule with what the function returns without its last tensors.

        If it ``packs``, also with whether results are contiguous where tensors are not. Attention
        in transformers gives the same bits in either order; other code may not.
        """
        names = self.roles.tensors
        for lone in ("alone", "padded"):
            found = dataclasses.replace(rule, lone=lone)
            each = (self.compared(found, dict.fromkeys(names[n:])) for n in range(1, len(names)))
            firsts = filter(None, (next(calls, None) for calls in each))
            same = [not difference(ours, theirs, bool(rule.cos)) for *_, ours, theirs in firsts]
            if same and all(same):
                rule = found
                break
        for sample, _, given, *_ in self.compared(rule) if packs else ():
            if len(sample[0]) > 2:
                turned = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in names}
                parts = parts_of(_run(self.function, {**given, **turned}))
                packed = all(x is None or x.is_contiguous() for x in parts)
                return dataclasses.replace(rule, packs=packed)
        return rule

    def search(self, *, packs: bool) -> None:
        """Finds the rule that the function computes in these roles, if there is any.

        If it ``packs``, results get the memory order of the function's.
        """
        roles, structures = self.roles, list[Rule]()  # of rules that hold up to rounding
        dims = [None] if roles.unsqueeze else DIMS
        plain = [x for x in self.samples if x[-1] == PLAIN]
        rows = (False, True) if roles.positions else (False,)
        for gathers, wide in itertools.product(rows, (True, False)[roles.form == "complex" :]):
            read = (self.read(x, wide, gathers) for x in plain if not x[3])
            rule = next(filter(None, read), None)
            if rule is None or rule.window != "all":
                continue
            if roles.form == "matrices" and rule.ratio != 4:
                continue  # it views two columns a pair, and takes them in any form
            others = [y for x in plain if x[3] and (y := self.read(x, wide, gathers))]
            window = next((x for x in others if x.window != "all"), rule).window
            tokens = next((x for x in others if x.tokens != "all"), rule).tokens
            structures.append(dataclasses.replace(rule, window=window, tokens=tokens))
        self.turns = bool(structures)
        for strict in (True, False):
            held: list[Rule] = []
            for x in structures:
                for way in ROUNDINGS if x.cos else COMPLEX_ROUNDINGS:
                    tried = (dataclasses.replace(x, unsqueeze=dim, **way) for dim in dims)
                    found = [y for rule in tried if (y := self.followed(rule, strict=strict))]
                    held += found
                    if found:
                        break
            if held:
                best = max(held, key=lambda x: len(x.layouts or ()))
                self.rule = self.completed(best, packs)
                return

    def repeat(self) -> None:
        """Runs the function again in all samples that the rule gives, and without tokens."""
        rule, empty = self.rule, False
        if rule is None:
            return
        for sample, _, given, found, expected in self.compared(rule):
            if difference(found, expected, False) in ("shapes", "dtypes"):
                continue
            _run(self.function, given)
            for name in () if empty else self.roles.tensors:
                less = {**given, name: given[name].narrow(sample[0].index("s"), 0, 0)}
                if rule.plan(less) is None:  # own code
                    _run(self.function, less)
            empty = True


def _rule_of(
    matrix: Tensor, known: dict[float, tuple[int, int, int]], width: int, is_complex: bool
) -> tuple[Rule, int] | None:
    """The rule that the matrix [output, input] of one token shows, and the row of its tables."""
    terms: dict[int, dict[int, Element]] = {}
    for j, i in matrix.nonzero().tolist():
        value = float(matrix[j, i])
        element = known.get(round(abs(value), 5))
        if element is not None:
            terms.setdefault(j, {})[i] = (1 if value > 0 else -1), *element
        elif value != 1.0 or i != j:
            return None
    start, count = min(terms, default=0), len(terms)
    half, end = count // 2, start + count
    if not terms or count % 2 or list(terms) != list(range(start, end)) or width % half:
        return None
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
    # The cosines of the first and of the second component of each pair, and the sines.
    read_by = [
        _columns([terms[written[k]][read[k ^ other]] for read, written in ends])
        for other in (0, 1)
        for k in (0, 1)
    ]
    if None in read_by:
        return None
    signs, rows, places = zip(*read_by, strict=True)
    window: Any = "all" if count == HEAD else "first" if start == 0 else "last"
    if signs[:2] != (1, 1) or len(set(rows)) != 1 or (window == "last" and end != HEAD):
        return None
    given: Any = {"cos": places[:2], "sin": places[2:], "signs": signs[2:]}
    rule = Rule(pairs=pairs, window=window, ratio=width // half, **given)
    if is_complex:
        if pairs != "adjacent" or not rule.is_plain:
            return None
        rule = Rule(pairs="adjacent", window=window, numerics="float32_product")
    return rule, rows[0]


def _columns(elements: list[Element]) -> tuple[int, int, Columns] | None:
    """Sign, row and strided slice of a table that its elements form, by pair."""
    columns = [column for *_, column in elements]
    steps = {y - x for x, y in itertools.pairwise(columns)} or {1}
    if len({(sign, *place) for sign, *place, _ in elements}) != 1 or len(steps) != 1:
        return None
    (sign, table, row, first), step = elements[0], steps.pop()
    block, offset = divmod(first, len(columns))
    return (sign, row, (table, block, offset, step)) if step > 0 and offset < 4 else None


# ------------------------------------------------------------------------------------- recognition


def recognise(
    function: Callable[..., Any], *, owner: type | None = None, attributes: bool = False
) -> Rotation | str:
    """The rotation that computes the same as a function of tensors, or why none does.

    ``owner`` is the class of a static method, or of one bound to an instance without attributes;
    ``attributes``: it is a method that may rotate by tables of its instance.
    """
    function = wrapped(type(function)) or function
    key: Any = getattr(function, "__func__", function)
    if not isinstance(key, types.FunctionType):
        return f"it is no function, but of the type {type(function).__name__}"
    held = with_attributes(key) if attributes else function
    if held is None:
        return UNKNOWN
    inner = inspect.unwrap(key)
    if not isinstance(inner, types.FunctionType) or inner.__code__.co_argcount < 2:
        return UNKNOWN
    gate = Gate([key], getattr(held, "attributes", ()), owner)
    if gate.reason or PRODUCTS.isdisjoint(gate.names):
        return gate.reason or UNKNOWN
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials = _tried(held)
        rules = tuple(trial.rule for trial in trials if trial.rule is not None)
        if not rules:
            if trials:
                return ROUNDS
            return MAKES if {"cos", "sin"} <= gate.names else UNKNOWN
        if gate.jumps:
            with gate.watching():
                for trial in trials:
                    trial.repeat()
            if reason := gate.unseen():
                return reason
        return Rotation(held, rules)


def _tried(function: Any) -> list[Trial]:
    """Trials in which a function was read to rotate, the last of them with its rules if known."""
    turning: list[Trial] = []
    held = hasattr(function, "attributes")
    usual = None if held else roles_of(function)
    for roles in itertools.chain([usual] if usual else [], possible_roles(function)):
        found: list[Trial] = []
        more = other_options(function, roles) if roles is not usual and not held else ()
        for part in itertools.chain([roles], more):
            if part is not roles and not any(trial.rule for trial in found):
                break
            each = [part]  # with and without positions
            if part.positions in part.defaults:
                needed = {k: v for k, v in part.defaults.items() if k != part.positions}
                without = dataclasses.replace(part, positions=None)
                each = [without, dataclasses.replace(part, defaults=needed)]
            # Names tell the form of tables.
            forms = [part.form] if part.sin or part.form != "separate" else FORMS
            for one, form in itertools.product(each, forms):
                found.append(Trial(function, dataclasses.replace(one, form=form)))
                found[-1].search(packs=roles is not usual)
        turning += [trial for trial in found if trial.turns]
        if any(trial.rule for trial in found):
            break
    return turning
