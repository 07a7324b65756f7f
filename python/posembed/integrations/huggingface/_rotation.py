"""A rotation that replaces a model's own function, with the same arguments and results.

What depends only on shapes, dtypes, devices and options is decided once for each combination.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from posembed import functional
from posembed._build_info import build_info
from posembed.functional import Layout
from posembed.functional._rotary import rotated
from posembed.functional._rotary_tables import LAYOUTS, rotated_by_tables
from posembed.integrations.huggingface._report import Counter
from posembed.integrations.huggingface._rule import WHOLE, Part, Roles, Rule

KERNEL_DEVICES = {"cpu", "meta"} | ({"cuda"} if build_info()["cuda_version"] else set())
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
Numerics = Literal["float32", "float32_product"]
MAX_WIDTH = 1024  # rotated components that the kernel takes
TOKENS_FIRST = -4  # the place of heads in a layout whose tables are [tokens, 1, 1, width]
PLANS = 512  # a rotation clears its plans beyond this number: prompt lengths are unbounded


class Plan(NamedTuple):
    """How to call ``rotary_tables`` for tensors of some shapes.

    Args:
        squeeze: The dimension of size 1 to squeeze from tables; None if there is none.
        heads: The head dimension, counted from the last.
        rows: Number of tokens in the tables.
        options: The operator's arguments after the tables: layout, interleaved, half_width, start
            and numerics.
        plain: Whether one call of the operator, with these options, is enough.
        rearrangement: How tables with a row for each head become tables without; None if they are.
    """

    squeeze: int | None
    heads: int
    rows: int
    options: tuple[str, bool, bool, int, Numerics]
    plain: bool
    rearrangement: Rearrangement | None = None


class Rearrangement(NamedTuple):
    """Views of tensors and tables in which each table row belongs to all heads of a token.

    Args:
        kind: "by head" exchanges batch and heads, for tables [heads, tokens, width]. "tokens first"
            moves tokens behind batch and heads, for tables [tokens, 1, 1, width]. For a "flat" one,
            tables are as large as the tensors: all dimensions but the last become tokens.
        parts: In how many parts to split the last dimension, if it is too wide for the kernel.
    """

    kind: Literal["by head", "tokens first", "flat"]
    parts: int = 1

    def of(self, x: Tensor) -> Tensor:
        """A tensor to rotate, rearranged."""
        if self.kind == "by head":
            return x.transpose(0, 1)
        if self.kind == "tokens first":
            return x.movedim(0, -2)
        return x.reshape(1, 1, -1, x.shape[-1] // self.parts)

    def of_table(self, table: Tensor) -> Tensor:
        """A table, rearranged."""
        if self.kind == "by head":
            return table.squeeze(0) if table.dim() == 4 else table
        return table.reshape(-1, table.shape[-1] // self.parts)

    def back(self, x: Tensor, shape: torch.Size) -> Tensor:
        """A result in its first shape."""
        if self.kind == "by head":
            return x.transpose(0, 1)
        return x.movedim(-2, 0) if self.kind == "tokens first" else x.view(shape)


class Angles(NamedTuple):
    """Replaces a table of cosines or sines if angles are exact.

    Args:
        positions: [batch or 1, tokens], or [axes, batch or 1, tokens] with several axes.
        halves: The specification text, with pairs of components i and i + n/2.
        adjacent: The same with pairs 2i and 2i + 1. The rotation knows which of them to use.
    """

    positions: Tensor
    halves: str
    adjacent: str


def _regroup(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def _heads(table: Tensor, dim: int | None, query: Tensor) -> tuple[int | None, int] | None:
    """The dimension to squeeze from a table, and the head dimension; None for other broadcasts.

    Args:
        table: Cosines.
        dim: The dimension that the function inserts into them; None if it inserts none.
        query: The tensor to rotate.
    """
    rank = table.dim()
    if dim is not None:
        heads = dim if dim < 0 else dim - rank - 1
        return (None, heads) if heads in (-2, -3) and rank in (2, query.dim() - 1) else None
    if rank == 2:
        return None, -3
    if rank > query.dim() or rank - 1 not in (2, query.dim() - 1):
        return None
    if table.shape[-3] == 1 and (table.shape[-2] != 1 or query.shape[-2] == 1):
        return -3, -3
    return (-2, -2) if table.shape[-2] == 1 and table.shape[-3] == query.shape[-3] else None


def _tokens(x: Tensor, heads: int) -> int:
    return x.shape[-2 if heads == -3 else -3]


def part_of(table: Tensor, part: Part) -> Tensor:
    """Some columns of a table."""
    half = table.shape[-1] // 2
    columns = {"whole": slice(None), "first half": slice(half), "second half": slice(half, None)}
    return table[..., columns.get(part, slice(part == "odd", None, 2))]


def kind_of(value: Any) -> Any:
    """What a decision may depend on: the metadata of tensors, and other values themselves."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return tuple(map(kind_of, value)) if isinstance(value, tuple | list) else value


