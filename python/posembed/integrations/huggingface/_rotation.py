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
from posembed.functional._rotary_tables import LAYOUTS, rotated_by_tables

KERNEL_DEVICES = {"cpu", "meta"} | ({"cuda"} if build_info()["cuda_version"] else set())
NARROW = (torch.bfloat16, torch.float16)
ROUNDED = (torch.float32, *NARROW)
Form = Literal["separate", "pair", "joint", "stacked", "matrices", "angles", "complex"]
INNER = {"stacked": 1, "matrices": 2}  # dimensions of a pair's elements behind the pairs
MAX_WIDTH = 1024  # rotated components that the kernel takes
TOKENS_FIRST = -4  # the place of heads in a layout whose tables are [tokens, 1, 1, width]
ANGLES = "posembed_angles"  # of tables that carry the positions that they were made from
ATTACHED: weakref.WeakSet[Any] = weakref.WeakSet()  # rotary modules that make such tables
OWN: list[None] = []  # has an element while all run the model's own code
PLANS = 512  # a rotation clears its plans beyond this number: prompt lengths are unbounded
WORDS = {
    "halves": "half-split",
    "adjacent": "interleaved",
    "regrouped": "adjacent pairs to halves",
}


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


class Plan(NamedTuple):
    """How to call ``rotary_tables`` for tensors of some shapes.

    Args:
        squeeze: The dimension of size 1 to squeeze from tables; None if there is none.
        heads: The head dimension, counted from the last.
        rows: Number of tokens in the tables.
        options: The operator's arguments after the tables: layout, interleaved, half_width, start
            and numerics.
        plain: Whether one call of the operator, with these options, is enough.
        view: How each table row comes to belong to all heads of a token, or "". "by head" exchanges
            batch and heads, for tables [heads, tokens, width]; "tokens first" moves tokens behind
            batch and heads, for tables [tokens, 1, 1, width]; "flat" makes tokens of all dimensions
            but the last, for tables as large as the tensors.
        parts: In how many parts to split the last dimension, if it is too wide for the kernel.
    """

    squeeze: int | None
    heads: int
    rows: int
    options: tuple[str, bool, bool, int, Literal["float32", "float32_product"]]
    plain: bool
    view: str
    parts: int


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

    names: tuple[str, ...] = ()
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    cos: str = ""
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
        """The tables, with all that belongs to a token in one dimension; angles once in float32."""
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

    def readable(self, given: dict[str, Any], gathers: bool) -> bool:
        """Whether tables have the form that they are read in."""
        table, second = given.get(self.cos), given.get(self.sin or "")
        if self.form == "pair":
            pair = isinstance(table, tuple | list) and len(table) == 2
            return pair and all(isinstance(x, Tensor) for x in table or ())
        if not isinstance(table, Tensor):
            return False
        if self.form == "separate" and not isinstance(second, Tensor):
            return False
        ends = (2,) * INNER.get(self.form, 0)
        rank = table.dim() - len(ends)
        if gathers and (rank != 2 or not isinstance(given.get(self.positions or ""), Tensor)):
            return False
        return rank > 0 and table.shape[rank:] == ends


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rotation that a function computes, by arguments in some roles.

    Args:
        roles: The roles.
        pairs: "halves" are components i and i + n/2, "adjacent" are 2i and 2i + 1, and
            "regrouped" reads adjacent pairs and writes halves.
        cos: Where the cosines of the first and of the second component of each pair are in the
            tables; None for complex tables.
        sin: The same of the sines.
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

    roles: Roles = Roles()
    pairs: Literal["halves", "adjacent", "regrouped"] = "halves"
    cos: tuple[Columns, Columns] | None = None
    sin: tuple[Columns, Columns] | None = None
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
    def has_halves(self) -> bool:
        """Whether what is read of the tables is one value for each pair."""
        same = all(x is not None and x[0] == x[1] for x in (self.cos, self.sin))
        return same and sum(self.signs) == 0

    @property
    def is_plain(self) -> bool:
        """Whether the kernel takes the two tables as they are."""
        if self.cos is None or self.sin is None:
            return True
        whole = self._is_whole(self.cos) and self._is_whole(self.sin)
        as_is = whole or (self.has_halves and self.ratio == 1)
        return as_is and self.signs == (-1, 1) and self.cos[0].table != self.sin[0].table

    def _is_whole(self, read: tuple[Columns, Columns]) -> bool:
        """Whether cosines or sines are a whole table, in the order of the components."""
        places = {"adjacent": ((0, 0, 2), (0, 1, 2))}.get(self.pairs, ((0, 0, 1), (2, 0, 1)))
        same = read[0].table == read[1].table
        return self.ratio == 2 and same and (read[0][1:], read[1][1:]) == places

    def _read(
        self, tables: list[Tensor], read: tuple[Columns, Columns], signs: tuple[int, int]
    ) -> Tensor:
        """Cosines or sines for the kernel, for each pair or for each component."""
        table = tables[read[0].table]
        if self._is_whole(read) and signs[0] == signs[1]:
            return table if signs[0] > 0 else -table
        values = [columns.of(tables, table.shape[-1] // self.ratio) for columns in read]
        values = [x if sign > 0 else -x for x, sign in zip(values, signs, strict=True)]
        if self.has_halves:
            return values[0]
        return (
            torch.stack(values, -1).flatten(-2)
            if self.pairs == "adjacent"
            else torch.cat(values, -1)
        )

    def __str__(self) -> str:
        words = WORDS[self.pairs]
        if self.cos is None:
            words += ", complex"
        elif self.has_halves:
            whole = self.ratio == 1 or self.cos[0].step > 1
            place = "" if whole else ("first ", "", "second ", "")[self.cos[0].quarter]
            words += f", {place}half tables"
        words += f", {self.window} part of the head" if self.window != "all" else ""
        words += f", {self.tokens} tokens" if self.tokens != "all" else ""
        words += ", backwards" if self.signs == (1, -1) else ""
        once = self.numerics.replace("_product", "")
        return words if self.numerics == "float32" else f"{words}, {once}"

    # ------------------------------------------------------------------------------------ planning

    def plan(self, given: dict[str, Any]) -> Plan | None:
        """How to rotate these arguments; None if the function itself has to run."""
        roles, others = self.roles, self.roles.others()
        if len(given) > len(roles.names):
            return None
        if any(not _same(given.get(name), value) for name, value in others.items()):
            return None
        slots = [given.get(name) for name in roles.tensors]
        tensors = [x for x in slots if x is not None]
        count = len(tensors)
        if not all(isinstance(x, Tensor) for x in tensors) or not tensors:
            return None
        lone = 0 < self.least <= count and all(x is not None for x in slots[:count])
        if (count < len(slots) and not lone) or not roles.readable(given, self.gathers):
            return None
        dim = given[roles.unsqueeze] if roles.unsqueeze else self.unsqueeze
        if dim is not None and not isinstance(dim, int):
            return None
        cos, sin = self.tables(given, tensors[0])
        if tensors[0].dim() not in (3, 4) or not self._takes_dtypes(tensors, cos, sin):
            return None
        found = _heads(cos, dim, tensors[0])
        squeeze, heads = found or (None, -3)
        view, parts = ("", 1) if found else self._view(tensors, cos, dim)
        if found is None and (not view or self.tokens != "all"):
            return None
        inserted: int | None = heads if dim is None else dim
        if view:  # tables have a row for each head, or tokens in their first dimension
            inserted = TOKENS_FIRST if view == "tokens first" else None
        if self.layouts is not None and (tensors[0].dim(), cos.dim(), inserted) not in self.layouts:
            return None
        tensors = [_viewed(x, view, parts) for x in tensors]
        return self._plan(tensors, _table_viewed(cos, view, parts), squeeze, heads, view, parts)

    def _plan(
        self,
        tensors: list[Tensor],
        cos: Tensor,
        squeeze: int | None,
        heads: int,
        view: str,
        parts: int,
    ) -> Plan | None:
        """The plan for tensors and tables in their view, if the kernel takes their sizes."""
        query, rows = tensors[0], cos.shape[-2 if squeeze != -2 else -3]
        batch = cos.shape[0] if cos.dim() - (squeeze is not None) == 3 else 1
        width, head = (
            cos.shape[-1] * (2 if self.has_halves or self.cos is None else 1),
            query.shape[-1],
        )
        if width > MAX_WIDTH or (width > head if self.window != "all" else width != head):
            return None
        for x in tensors:
            if x.dim() != query.dim() or x.shape[-1] != head:
                return None
            if batch != 1 and (x.dim() != 4 or x.shape[0] != batch):
                return None
        lengths = [x.shape[-2 if heads == -3 else -3] for x in tensors]
        less = self.tokens.startswith("table's") and lengths[0] <= rows
        if self.tokens == "last":
            if any(length < rows for length in lengths):
                return None
        elif any(length != rows for length in (lengths[1:] if less else lengths)):
            return None
        numerics = self.numerics
        once = self.keeps_dtype and query.dtype in ROUNDED and cos.dtype == torch.float32
        if once and numerics == "float32":  # dtypes are kept: the same bits, rounded earlier
            numerics = "float32_product"
        if numerics == "float64" or cos.dtype == torch.complex128:
            numerics = "float32"
        start = head - width if self.window == "last" else 0
        layout = LAYOUTS[query.dim(), heads]
        plain = len(tensors) <= 2 and self.pairs != "regrouped" and not view and layout != "htd"
        plain = plain and not self._in_float64(cos) and all(length == rows for length in lengths)
        stays = cos.is_complex() or torch.promote_types(query.dtype, cos.dtype) == query.dtype
        plain = plain and (not self.keeps_dtype or stays)
        options = layout, self.pairs == "adjacent", self.has_halves, start, numerics
        return Plan(squeeze, heads, rows, options, plain, view, parts)

    def _in_float64(self, cos: Tensor) -> bool:
        return self.numerics == "float64" or cos.dtype == torch.complex128

    def _takes_dtypes(self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None) -> bool:
        """Whether ``rotary_tables`` supports the dtypes and devices."""
        query, once = tensors[0], self.numerics == "float32_product"
        if cos.is_complex() != (self.cos is None):
            return False
        if self.dtypes is not None and (query.dtype, cos.dtype) not in self.dtypes:
            return False
        if once and cos.dtype not in (*ROUNDED, torch.complex64, torch.complex128):
            return False
        for x in tensors:
            if x.device.type not in KERNEL_DEVICES or x.device != cos.device:
                return False
            if x.dtype != query.dtype or not x.is_floating_point():
                return False
            if once and x.dtype not in ROUNDED:
                return False
        return sin is None or (sin.shape, sin.dtype, sin.device) == (
            cos.shape,
            cos.dtype,
            cos.device,
        )

    def _view(self, tensors: list[Tensor], cos: Tensor, dim: int | None) -> tuple[str, int]:
        """``Plan.view`` and ``Plan.parts`` for such tables; "" if they have another shape."""
        query, shape = tensors[0], cos.shape[:-1]
        if dim is None and query.dim() == 4 and shape == (query.shape[0], 1, 1):
            return "tokens first", 1
        if dim is not None or not all(x.shape == query.shape for x in tensors):
            return "", 1
        if query.dim() == 4 and shape in (query.shape[1:-1], (1, *query.shape[1:-1])):
            return "by head", 1
        if shape != query.shape[:-1]:
            return "", 1
        width = query.shape[-1]
        if width <= MAX_WIDTH or self.pairs != "adjacent" or self.window != "all":
            return "flat", 1
        parts = (n for n in range(2, width // 2 + 1) if width % (2 * n) == 0)
        return "flat", next(n for n in parts if width // n <= MAX_WIDTH)

    # ------------------------------------------------------------------------------------ rotating

    def rotate(self, given: dict[str, Any]) -> Any:
        """The result, or None if the function itself has to run."""
        plan = self.plan(given)
        return None if plan is None else self.run(given, plan)

    def run(self, given: dict[str, Any], plan: Plan) -> Any:
        """The result for arguments that the plan was made for."""
        slots = [given[name] for name in self.roles.tensors]
        tensors = [x for x in slots if x is not None]
        cos, sin = self.tables(given, tensors[0])
        if plan.squeeze is not None:
            cos, sin = cos.squeeze(plan.squeeze), None if sin is None else sin.squeeze(plan.squeeze)
        if not plan.plain:
            return self.packed(tuple(self._turned(tensors, cos, sin, plan)), len(slots))
        key = tensors[1] if len(tensors) > 1 else None
        result = rotated_by_tables(tensors[0], key, None, cos, sin, *plan.options)
        return self.packed(result, len(slots))

    def tables(self, given: dict[str, Any], query: Tensor) -> tuple[Tensor, Tensor | None]:
        """The part of the tables that is read, gathered by position if necessary."""
        tables = self.roles.tables(given, once=self.numerics == "float32_product")
        cos: Tensor = tables[0]
        sin: Tensor | None = None
        if self.cos is not None and self.sin is not None:
            cos = self._read(tables, self.cos, (1, 1))
            sin = self._read(tables, self.sin, (-self.signs[0], self.signs[1]))
        if self.gathers:
            positions = given[self.roles.positions or ""]
            cos, sin = cos[positions], None if sin is None else sin[positions]
        if self.casts:
            cos, sin = cos.to(query.dtype), None if sin is None else sin.to(query.dtype)
        return cos, sin

    def _turned(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, plan: Plan
    ) -> list[Tensor]:
        """Rotations that need more than one call: more tensors, other tokens, dtypes or views."""
        _, interleaved, half_width, start, numerics = plan.options

        def turn(tensors: list[Tensor], cos: Tensor, sin: Tensor | None) -> list[Tensor]:
            rotated: list[Tensor] = []
            for at in range(0, len(tensors), 2):
                result = functional.rotary_tables(
                    tensors[at],
                    tensors[at + 1] if at + 1 < len(tensors) else None,
                    cos,
                    sin,
                    interleaved=interleaved,
                    half_width=half_width,
                    unsqueeze_dim=plan.heads,
                    start=start,
                    numerics=numerics,
                )
                rotated.extend(result if isinstance(result, tuple) else (result,))
            return rotated

        shapes, dtype, rows = [x.shape for x in tensors], tensors[0].dtype, plan.rows
        tensors = [_viewed(x, plan.view, plan.parts) for x in tensors]
        cos = _table_viewed(cos, plan.view, plan.parts)
        sin = None if sin is None else _table_viewed(sin, plan.view, plan.parts)
        if self._in_float64(cos):
            tensors = [x.double() for x in tensors]
            cos = cos.to(torch.complex128 if cos.is_complex() else torch.float64)
            sin = None if sin is None else sin.double()
        if self.pairs == "regrouped":
            tensors = [regrouped(x) for x in tensors]
        axis = -2 if plan.heads == -3 else -3
        first = tensors[0].shape[axis]
        if self.tokens.startswith("table's") and first != rows:
            begin = 0 if self.tokens == "table's first" else rows - first
            rest = cos.dim() - 2, begin, first
            last = cos.narrow(*rest), None if sin is None else sin.narrow(*rest)
            rotated = turn(tensors[:1], *last) + turn(tensors[1:], cos, sin)
        elif self.tokens == "last" and first != rows:
            before = [x.narrow(axis, 0, x.shape[axis] - rows) for x in tensors]
            after = [x.narrow(axis, x.shape[axis] - rows, rows) for x in tensors]
            parts = zip(before, turn(after, cos, sin), strict=True)
            rotated = [torch.cat(both, axis) for both in parts]
        else:
            rotated = turn(tensors, cos, sin)
        if self.keeps_dtype or cos.is_complex():
            rotated = [x.to(dtype) for x in rotated]
        if plan.view == "by head":
            return [x.transpose(0, 1) for x in rotated]
        if plan.view == "tokens first":
            return [x.movedim(-2, 0) for x in rotated]
        return [x.view(y) for x, y in zip(rotated, shapes, strict=True)] if plan.view else rotated

    def packed(self, result: Any, slots: int) -> Any:
        """The result in the function's form, for this number of tensor arguments."""
        result = _contiguous(result) if self.packs else result
        rotated = result if isinstance(result, tuple) else (result,)
        if len(rotated) < slots and self.lone == "padded":
            return (*rotated, *[None] * (slots - len(rotated)))
        if slots == 1 or (len(rotated) == 1 and self.lone == "alone"):
            return rotated[0]
        return rotated

    def direct(self, plan: Plan, count: int) -> Callable[..., Any] | None:
        """A function of this number of positional arguments that only calls the operator.

        None if a plan needs more, or if not all tensors and tables are among them.
        """
        roles, options = self.roles, plan.options
        needed = {*roles.tensors, roles.cos, roles.sin}
        if not (plan.plain and self.is_plain) or plan.squeeze is not None:
            return None
        if self.gathers or self.casts or roles.form not in ("separate", "complex"):
            return None
        if not needed <= {*roles.names[:count], None}:
            return None
        q, k, c, s = (
            roles.names.index(name) if name else -1
            for name in (roles.tensors[0], (*roles.tensors, "")[1], roles.cos, roles.sin)
        )
        if self.cos is not None and self.cos[0].table == 1:
            c, s = s, c
        single = torch.ops.posembed.rotary_tables.default._op
        pair = torch.ops.posembed.rotary_tables_pair.default._op
        call: Callable[..., Any] = lambda *x: pair(x[q], x[k], x[c], x[s], *options)  # noqa: E731
        if k < 0:
            call = lambda *x: single(x[q], x[c], None if s < 0 else x[s], *options)  # noqa: E731
        elif s < 0:
            call = lambda *x: pair(x[q], x[k], x[c], None, *options)  # noqa: E731
        return (lambda *x: _contiguous(call(*x))) if self.packs else call


def _contiguous(result: Any) -> Any:
    return (
        tuple(x.contiguous() for x in result) if isinstance(result, tuple) else result.contiguous()
    )


def regrouped(x: Tensor) -> Tensor:
    """The first components of all adjacent pairs before the second ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def _viewed(x: Tensor, view: str, parts: int) -> Tensor:
    """A tensor to rotate in the view of a plan."""
    if view == "by head":
        return x.transpose(0, 1)
    if view == "tokens first":
        return x.movedim(0, -2)
    return x.reshape(1, 1, -1, x.shape[-1] // parts) if view else x


def _table_viewed(table: Tensor, view: str, parts: int) -> Tensor:
    """A table in the view of a plan."""
    if view == "by head":
        return table.squeeze(0) if table.dim() == 4 else table
    return table.reshape(-1, table.shape[-1] // parts) if view else table


def _heads(table: Tensor, dim: int | None, query: Tensor) -> tuple[int | None, int] | None:
    """The dimension to squeeze from a table, and the head dimension; None for other broadcasts."""
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


def _same(value: Any, supported: Any) -> bool:
    """Whether an option has the supported value; tensors are not compared."""
    if value is supported:
        return True
    if isinstance(value, bool) or isinstance(supported, bool):
        return False
    kinds = (int | float, str)
    return (
        any(isinstance(value, x) and isinstance(supported, x) for x in kinds) and value == supported
    )


# --------------------------------------------------------------------------------------- comparing


def parts_of(result: Any) -> list[Any]:
    """The elements of a result."""
    return list(result) if isinstance(result, tuple) else [result]


def alike(first: Any, second: Any, *, dtypes: bool = True) -> bool:
    """Whether results have the same elements, shapes and, unless ignored, dtypes."""
    if isinstance(first, tuple) != isinstance(second, tuple):
        return False
    kinds: list[Any] = []
    for result in (first, second):
        if not all(x is None or isinstance(x, Tensor) for x in parts_of(result)):
            return False
        kinds.append([x if x is None else (x.shape, dtypes and x.dtype) for x in parts_of(result)])
    return bool(kinds[0] == kinds[1])


def equal(first: Any, second: Any, exact: bool) -> bool:
    """Whether results are bitwise equal, or at most one rounding apart if not exact.

    PyTorch's complex product rounds differently in the remainder of a SIMD vector, so its bits
    depend on shape and strides.
    """
    for x, y in zip(parts_of(first), parts_of(second), strict=True):
        if x is None or y is None:
            continue
        step = max(1e-6, *(torch.finfo(z.dtype).eps for z in (x, y) if z.dtype in NARROW), 0.0)
        near = not exact and torch.allclose(x.to(y.dtype), y, rtol=step, atol=1e-6)
        if not (near or torch.equal(x, y)):
            return False
    return True


def varies(x: Tensor) -> bool:
    """Whether a tensor's numbers are finite, and more than one."""
    return x.numel() > 0 and bool(x.isfinite().all()) and bool(x.min() < x.max())


def described(tensors: Iterable[Tensor]) -> str:
    """The dtypes and shapes of tensors, for a row."""
    return " and ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors)


class Counter:
    """How often the kernel ran, of it by exact angles, and how often the function itself.

    Attributes:
        difference: Where the kernel's bits were not those of the function, or ''.
    """

    __slots__ = ("difference", "exact", "kernel", "own")

    def __init__(self) -> None:
        self.kernel = self.own = self.exact = 0
        self.difference = ""


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


def _provable(values: Iterable[Any]) -> bool:
    """Whether the model's own code may run beside the kernel, and its results may be compared."""
    plain = (Tensor, torch.nn.Parameter)
    return (
        all(
            (type(x) in plain or hasattr(x, "_local_tensor")) and not x.is_meta
            for x in values
            if isinstance(x, Tensor)
        )
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def _copied(value: Any) -> Any:
    """An argument for the comparison: detached, and the local part of a distributed tensor."""
    if isinstance(value, tuple | list):
        return type(value)(map(_copied, value))
    if not isinstance(value, Tensor):
        return value
    return getattr(value, "_local_tensor", value).detach().clone()


def modes() -> tuple[Any, ...]:
    """Whether there are gradients and inference mode, and the dtypes of autocast or False."""
    autocast: Any = False
    if torch._C._is_any_autocast_enabled():
        autocast = tuple(
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in ("cpu", "cuda")
        )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


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


def _metadata(value: Any) -> Any:
    """What a decision may depend on: the metadata of tensors, and other values themselves."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return tuple(map(_metadata, value)) if isinstance(value, tuple | list) else value


# ----------------------------------------------------------------------------------------- rotation


class Rotation:
    """Calls ``rotary_tables`` in place of a model's function, or the function itself.

    The function runs for arguments that ``rotary_tables`` does not support: other devices, dtypes,
    broadcasts and options. The first call of each kind whose numbers can tell rotations apart runs
    it, too: if its bits differ, the function stays for calls of that kind.

    Args:
        original: The function, which runs the model's own code.
        cases: What it computes, for different layouts of tables and for different options.
    """

    def __init__(self, original: Callable[..., Any], cases: tuple[Rule, ...]) -> None:
        self.original, self.cases, self.rule = original, cases, cases[0]
        roles = self.rule.roles
        self.empty = {name: roles.defaults.get(name) for name in roles.names}
        self.plans: dict[Any, tuple[Rule, Plan] | None] = {}
        self.direct: dict[Any, Callable[..., Any]] = {}  # one operator call, by signature
        self.used: dict[int, Rule] = {}  # by identity
        self.proofs, self.counter = Proofs(), Counter()

    def function(self, *, bound: bool = False) -> Callable[..., Any]:
        """A function that calls this, for the code that takes the place of the model's own.

        Args:
            bound: Whether its first argument is an instance that the rotation does not need.
        """
        direct, counter, attached = self.direct, self.counter, ATTACHED
        key_of, is_compiling = signature, torch.compiler.is_compiling
        at = self.rule.roles.names.index(self.rule.roles.cos)

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

        made: Any = holder if held else method if bound else rotate
        made.rule = self.rule
        return made  # type: ignore[no-any-return]

    def forms(self) -> str:
        """What it computes, by default and with other options; or what calls have used."""
        texts: dict[str, str] = {}
        for rule in self.used.values() or self.cases:
            given = ", ".join(f"{name}={value!r}" for name, value in rule.roles.options)
            texts.setdefault(str(rule), f"{rule} with {given}" if given else str(rule))
        return "; ".join(texts.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Rotates like the model's function."""
        given = dict(self.empty)
        given.update(zip(self.rule.roles.names, args, strict=False))
        given.update(kwargs)
        if torch.compiler.is_compiling():  # code is compiled again when a counter changes
            chosen = self._choose(given)
            if chosen is None:
                return self.original(*args, **kwargs)
            return chosen[0].run(given, chosen[1])
        if ATTACHED:
            table = given.get(self.rule.roles.cos)
            table = table[0] if isinstance(table, tuple | list) and table else table
            angles = getattr(table, ANGLES, None)
            result = None if angles is None else angles(self, given)
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
        rule, plan = planned
        self.used[id(rule)] = rule
        kinds = (Tensor, int, float, bool, str, types.NoneType)
        if proved and not kwargs and all(type(x) in kinds for x in args):
            call = rule.direct(plan, len(args))
            if call is not None:
                self.direct[signature(args)] = call
        return rule.run(given, plan)

    def _prove(self, given: dict[str, Any], plan: Plan, args: Any, kwargs: Any) -> bool | None:
        """Whether bits are those of the model's own code; None if that is not known yet."""
        kind: list[Any] = list(modes())
        for name, x in given.items():
            if not isinstance(x, Tensor):
                kind.append(_metadata(x))
                continue
            kept = x.dim() + plan.heads if name in self.rule.roles.tensors else -1
            sizes = [  # lengths count by their powers of two
                n if i in (kept, x.dim() - 1) else n.bit_length() for i, n in enumerate(x.shape)
            ]
            kind.append((*sizes, x.dtype, x.device, x.is_contiguous(), x.requires_grad))

        def difference() -> str | None:
            return self._difference(_copied(args), _copied(tuple(kwargs.items())))

        proved = self.proofs.hold(tuple(kind), given.values(), difference)
        if proved is False and not self.counter.difference:
            self.counter.difference = next(text for text in self.proofs.values() if text)
        return proved

    def _difference(self, args: Any, named: Any) -> str | None:
        """How the kernel's bits differ from those of the model's own code; '' if they do not.

        None if these numbers cannot tell: identity angles, or values that are constant or NaN.
        """
        roles = self.rule.roles
        given = {**self.empty, **dict(zip(roles.names, args, strict=False)), **dict(named)}
        chosen = self._choose(given)
        if chosen is None:  # parts of distributed tensors have other shapes
            return None
        rule, plan = chosen
        found = rule.run(given, plan)
        tensors = [given[n].clone() for n in roles.tensors if given[n] is not None]
        cos, sin = rule.tables(given, tensors[0])
        tells = bool(((cos.imag if sin is None else sin).abs() > 1e-3).any())
        try:
            expected = self.original(*args, **dict(named))
        except Exception as error:  # the user gets it from the model's own code
            memory = "allocate" in str(error)  # of PyTorch's allocators, on CPUs and GPUs
            return None if memory else f"it raises {type(error).__name__}"
        if not alike(found, expected):
            return f"other shapes or dtypes for {described(tensors)}"
        results = parts_of(expected)
        if equal(found, expected, rule.cos is not None):
            turned = any(not torch.equal(x, y) for x, y in zip(results, tensors, strict=False))
            return "" if tells and turned and all(map(varies, tensors)) else None
        finite = all(x is None or bool(x.isfinite().all()) for x in results)
        return f"other bits for {described(tensors)}" if finite else None

    def _planned(self, given: dict[str, Any]) -> tuple[Rule, Plan] | None:
        """The rule and the plan for these arguments; None if the function itself has to run."""
        try:
            key = tuple([_metadata(value) for value in given.values()])
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

    def _choose(self, given: dict[str, Any]) -> tuple[Rule, Plan] | None:
        for rule in self.cases:
            plan = rule.plan(given)
            if plan is not None:
                return rule, plan
        return None
