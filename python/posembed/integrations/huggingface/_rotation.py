"""A rotation that runs in place of a model's own function, with the same arguments and results.

What depends only on shapes, dtypes, devices and options is decided once for each combination. The
first call of each kind runs the model's own code too and compares bits.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from posembed import functional
from posembed._build_info import build_info
from posembed.functional import Layout
from posembed.functional._rotary_tables import LAYOUTS, rotated_by_tables

KERNEL_DEVICES = {"cpu", "meta"} | ({"cuda"} if build_info()["cuda_version"] else set())
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
Numerics = Literal["float32", "float32_product"]
Form = Literal["separate", "pair", "joint", "stacked", "matrices", "angles", "complex"]
INNER = {"stacked": 1, "matrices": 2}  # dimensions of a pair's elements behind the pairs
MAX_WIDTH = 1024  # rotated components that the kernel takes
TOKENS_FIRST = -4  # the place of heads in a layout whose tables are [tokens, 1, 1, width]
ANGLES = "posembed_angles"  # of tables that carry the positions that they were made from
ATTACHED: weakref.WeakSet[Any] = weakref.WeakSet()  # rotary modules that make such tables
OWN: list[None] = []  # has an element while all run the model's own code
PLANS = 512  # a rotation clears its plans beyond this number: prompt lengths are unbounded


class Columns(NamedTuple):
    """Columns of a table, one for each pair: a strided slice of its last dimension.

    Args:
        table: The first table, 0, or the second, 1.
        quarter: Quarters of the width before the slice.
        offset: Columns after those.
        step: From one column to the next.
    """

    table: int
    quarter: int
    offset: int
    step: int

    def of(self, tables: list[Tensor], pairs: int) -> Tensor:
        """The columns."""
        table = tables[self.table]
        start = table.shape[-1] * self.quarter // 4 + self.offset
        return table[..., start : start + (pairs - 1) * self.step + 1 : self.step]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rotation that a function computes.

    Args:
        pairs: "halves" are components i and i + n/2, "adjacent" are 2i and 2i + 1, and
            "regrouped" reads adjacent pairs and writes halves.
        first: Where the cosine and the sine of the first component of each pair are in the tables;
            None for complex tables.
        second: The same of the second component.
        ratio: Columns of a table for each pair.
        signs: The signs of the sine's products in the first and the second component.
        numerics: "float32" rounds each product as PyTorch does, "float32_product" rounds once,
            "float64" computes in float64.
        keeps_dtype: Whether results keep the dtype of their tensors even if tables are wider.
        window: Which components rotate: "all", the "first" or the "last" of the head.
        unsqueeze: The head dimension that the function inserts into its tables; None if it inserts
            none.
        gathers: Whether tables are gathered by position.
        tokens: Which tokens rotate: "all" have a row in the tables, only the "last" have one, or
            the query uses the "table's last" or the "table's first" rows.
        layouts: The layouts for which this is verified: rank of a tensor, rank of a table, and the
            head dimension that the table has or that is inserted, if there is one. None: all.
        casts: Whether tables are converted to the dtype of the tensors first.
        dtypes: The dtypes of tensors and tables for which this is verified; None: all.
        packs: Whether results are contiguous, whatever the memory order of the tensors.
        least: How many tensors it needs, if it takes None for the others; 0: it needs all.
        lone: What is returned without the others: the rest "alone" or "padded" with None.
    """

    pairs: Literal["halves", "adjacent", "regrouped"] = "halves"
    first: tuple[Columns, Columns] | None = None
    second: tuple[Columns, Columns] | None = None
    ratio: int = 1
    signs: tuple[int, int] = (-1, 1)
    numerics: Literal["float32", "float32_product", "float64"] = "float32"
    keeps_dtype: bool = False
    window: Literal["all", "first", "last"] = "all"
    unsqueeze: int | None = None
    gathers: bool = False
    tokens: Literal["all", "last", "table's last", "table's first"] = "all"
    layouts: frozenset[tuple[int, int, int | None]] | None = None
    casts: bool = False
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]] | None = None
    packs: bool = False
    least: int = 0
    lone: Literal["", "alone", "padded"] = ""

    @property
    def is_complex(self) -> bool:
        """Whether the table is cos + i sin."""
        return self.first is None

    @property
    def has_halves(self) -> bool:
        """Whether what is read of the tables is one value for each pair."""
        return not self.is_complex and self.first == self.second and sum(self.signs) == 0

    @property
    def is_plain(self) -> bool:
        """Whether the kernel takes the two tables as they are."""
        if self.is_complex:
            return True
        assert self.first is not None
        as_is = all(self._is_whole(i) for i in (0, 1)) or (self.has_halves and self.ratio == 1)
        return as_is and self.signs == (-1, 1) and self.first[0].table != self.first[1].table

    def _is_whole(self, index: int) -> bool:
        """Whether the cosines or the sines are a whole table, in the order of the components."""
        assert self.first is not None
        assert self.second is not None
        first, second = self.first[index], self.second[index]
        if self.pairs == "adjacent":
            order = first[1:] == (0, 0, 2) and second[1:] == (0, 1, 2)
        else:
            order = first[1:] == (0, 0, 1) and second[1:] == (2, 0, 1)
        return self.ratio == 2 and order and first.table == second.table

    def of(self, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the kernel, for each pair or for each component."""
        return self._read(tables, 0, (1, 1)), self._read(tables, 1, (-self.signs[0], self.signs[1]))

    def _read(self, tables: list[Tensor], index: int, signs: tuple[int, int]) -> Tensor:
        assert self.first is not None
        assert self.second is not None
        first, second = self.first[index], self.second[index]
        pairs = tables[first.table].shape[-1] // self.ratio
        if self._is_whole(index) and signs[0] == signs[1]:
            table = tables[first.table]
            return table if signs[0] > 0 else -table
        values = [c.of(tables, pairs) for c in (first, second)]
        values = [x if sign > 0 else -x for x, sign in zip(values, signs, strict=True)]
        if self.has_halves:
            return values[0]
        if self.pairs == "adjacent":
            return torch.stack(values, -1).flatten(-2)
        return torch.cat(values, -1)

    def __str__(self) -> str:
        words = {
            "halves": "half-split",
            "adjacent": "interleaved",
            "regrouped": "adjacent pairs to halves",
        }[self.pairs]
        if self.first is None:
            words += ", complex"
        elif self.has_halves:
            whole = self.ratio == 1 or self.first[0].step > 1
            place = "" if whole else ("first ", "", "second ", "")[self.first[0].quarter]
            words += f", {place}half tables"
        if self.window != "all":
            words += f", {self.window} part of the head"
        if self.tokens != "all":
            words += f", {self.tokens} tokens"
        if self.signs == (1, -1):
            words += ", backwards"
        if self.numerics != "float32":
            words += ", " + self.numerics.replace("_product", "")
        return words


@dataclasses.dataclass(frozen=True)
class Roles:
    """Names of the arguments that matter for a rotation, in the function's order.

    Args:
        names: All arguments.
        defaults: Values of those that have one.
        tensors: What is rotated.
        cos: The tables, or the first of two.
        sin: The second of two tables.
        form: How tables are passed: in "separate" arguments, as a "pair", "joint" side by side,
            "stacked" in a last dimension of 2, as "matrices" of 2 x 2, as their "angles", or
            "complex".
        unsqueeze: The head dimension to insert into the tables.
        positions: Rows of the tables.
        options: Values of other arguments that are not their defaults.
    """

    names: tuple[str, ...]
    defaults: dict[str, Any]
    tensors: tuple[str, ...]
    cos: str
    sin: str | None = None
    form: Form = "separate"
    unsqueeze: str | None = None
    positions: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def others(self) -> dict[str, Any]:
        """Arguments without a role, and the only value of each that a rotation supports."""
        known = {*self.tensors, self.cos, self.sin, self.unsqueeze, self.positions}
        values = {**self.defaults, **dict(self.options)}
        return {name: values.get(name) for name in self.names if name not in known}

    def tables(self, given: dict[str, Any], *, once: bool = False) -> list[Tensor]:
        """The tables among the arguments, with all that belongs to a token in one dimension.

        Args:
            given: The arguments.
            once: Whether angles are read in float32.
        """
        table: Any = given[self.cos]
        match self.form:
            case "separate":
                return [table, given[self.sin or ""]]
            case "pair":
                return list(table)
            case "angles":
                table = table.float() if once else table
                return [table.cos(), table.sin()]
        return [table.flatten(-1 - INNER.get(self.form, 0))]


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
        self.used = False

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
            return self.packed(tuple(self._rearranged(tensors, cos, sin, plan)), len(slots))
        key = tensors[1] if len(tensors) > 1 else None
        result = rotated_by_tables(tensors[0], key, None, cos, sin, *plan.options)
        return self.packed(result, len(slots))

    def direct(self, plan: Plan, count: int) -> Callable[..., Any] | None:
        """A function of this number of positional arguments that only calls the operator.

        None if a plan needs more, or if not all tensors and tables are among them.
        """
        roles, rule = self.roles, self.rule
        needed = {*roles.tensors, roles.cos, roles.sin}
        if not (plan.plain and rule.is_plain) or plan.squeeze is not None:
            return None
        if rule.gathers or rule.casts or roles.form not in ("separate", "complex"):
            return None
        if not needed <= {*roles.names[:count], None}:
            return None
        query, key, first, second = (
            roles.names.index(name) if name else None
            for name in (roles.tensors[0], (*roles.tensors, None)[1], roles.cos, roles.sin)
        )
        if rule.first is not None and rule.first[0].table == 1:
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
        roles, form = self.roles, self.roles.form
        table = given.get(roles.cos)
        if form == "pair":
            return (
                isinstance(table, tuple | list)
                and len(table) == 2
                and all(isinstance(x, Tensor) for x in table)
            )
        if not isinstance(table, Tensor):
            return False
        if form == "separate" and not isinstance(given.get(roles.sin or ""), Tensor):
            return False
        ends = {"stacked": (2,), "matrices": (2, 2)}.get(form, ())
        if self.rule.gathers and not (
            table.dim() == 2 + len(ends) and isinstance(given.get(roles.positions or ""), Tensor)
        ):
            return False
        return table.dim() > len(ends) and table.shape[table.dim() - len(ends) :] == ends

    def dtypes(self, given: dict[str, Any]) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of tensors and of tables that are read."""
        query = given[self.roles.tensors[0]]
        return query.dtype, self._tables(given, query)[0].dtype

    def tells(self, given: dict[str, Any], query: Tensor) -> bool:
        """Whether tables have angles whose sign can be seen."""
        cos, sin = self._tables(given, query)
        sine = cos.imag if sin is None else sin
        return bool((sine.abs() > 1e-3).any())

    def _tables(self, given: dict[str, Any], query: Tensor) -> tuple[Tensor, Tensor | None]:
        """The part of the tables that is read, gathered by position if necessary."""
        roles, rule = self.roles, self.rule
        tables = roles.tables(given, once=rule.numerics == "float32_product")
        cos, sin = (tables[0], None) if rule.is_complex else rule.of(tables)
        if rule.gathers:
            positions = given[roles.positions or ""]
            cos, sin = cos[positions], None if sin is None else sin[positions]
        if rule.casts:
            cos, sin = cos.to(query.dtype), None if sin is None else sin.to(query.dtype)
        return cos, sin

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
        if cos.is_complex() != (rule.is_complex):
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
        return cos.shape[-1] * (2 if rule.has_halves or rule.is_complex else 1)

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

    def packed(self, result: Any, slots: int) -> Any:
        """The result in the function's form, for this number of tensor arguments."""
        rotated = result if isinstance(result, tuple) else (result,)
        if self.rule.packs:
            rotated = _contiguous(rotated)
        if len(rotated) < slots and self.rule.lone == "padded":
            return (*rotated, *[None] * (slots - len(rotated)))
        if slots == 1 or (len(rotated) == 1 and self.rule.lone == "alone"):
            return rotated[0]
        return rotated


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


def _flat(result: Any) -> list[Tensor | None] | None:
    """The elements of a result; None if any is neither a tensor nor None."""
    parts = list(result) if isinstance(result, tuple) else [result]
    return parts if all(x is None or isinstance(x, Tensor) for x in parts) else None


def alike(first: Any, second: Any, *, dtypes: bool = True) -> bool:
    """Whether results have the same elements, shapes and, unless ignored, dtypes."""
    parts, others = _flat(first), _flat(second)
    if parts is None or others is None or isinstance(first, tuple) != isinstance(second, tuple):
        return False

    def kind(x: Tensor | None) -> Any:
        return None if x is None else (x.shape, x.dtype if dtypes else None)

    return list(map(kind, parts)) == list(map(kind, others))


def equal(first: Any, second: Any, exact: bool) -> bool:
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


# ----------------------------------------------------------------------------------------- rotation


class Counter:
    """How often the kernel ran, of it by exact angles, and how often the function itself.

    Attributes:
        difference: Where the kernel's bits were not those of the function, or ''.
    """

    __slots__ = ("difference", "exact", "kernel", "own")

    def __init__(self) -> None:
        self.kernel = self.own = self.exact = 0
        self.difference = ""


def _is_plain(x: Any) -> bool:
    return type(x) is Tensor or type(x) is torch.nn.Parameter or hasattr(x, "_local_tensor")


def _provable(values: Iterable[Any]) -> bool:
    """Whether the model's own code may run beside the kernel, and its results may be compared."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return (
        all(_is_plain(x) and not x.is_meta for x in tensors)
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


class Proofs(dict[Any, str]):
    """By kind of call: '' if bits were those of the model's own code, or the difference."""

    def hold(
        self, kind: Any, values: Iterable[Any], difference: Callable[[], str | None]
    ) -> bool | None:
        """Whether bits are those of the model's own code; None if that is not known yet.

        Args:
            kind: The kind of the call.
            values: Its arguments.
            difference: Compares; None if the numbers cannot tell.
        """
        try:
            known = self.get(kind)
        except TypeError:  # an argument that cannot be hashed
            return None
        if known is None and _provable(values):
            try:
                with torch.no_grad():
                    known = difference()
            except Exception:  # memory that runs out; what else is wrong, the call itself raises
                return None
            if known is not None:
                self[kind] = known
        return None if known is None else not known


def _copied(value: Any) -> Any:
    """An argument for the comparison: detached, and the local part of a distributed tensor."""
    if isinstance(value, tuple | list):
        return type(value)(map(_copied, value))
    if not isinstance(value, Tensor):
        return value
    return getattr(value, "_local_tensor", value).detach().clone()


def autocast_state() -> Any:
    """The dtypes of autocast, or False."""
    if not torch._C._is_any_autocast_enabled():
        return False
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


def modes() -> tuple[Any, ...]:
    """Whether there are gradients, inference mode and autocast."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()


def signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call depends on: of plain tensors their metadata, otherwise the value itself."""
    return (
        *modes(),
        *[
            (x.shape, x.dtype, x.device, x.is_contiguous(), x.requires_grad)
            if type(x) is Tensor
            else x
            for x in args
        ],
    )


class Rotation:
    """Calls ``rotary_tables`` in place of a model's function, or the function itself.

    The function runs for arguments that ``rotary_tables`` does not support: other devices, dtypes,
    broadcasts and options. The first call of each kind whose numbers can tell rotations apart runs
    it, too: if its bits differ, the function stays for calls of that kind.

    Args:
        original: The function, which runs the model's own code.
        cases: What it computes, for different layouts of tables and for different options.
    """

    def __init__(self, original: Callable[..., Any], cases: tuple[Case, ...]) -> None:
        self.original = original
        self.cases = cases
        self.roles, self.rule = cases[0].roles, cases[0].rule
        self.empty = {name: self.roles.defaults.get(name) for name in self.roles.names}
        self.plans: dict[Any, tuple[Case, Plan] | None] = {}
        self.direct: dict[Any, Callable[..., Any]] = {}  # one operator call, by signature
        self.proofs = Proofs()
        self.counter = Counter()
        self.__name__ = str(getattr(original, "__name__", type(original).__name__))

    def function(self, *, bound: bool = False) -> Callable[..., Any]:
        """A function that calls this, for the code that takes the place of the model's own.

        Args:
            bound: Whether its first argument is an instance that the rotation does not need.
        """
        direct, counter, attached = self.direct, self.counter, ATTACHED
        key_of, is_compiling = signature, torch.compiler.is_compiling
        at = self.roles.names.index(self.roles.cos)

        def rotate(*args: Any, **kwargs: Any) -> Any:
            if kwargs or is_compiling() or (attached and hasattr(args[at], ANGLES)):
                return self(*args, **kwargs)
            try:
                call = direct.get(key_of(args))
            except TypeError:  # an argument that cannot be hashed, or symbolic shapes
                call = None
            if call is None:
                return self(*args)
            counter.kernel += 1
            return call(*args)

        def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return rotate(*args, **kwargs)

        held: tuple[str, ...] = getattr(self.original, "attributes", ())

        def holder(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs, **{name: getattr(instance, name) for name in held})

        return holder if held else method if bound else rotate

    def forms(self) -> str:
        """What it computes, by default and with other options; or what calls have used."""
        texts: dict[str, str] = {}
        for case in [x for x in self.cases if x.used] or self.cases:
            rule, options = str(case.rule), case.roles.options
            given = ", ".join(f"{name}={value!r}" for name, value in options)
            texts.setdefault(rule, f"{rule} with {given}" if given else rule)
        return "; ".join(texts.values())

    def state(self) -> str:
        """Whether no comparison with the model's own code has been possible, or ''."""
        return "" if self.proofs or not self.counter.kernel else "not proved yet"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Rotates like the model's function."""
        given = dict(self.empty)
        given.update(zip(self.roles.names, args, strict=False))
        given.update(kwargs)
        if torch.compiler.is_compiling():  # code is compiled again when a counter changes
            chosen = self._choose(given)
            return (
                self.original(*args, **kwargs)
                if chosen is None
                else chosen[0].run(given, chosen[1])
            )
        if ATTACHED:
            table = given.get(self.roles.cos)
            table = table[0] if isinstance(table, tuple | list) and table else table
            angles = getattr(table, ANGLES, None)
            result = None if angles is None else angles.turned(self, given)
            if result is not None:
                self.counter.kernel += 1
                self.counter.exact += 1
                return result
        planned = self._planned(given)
        proved = planned is not None and self._prove(given, planned[1], args, kwargs)
        if planned is None or proved is False:
            self.counter.own += 1
            return self.original(*args, **kwargs)
        self.counter.kernel += 1
        case, plan = planned
        case.used = True
        if proved and not kwargs:
            self._remember(args, case, plan)
        return case.run(given, plan)

    def _prove(self, given: dict[str, Any], plan: Plan, args: Any, kwargs: Any) -> bool | None:
        """Whether bits are those of the model's own code; None if that is not known yet."""

        def difference() -> str | None:
            return self._difference(_copied(args), _copied(tuple(kwargs.items())))

        proved = self.proofs.hold(self._kind(given, plan), given.values(), difference)
        if proved is False and not self.counter.difference:
            self.counter.difference = next(text for text in self.proofs.values() if text)
        return proved

    def _kind(self, given: dict[str, Any], plan: Plan) -> tuple[Any, ...]:
        """The kind of a call: lengths count by their powers of two."""
        parts: list[Any] = list(modes())
        for name, x in given.items():
            if not isinstance(x, Tensor):
                parts.append(kind_of(x))
                continue
            kept = x.dim() + plan.heads if name in self.roles.tensors else -1
            sizes = [
                n if i in (kept, x.dim() - 1) else n.bit_length() for i, n in enumerate(x.shape)
            ]
            facts = x.dtype, x.device, x.is_contiguous(), x.requires_grad
            parts.append((*sizes, *facts))
        return tuple(parts)

    def _difference(self, args: Any, named: Any) -> str | None:
        """How the kernel's bits differ from those of the model's own code; '' if they do not.

        None if these numbers cannot tell: identity angles, or values that are constant or NaN.
        """
        kwargs = dict(named)
        given = {**self.empty, **dict(zip(self.roles.names, args, strict=False)), **kwargs}
        chosen = self._choose(given)
        if chosen is None:  # parts of distributed tensors have other shapes
            return None
        found = chosen[0].run(given, chosen[1])
        tensors = [given[n].clone() for n in self.roles.tensors if given[n] is not None]
        tells = chosen[0].tells(given, tensors[0])
        try:
            expected = self.original(*args, **kwargs)
        except Exception as error:  # the user gets it from the model's own code
            memory = "allocate" in str(error)  # of PyTorch's allocators, on CPUs and GPUs
            return None if memory else f"it raises {type(error).__name__}"
        if not alike(found, expected):
            return f"other shapes or dtypes for {described(tensors)}"
        if equal(found, expected, not chosen[0].rule.is_complex):
            turned = any(not torch.equal(x, y) for x, y in zip(_flat(expected) or [], tensors))  # type: ignore[arg-type]  # noqa: B905
            return "" if tells and turned and all(map(varies, tensors)) else None
        finite = all(x is None or bool(x.isfinite().all()) for x in _flat(expected) or [])
        return f"other bits for {described(tensors)}" if finite else None

    def _planned(self, given: dict[str, Any]) -> tuple[Case, Plan] | None:
        """The case and the plan for these arguments; None if the function itself has to run."""
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
        kinds = (Tensor, int, float, bool, str, types.NoneType)
        call = case.direct(plan, len(args)) if all(type(x) in kinds for x in args) else None
        if call is not None:
            self.direct[signature(args)] = call


def varies(x: Tensor) -> bool:
    """Whether a tensor's numbers are finite, and more than one."""
    return x.numel() > 0 and bool(x.isfinite().all()) and bool(x.min() < x.max())


def described(tensors: Iterable[Tensor]) -> str:
    """The dtypes and shapes of tensors, for a row."""
    return " and ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors)


def layout_of(dimension: int | None) -> Layout | None:
    """The tensor layout if this is the head dimension inserted into [batch, tokens, width]."""
    if dimension is None:
        return None
    places: dict[int, Layout] = {-3: "bhsd", -2: "bshd"}
    return places.get(dimension if dimension < 0 else dimension - 4)