class Case:
    """Calls ``rotary_tables`` for the arguments of a function, in the roles that they have."""

    def __init__(self, roles: Roles, rule: Rule) -> None:
        self.roles = roles
        self.rule = rule
        self.others = roles.others()

    def rotate(self, given: dict[str, Any]) -> Any:
        """The result, or None if the function itself has to run."""
        plan = self.plan(given)
        return None if plan is None else self.run(given, plan)

    def run(self, given: dict[str, Any], plan: Plan) -> Any:
        """The result for arguments that the plan was made for."""
        slots = [given[name] for name in self.roles.tensors]
        tensors = [x for x in slots if x is not None]
        cos, sin = self._tables(given, tensors[0])
        if plan.squeeze is not None:
            cos, sin = cos.squeeze(plan.squeeze), None if sin is None else sin.squeeze(plan.squeeze)
        if not plan.plain:
            return self._packed(tuple(self._rearranged(tensors, cos, sin, plan)), len(slots))
        key = tensors[1] if len(tensors) > 1 else None
        result = rotated_by_tables(tensors[0], key, None, cos, sin, *plan.options)
        return self._packed(result, len(slots))

    def direct(self, plan: Plan, count: int) -> Callable[..., Any] | None:
        """A function of this number of positional arguments that only calls the operator.

        None if a plan needs more, or if not all tensors and tables are among them.
        """
        roles, rule = self.roles, self.rule
        needed = (*roles.tensors, roles.cos, roles.sin)
        as_is = rule.parts == WHOLE and not (rule.gathers or rule.casts)
        if not plan.plain or plan.squeeze is not None or not as_is or rule.backwards:
            return None
        if roles.packing not in ("separate", "complex") or not set(needed) <= {
            *roles.names[:count],
            None,
        }:
            return None
        query, key, first, second = (
            roles.names.index(name) if name else None
            for name in (roles.tensors[0], (*roles.tensors, None)[1], roles.cos, roles.sin)
        )
        if rule.sine_first:
            first, second = second, first
        call = _operator_call(query, key, first, second, plan.options)
        return (lambda *x: _contiguous(call(*x))) if rule.packs else call

    def plan(self, given: dict[str, Any]) -> Plan | None:
        """The plan for these arguments; None if the function itself has to run."""
        roles, rule = self.roles, self.rule
        if len(given) > len(roles.names):
            return None
        if any(not _same(given.get(name), value) for name, value in self.others.items()):
            return None
        slots = [given.get(name) for name in roles.tensors]
        tensors = [x for x in slots if x is not None]
        if not all(isinstance(x, Tensor) for x in tensors) or not tensors:
            return None
        if len(tensors) < len(slots) and not self._takes_first(slots, len(tensors)):
            return None
        if not self._readable(given):
            return None
        cos, sin = self._tables(given, tensors[0])
        dim = given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze
        return self._plan(tensors, cos, sin, dim) if dim is None or isinstance(dim, int) else None

    def _takes_first(self, slots: list[Tensor | None], count: int) -> bool:
        """Whether the first tensors are enough, and the others are None."""
        return 0 < self.rule.least <= count and all(x is not None for x in slots[:count])

    def _readable(self, given: dict[str, Any]) -> bool:
        """Whether tables have the form that they are read in."""
        roles, packing = self.roles, self.roles.packing
        table = given.get(roles.cos)
        if packing == "pair":
            return (
                isinstance(table, tuple | list)
                and len(table) == 2
                and all(isinstance(x, Tensor) for x in table)
            )
        if not isinstance(table, Tensor):
            return False
        if packing == "separate" and not isinstance(given.get(roles.sin or ""), Tensor):
            return False
        ends = {"stacked": (2,), "matrices": (2, 2)}.get(packing, ())
        if self.rule.gathers and not (
            table.dim() == 2 + len(ends) and isinstance(given.get(roles.positions or ""), Tensor)
        ):
            return False
        return table.dim() > len(ends) and table.shape[table.dim() - len(ends) :] == ends

    def dtypes(self, given: dict[str, Any]) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of tensors and of tables that are read."""
        query = given[self.roles.tensors[0]]
        return query.dtype, self._tables(given, query)[0].dtype

    def _tables(self, given: dict[str, Any], query: Tensor) -> tuple[Tensor, Tensor | None]:
        """The part of the tables that is read, gathered by position if necessary."""
        roles, rule = self.roles, self.rule
        cos, sin = self._unpacked(given)
        if rule.parts != WHOLE and sin is not None:
            cos, sin = map(self._columns, (cos, sin), rule.parts)
        if rule.sine_first and sin is not None:
            cos, sin = sin, cos
        if rule.gathers:
            positions = given[roles.positions or ""]
            cos, sin = cos[positions], None if sin is None else sin[positions]
        if rule.casts:
            cos, sin = cos.to(query.dtype), None if sin is None else sin.to(query.dtype)
        if rule.backwards and sin is not None and roles.packing != "matrices":
            sin = -sin
        return cos, sin

    def _unpacked(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        table: Any = given[self.roles.cos]
        match self.roles.packing:
            case "separate":
                return table, given[self.roles.sin or ""]
            case "pair":
                return table[0], table[1]
            case "joint":
                first, second = table.chunk(2, -1)
                return first, second
            case "stacked":
                return table[..., 0], table[..., 1]
            case "angles":
                if self.rule.numerics == "float32_product":
                    table = table.float()
                return table.cos(), table.sin()
            case "matrices":
                table = table.mT if self.rule.backwards else table
                cosine, sine = table[..., 0, 0], table[..., 1, 0]
                if self.rule.has_halves:
                    return cosine, sine
                return self._whole(cosine, table[..., 1, 1]), self._whole(-table[..., 0, 1], sine)
            case _:
                return table, None

    def _columns(self, table: Tensor, part: Part) -> Tensor:
        """The columns that are read of a table, for each pair or for each component."""
        if part == "exchanged":
            adjacent = self.rule.pairs == "adjacent"
            first, second = (
                (part_of(table, "even"), part_of(table, "odd")) if adjacent else table.chunk(2, -1)
            )
            return self._whole(second, first)
        columns = part_of(table, part)
        return columns if part == "whole" or self.rule.has_halves else self._whole(columns, columns)

    def _whole(self, first: Tensor, second: Tensor) -> Tensor:
        """A table with a value for each component of a pair."""
        if self.rule.pairs == "adjacent":
            return torch.stack((first, second), -1).flatten(-2)
        return torch.cat((first, second), -1)

    def _plan(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, dim: int | None
    ) -> Plan | None:
        rule, query = self.rule, tensors[0]
        if query.dim() not in (3, 4) or not self._known(query, cos, sin):
            return None
        found = _heads(cos, dim, query)
        rearrangement = None
        if found is None:
            rearrangement = self._rearrangement(tensors, cos, dim)
            if rearrangement is None or rule.tokens != "all":
                return None
        squeeze, heads = found or (None, -3)
        layout = (query.dim(), cos.dim(), self._layout_of(heads, dim, rearrangement))
        if rule.layouts is not None and layout not in rule.layouts:
            return None
        if rearrangement is not None:
            tensors, cos = list(map(rearrangement.of, tensors)), rearrangement.of_table(cos)
            query = tensors[0]
        batch = cos.shape[0] if cos.dim() - (squeeze is not None) == 3 else 1
        rows = cos.shape[-2 if squeeze != -2 else -3]
        if not all(self._takes(x, query, cos, batch) for x in tensors):
            return None
        lengths = [_tokens(x, heads) for x in tensors]
        if not self._lengths_fit(lengths, rows):
            return None
        once = rule.keeps_dtype and query.dtype in ROUNDED and cos.dtype == torch.float32
        numerics: Numerics = "float32"
        if rule.numerics == "float32_product" or (once and rule.numerics == "float32"):
            numerics = "float32_product"  # if dtypes are kept: the same bits, rounded earlier
        if cos.dtype == torch.complex128:
            numerics = "float32"
        start = query.shape[-1] - self._width(cos) if rule.window == "last" else 0
        half_width = rule.has_halves
        options = (
            LAYOUTS[query.dim(), heads],
            rule.pairs == "adjacent",
            half_width,
            start,
            numerics,
        )
        plain = len(tensors) <= 2 and rule.pairs != "regrouped" and rearrangement is None
        plain = plain and not self._in_float64(cos)
        plain = plain and all(length == rows for length in lengths)
        plain = plain and options[0] != "htd" and (not rule.keeps_dtype or self._stays(query, cos))
        return Plan(squeeze, heads, rows, options, plain, rearrangement)

    def _in_float64(self, cos: Tensor) -> bool:
        return self.rule.numerics == "float64" or cos.dtype == torch.complex128

    @staticmethod
    def _layout_of(heads: int, dim: int | None, rearrangement: Rearrangement | None) -> int | None:
        """The head dimension that tables have or get; None if they have a row for each head.

        TOKENS_FIRST stands for tables [tokens, 1, 1, width].
        """
        if rearrangement is not None:
            return TOKENS_FIRST if rearrangement.kind == "tokens first" else None
        return heads if dim is None else dim

    def _rearrangement(
        self, tensors: list[Tensor], cos: Tensor, dim: int | None
    ) -> Rearrangement | None:
        """How to rotate by tables with a row for each head, or tokens in the first dimension.

        None if they have another shape.
        """
        query, shape = tensors[0], cos.shape[:-1]
        if dim is None and query.dim() == 4 and shape == (query.shape[0], 1, 1):
            return Rearrangement("tokens first")
        if dim is not None or not all(x.shape == query.shape for x in tensors):
            return None
        if query.dim() == 4 and shape in (query.shape[1:-1], (1, *query.shape[1:-1])):
            return Rearrangement("by head")
        if shape != query.shape[:-1]:
            return None
        width = query.shape[-1]
        if width <= MAX_WIDTH or self.rule.pairs != "adjacent" or self.rule.window != "all":
            return Rearrangement("flat")
        parts = (n for n in range(2, width // 2 + 1) if width % (2 * n) == 0)
        return Rearrangement("flat", next(n for n in parts if width // n <= MAX_WIDTH))

    @staticmethod
    def _stays(query: Tensor, cos: Tensor) -> bool:
        """Whether the operator's result has the dtype of the query."""
        return cos.is_complex() or torch.promote_types(query.dtype, cos.dtype) == query.dtype

    def _known(self, query: Tensor, cos: Tensor, sin: Tensor | None) -> bool:
        """Whether ``rotary_tables`` supports these tables."""
        rule = self.rule
        if cos.is_complex() != (rule.tables == "complex"):
            return False
        if rule.dtypes is not None and (query.dtype, cos.dtype) not in rule.dtypes:
            return False
        products = (*ROUNDED, torch.complex64, torch.complex128)
        if rule.numerics == "float32_product" and cos.dtype not in products:
            return False
        if sin is None:
            return True
        return sin.shape == cos.shape and sin.dtype == cos.dtype and sin.device == cos.device

    def _takes(self, x: Tensor, query: Tensor, cos: Tensor, batch: int) -> bool:
        """Whether it supports this tensor with this query and tables of this batch size."""
        rule = self.rule
        if x.device.type not in KERNEL_DEVICES or x.device != cos.device:
            return False
        if x.dtype != query.dtype or not x.is_floating_point():
            return False
        if rule.numerics == "float32_product" and x.dtype not in ROUNDED:
            return False
        if x.dim() != query.dim() or x.shape[-1] != query.shape[-1]:
            return False
        if batch != 1 and (x.dim() != 4 or x.shape[0] != batch):
            return False
        width, head = self._width(cos), x.shape[-1]
        if width > MAX_WIDTH:
            return False
        return bool(width <= head if rule.window != "all" else width == head)

    def _lengths_fit(self, lengths: list[int], rows: int) -> bool:
        if self.rule.tokens == "last":
            return all(length >= rows for length in lengths)
        if self.rule.tokens.startswith("table's"):
            return bool(lengths[0] <= rows) and all(length == rows for length in lengths[1:])
        return all(length == rows for length in lengths)

    def _width(self, cos: Tensor) -> int:
        rule = self.rule
        return cos.shape[-1] * (2 if rule.has_halves or rule.tables == "complex" else 1)

    def _call(
        self, query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor | None, plan: Plan
    ) -> Any:
        _, interleaved, half_width, start, numerics = plan.options
        result = functional.rotary_tables(
            query,
            key,
            cos,
            sin,
            interleaved=interleaved,
            half_width=half_width,
            unsqueeze_dim=plan.heads,
            start=start,
            numerics=numerics,
        )
        if not self.rule.keeps_dtype:
            return result
        if isinstance(result, Tensor):
            return result.to(query.dtype)
        return tuple(x.to(query.dtype) for x in result)

    def _rearranged(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, plan: Plan
    ) -> list[Tensor]:
        """Rotations by tables that may have a row for each head."""
        by_head = plan.rearrangement
        if by_head is None:
            return self._rotate_all(tensors, cos, sin, plan)
        turned = self._rotate_all(
            list(map(by_head.of, tensors)),
            by_head.of_table(cos),
            None if sin is None else by_head.of_table(sin),
            plan,
        )
        return [by_head.back(x, y.shape) for x, y in zip(turned, tensors, strict=True)]

    def _rotate_all(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, plan: Plan
    ) -> list[Tensor]:
        """Rotations that need more than one call: more tensors, other tokens, other dtypes."""
        rule, rows, dtype = self.rule, plan.rows, tensors[0].dtype
        if self._in_float64(cos):
            tensors = [x.double() for x in tensors]
            cos = cos.to(torch.complex128 if cos.is_complex() else torch.float64)
            sin = None if sin is None else sin.double()
        if rule.pairs == "regrouped":
            tensors = [_regroup(x) for x in tensors]
        first = _tokens(tensors[0], plan.heads)
        if rule.tokens.startswith("table's") and first != rows:
            axis, start = cos.dim() - 2, 0 if rule.tokens == "table's first" else rows - first
            some_cos = cos.narrow(axis, start, first)
            some_sin = None if sin is None else sin.narrow(axis, start, first)
            rotated = [self._call(tensors[0], None, some_cos, some_sin, plan)]
            rotated += [self._call(x, None, cos, sin, plan) for x in tensors[1:]]
        elif rule.tokens == "last" and first != rows:
            axis = -2 if plan.heads == -3 else -3
            before = [x.narrow(axis, 0, x.shape[axis] - rows) for x in tensors]
            turned = [x.narrow(axis, x.shape[axis] - rows, rows) for x in tensors]
            turned = self._in_pairs(turned, cos, sin, plan)
            rotated = [torch.cat(parts, axis) for parts in zip(before, turned, strict=True)]
        else:
            rotated = self._in_pairs(tensors, cos, sin, plan)
        if rule.keeps_dtype or cos.is_complex():
            return [x.to(dtype) for x in rotated]
        return rotated

    def _in_pairs(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, plan: Plan
    ) -> list[Tensor]:
        rotated: list[Tensor] = []
        for at in range(0, len(tensors), 2):
            key = tensors[at + 1] if at + 1 < len(tensors) else None
            result = self._call(tensors[at], key, cos, sin, plan)
            rotated.extend(result if isinstance(result, tuple) else (result,))
        return rotated

    def _packed(self, result: Any, slots: int) -> Any:
        """The result in the function's form, for this number of tensor arguments."""
        rotated = result if isinstance(result, tuple) else (result,)
        if self.rule.packs:
            rotated = _contiguous(rotated)
        if len(rotated) < slots and self.rule.lone == "padded":
            return (*rotated, *[None] * (slots - len(rotated)))
        if slots == 1 or (len(rotated) == 1 and self.rule.lone == "alone"):
            return rotated[0]
        return rotated

    def turned(self, given: dict[str, Any], angles: Angles) -> Any:
        """The result with exact angles, in the dtype of each tensor."""
        roles, rule = self.roles, self.rule
        layout = layout_of(given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze)
        assert layout is not None  # known since the patch
        slots = [given.get(name) for name in roles.tensors]
        spec = angles.adjacent if rule.pairs == "adjacent" else angles.halves
        tensors = [x for x in slots if x is not None]
        if rule.pairs == "regrouped":
            tensors = [_regroup(x) for x in tensors]
        results: list[Tensor] = []
        while tensors:
            first, second = tensors.pop(0), None
            if tensors and tensors[0].dtype == first.dtype:
                second = tensors.pop(0)
            found = rotated(first, second, angles.positions, spec, layout, 0, False, None, None)
            results.extend(found if isinstance(found, tuple) else (found,))
        return self._packed(tuple(results), len(slots))


def _operator_call(
    query: Any, key: Any, cos: Any, sin: Any, options: tuple[Any, ...]
) -> Callable[..., Any]:
    """Calls the operator with arguments at these places; those at None are absent."""
    single, pair = (
        getattr(torch.ops.posembed, name).default._op
        for name in ("rotary_tables", "rotary_tables_pair")
    )
    if key is None:
        return lambda *x: single(x[query], x[cos], None if sin is None else x[sin], *options)
    if sin is None:
        return lambda *x: pair(x[query], x[key], x[cos], None, *options)
    return lambda *x: pair(x[query], x[key], x[cos], x[sin], *options)


def _contiguous(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.contiguous()
    return tuple(x.contiguous() for x in result)


def _same(value: Any, supported: Any) -> bool:
    """Whether an option has the supported value; tensors are not compared."""
    if value is supported:
        return True
    if isinstance(value, bool) or isinstance(supported, bool):
        return False
    numbers = isinstance(value, int | float) and isinstance(supported, int | float)
    texts = isinstance(value, str) and isinstance(supported, str)
    return (numbers or texts) and value == supported


def layout_of(dimension: int | None) -> Layout | None:
    """The tensor layout if this is the head dimension inserted into [batch, tokens, width]."""
    if dimension is None:
        return None
    places: dict[int, Layout] = {-3: "bhsd", -2: "bshd"}
    return places.get(dimension if dimension < 0 else dimension - 4)


def signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a plan depends on: of plain tensors their metadata, otherwise the value itself."""
    return tuple([(x.shape, x.dtype, x.device) if type(x) is Tensor else x for x in args])


def rotation_of(function: Any) -> Rotation | None:
    """The rotation that a function calls in place of a model's own; None for other functions."""
    found = getattr(function, "posembed_rotation", None)
    return found if isinstance(found, Rotation) else None


class Rotation:
    """Calls ``rotary_tables`` in place of a model's function, or the function itself.

    The function runs for arguments that ``rotary_tables`` does not support: other devices, dtypes,
    broadcasts and options.

    Args:
        original: The function.
        cases: What it computes, for different layouts of tables and for different options.
        home: The module that will hold the rotation, for pickle.
    """

    def __init__(self, original: Callable[..., Any], cases: tuple[Case, ...], home: str) -> None:
        self.original = original
        self.cases = cases
        self.home = home
        self.roles, self.rule = cases[0].roles, cases[0].rule
        self.empty = {name: self.roles.defaults.get(name) for name in self.roles.names}
        self.plans: dict[Any, tuple[Case, Plan] | None] = {}
        self.direct: dict[Any, Callable[..., Any]] = {}  # one operator call, by signature
        self.counter = Counter()
        self.__name__ = str(getattr(original, "__name__", type(original).__name__))
        self.__qualname__ = str(getattr(original, "__qualname__", self.__name__))
        self.__doc__ = getattr(original, "__doc__", None)
        self.__wrapped__ = original

    def function(self, *, bound: bool = False) -> types.FunctionType:
        """A function that calls this, for the place of the model's own.

        It has the globals of the model's function and names it as what it wraps. So
        ``torch.jit.script``, which reads sources, compiles the model's function.

        Args:
            bound: Whether it is a method, whose instance the rotation does not need.
        """
        # The globals of the model's function: nothing of this module's is used by name.
        direct, counter, refused = self.direct, self.counter, TypeError
        key_of, is_compiling = signature, torch.compiler.is_compiling

        def rotate(*args: Any, **kwargs: Any) -> Any:
            if kwargs or is_compiling():
                return self(*args, **kwargs)
            try:
                call = direct.get(key_of(args))
            except refused:  # an argument that cannot be hashed, or symbolic shapes
                call = None
            if call is None:
                return self(*args)
            counter.kernel += 1
            return call(*args)

        def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs, **{name: getattr(instance, name) for name in attributes})

        attributes: tuple[str, ...] = getattr(self.original, "attributes", ())
        written = method if bound else rotate
        own: Any = getattr(self.original, "__func__", self.original)
        own = own.__wrapped__ if attributes else own
        space = getattr(inspect.unwrap(own), "__globals__", {})
        made = types.FunctionType(written.__code__, space, self.__name__, None, written.__closure__)
        made.__module__, made.__qualname__, made.__doc__ = (
            self.home,
            self.__qualname__,
            self.__doc__,
        )
        vars(made).update(__wrapped__=own, posembed_rotation=self)
        return made

    def placed(self) -> Any:
        """The function in its home, which pickle finds by name; a new one if there is none."""
        found = getattr(sys.modules.get(self.home), self.__qualname__, None)
        return found if rotation_of(found) is self else self.function()

    def __str__(self) -> str:
        """What it computes, by default and with other options."""
        texts: dict[str, str] = {}
        for case in self.cases:
            rule, options = str(case.rule), case.roles.options
            given = ", ".join(f"{name}={value!r}" for name, value in options)
            texts.setdefault(rule, f"{rule} with {given}" if given else rule)
        return "; ".join(texts.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Rotates like the model's function."""
        given = dict(self.empty)
        given.update(zip(self.roles.names, args, strict=False))
        given.update(kwargs)
        angles = given.get(self.roles.cos)
        if isinstance(angles, Angles):
            result = self.cases[0].turned(given, angles)
        else:
            planned = self._planned(given)
            result = None if planned is None else planned[0].run(given, planned[1])
            if planned is not None and not kwargs and not torch.compiler.is_compiling():
                self._remember(args, *planned)
        if not torch.compiler.is_compiling():  # code is compiled again when a number changes
            self.counter.kernel += result is not None
            self.counter.own += result is None
        return self.original(*args, **kwargs) if result is None else result

    def _planned(self, given: dict[str, Any]) -> tuple[Case, Plan] | None:
        """The case and the plan for these arguments; None if the function itself has to run."""
        if torch.compiler.is_compiling():
            return self._choose(given)
        try:
            key = tuple([kind_of(value) for value in given.values()])
            if key in self.plans:
                return self.plans[key]
        except (KeyError, TypeError):  # another thread cleared it, or symbolic shapes
            return self._choose(given)
        found = self._choose(given)
        if len(self.plans) >= PLANS:
            self.plans.clear()
            self.direct.clear()
        self.plans[key] = found
        return found

    def _choose(self, given: dict[str, Any]) -> tuple[Case, Plan] | None:
        for case in self.cases:
            plan = case.plan(given)
            if plan is not None:
                return case, plan
        return None

    def _remember(self, args: tuple[Any, ...], case: Case, plan: Plan) -> None:
        """Keeps the operator call for arguments like these, if one is enough."""
        kinds = (Tensor, int, float, bool, str, type(None))
        call = case.direct(plan, len(args)) if all(type(x) in kinds for x in args) else None
        if call is not None:
            self.direct[signature(args)] = call
