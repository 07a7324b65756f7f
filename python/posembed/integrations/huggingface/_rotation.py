"""A rotation that replaces a model's own function, with the same arguments and results.

Decisions that depend only on shapes, dtypes and devices are made once for each combination.
"""

from __future__ import annotations

import importlib
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
from posembed.integrations.huggingface._rule import Roles, Rule

KERNEL_DEVICES = {"cpu", "meta"} | ({"cuda"} if build_info()["cuda_version"] else set())
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
Numerics = Literal["float32", "float32_product"]
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
    """

    squeeze: int | None
    heads: int
    rows: int
    options: tuple[str, bool, bool, int, Numerics]
    plain: bool


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


def repeats(table: Tensor, adjacent: bool) -> bool:
    """Whether a table has each value twice, as far as its values can be read."""
    if type(table) is not Tensor or table.is_meta:
        return True
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    first, second = (table[..., ::2], table[..., 1::2]) if adjacent else table.chunk(2, -1)
    try:
        return torch.equal(first, second)
    except RuntimeError:  # inside torch.func.vmap
        return True


class Rotation:
    """Calls ``rotary_tables`` in place of a model's function, or the function itself.

    The function runs for arguments that ``rotary_tables`` does not support: other devices, dtypes
    and broadcasts.
    """

    def __init__(self, original: Callable[..., Any], roles: Roles, rule: Rule, home: str) -> None:
        self.original = original
        self.roles = roles
        self.rule = rule
        self.home = home
        self.others = tuple(roles.others())
        self.plans: dict[Any, Plan | None] = {}
        self.counter = Counter()
        self.apart = False  # whether the model turns the two components of a pair apart
        self.alternatives: tuple[Rotation, ...] = ()  # the same for tables in other layouts
        self.__name__ = str(getattr(original, "__name__", type(original).__name__))
        self.__qualname__ = str(getattr(original, "__qualname__", self.__name__))
        self.__doc__ = getattr(original, "__doc__", None)
        self.__wrapped__ = original

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.home, self.__qualname__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Rotates like the model's function."""
        given = dict(self.roles.defaults)
        given.update(zip(self.roles.names, args, strict=False))
        given.update(kwargs)
        angles = given.get(self.roles.cos)
        if isinstance(angles, Angles):
            result = self.turned(given, angles)
        else:
            result = self.rotate(given)
            for other in self.alternatives:
                if result is None:
                    result = other.rotate(given)
        if not torch.compiler.is_compiling():  # code is compiled again when a number changes
            self.counter.kernel += result is not None
            self.counter.own += result is None
        return self.original(*args, **kwargs) if result is None else result

    def layout(self, dimension: int | None) -> Layout | None:
        """The tensor layout if this is the head dimension inserted into [batch, tokens, width]."""
        if dimension is None:
            return None
        places: dict[int, Layout] = {-3: "bhsd", -2: "bshd"}
        return places.get(dimension if dimension < 0 else dimension - 4)

    def turned(self, given: dict[str, Any], angles: Angles) -> Any:
        """The result with exact angles, in the dtype of each tensor."""
        roles, rule = self.roles, self.rule
        layout = self.layout(given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze)
        assert layout is not None  # known since the patch
        slots = [given.get(name) for name in roles.tensors]
        tensors = [x for x in slots if x is not None]
        if rule.pairs == "regrouped":
            tensors = [_regroup(x) for x in tensors]
        spec = angles.adjacent if rule.pairs == "adjacent" else angles.halves
        results: list[Tensor] = []
        while tensors:
            first, second = tensors.pop(0), None
            if tensors and tensors[0].dtype == first.dtype:
                second = tensors.pop(0)
            found = rotated(first, second, angles.positions, spec, layout, 0, False, None, None)
            results.extend(found if isinstance(found, tuple) else (found,))
        return self._packed(tuple(results), len(slots))

    def rotate(self, given: dict[str, Any]) -> Any:
        """The result, or None if the function itself has to run."""
        roles, rule = self.roles, self.rule
        if len(given) > len(roles.names):
            return None
        for name in self.others:
            if given.get(name) is not roles.defaults.get(name):
                return None
        slots = [given.get(name) for name in roles.tensors]
        tensors = [x for x in slots if x is not None]
        if len(tensors) < len(slots) and not self._takes_first(slots, len(tensors)):
            return None
        tables = self._tables(given)
        if tables is None:
            return None
        cos, sin = tables
        dim = given[roles.unsqueeze] if roles.unsqueeze else rule.unsqueeze
        plan = self._planned(tensors, cos, sin, dim)
        if plan is None:
            return None
        if plan.squeeze is not None:
            cos, sin = cos.squeeze(plan.squeeze), None if sin is None else sin.squeeze(plan.squeeze)
        if sin is not None and rule.backwards:
            sin = -sin
        if not plan.plain:
            return self._packed(tuple(self._rotate_all(tensors, cos, sin, plan)), len(slots))
        key = tensors[1] if len(tensors) > 1 else None
        result = rotated_by_tables(tensors[0], key, None, cos, sin, *plan.options)
        return self._packed(result, len(slots))

    def _takes_first(self, slots: list[Tensor | None], count: int) -> bool:
        """Whether the first tensors are enough, and the others are None."""
        return 0 < self.rule.least <= count and all(x is not None for x in slots[:count])

    def _tables(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:
        """The part of the tables that is read, gathered by position if necessary."""
        roles, rule = self.roles, self.rule
        cos = given.get(roles.cos)
        sin = given.get(roles.sin) if roles.sin else None
        if not isinstance(cos, Tensor) or (roles.sin and not isinstance(sin, Tensor)):
            return None
        if roles.joint:
            cos, sin = cos.chunk(2, -1)
            if rule.sine_first:
                cos, sin = sin, cos
        if rule.gathers:
            positions = given[roles.positions or ""]
            if cos.dim() != 2 or not isinstance(positions, Tensor):
                return None
            cos, sin = cos[positions], None if sin is None else sin[positions]
        if rule.tables == "first half":
            half = cos.shape[-1] // 2
            cos, sin = cos[..., :half], None if sin is None else sin[..., :half]
        return cos, sin

    def _planned(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, dim: int | None
    ) -> Plan | None:
        """The plan for these shapes; None if the function itself has to run."""
        if torch.compiler.is_compiling():
            return self._plan(tensors, cos, sin, dim)
        metadata = [(x.shape, x.dtype, x.device) for x in (*tensors, cos)]
        key = (*metadata, dim, None if sin is None else (sin.shape, sin.dtype, sin.device))
        try:
            if key in self.plans:
                return self.plans[key]
        except (KeyError, TypeError):  # another thread cleared it, or symbolic shapes
            return self._plan(tensors, cos, sin, dim)
        plan = self._plan(tensors, cos, sin, dim)
        if self.rule.tables == "whole" and not all(map(self.repeats, (cos, sin))):
            plan = None
        if len(self.plans) >= PLANS:
            self.plans.clear()
        self.plans[key] = plan
        return plan

    def _plan(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, dim: int | None
    ) -> Plan | None:
        rule, query = self.rule, tensors[0]
        if self.apart or query.dim() not in (3, 4) or not self._known(cos, sin):
            return None
        found = _heads(cos, dim, query)
        if found is None:
            return None
        squeeze, heads = found
        layout = (query.dim(), cos.dim(), heads if dim is None else dim)
        if rule.layouts is not None and layout not in rule.layouts:
            return None
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
        start = query.shape[-1] - self._width(cos) if rule.window == "last" else 0
        half_width = rule.tables in ("first half", "half")
        options = (
            LAYOUTS[query.dim(), heads],
            rule.pairs == "adjacent",
            half_width,
            start,
            numerics,
        )
        plain = len(tensors) <= 2 and rule.pairs != "regrouped" and rule.numerics != "float64"
        plain = plain and all(length == rows for length in lengths)
        plain = plain and options[0] != "htd" and (not rule.keeps_dtype or self._stays(query, cos))
        return Plan(squeeze, heads, rows, options, plain)

    @staticmethod
    def _stays(query: Tensor, cos: Tensor) -> bool:
        """Whether the operator's result has the dtype of the query."""
        return cos.is_complex() or torch.promote_types(query.dtype, cos.dtype) == query.dtype

    def leave(self) -> None:
        """Runs the model's function from now on."""
        for rotation in (self, *self.alternatives):
            rotation.apart = True
            rotation.plans.clear()

    def repeats(self, table: Tensor | None) -> bool:
        """Whether a table has each value twice; checked once for each shape."""
        return table is None or repeats(table, self.rule.pairs == "adjacent")

    def _known(self, cos: Tensor, sin: Tensor | None) -> bool:
        """Whether ``rotary_tables`` supports these tables."""
        rule = self.rule
        if cos.is_complex() != (rule.tables == "complex"):
            return False
        if rule.numerics == "float32_product" and cos.dtype not in (*ROUNDED, torch.complex64):
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
        return bool(width <= head if rule.window != "all" else width == head)

    def _lengths_fit(self, lengths: list[int], rows: int) -> bool:
        if self.rule.tokens == "last":
            return all(length >= rows for length in lengths)
        if self.rule.tokens == "table's last":
            return bool(lengths[0] <= rows) and all(length == rows for length in lengths[1:])
        return all(length == rows for length in lengths)

    def _width(self, cos: Tensor) -> int:
        return cos.shape[-1] * (1 if self.rule.tables == "whole" else 2)

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

    def _rotate_all(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, plan: Plan
    ) -> list[Tensor]:
        """Rotations that need more than one call: more tensors, other tokens, other dtypes."""
        rule, rows, dtype = self.rule, plan.rows, tensors[0].dtype
        if rule.numerics == "float64":
            tensors = [x.double() for x in tensors]
            cos, sin = cos.double(), None if sin is None else sin.double()
        if rule.pairs == "regrouped":
            tensors = [_regroup(x) for x in tensors]
        first = _tokens(tensors[0], plan.heads)
        if rule.tokens == "table's last" and first != rows:
            last_cos = cos[..., rows - first :, :]
            last_sin = None if sin is None else sin[..., rows - first :, :]
            rotated = [self._call(tensors[0], None, last_cos, last_sin, plan)]
            rotated += [self._call(x, None, cos, sin, plan) for x in tensors[1:]]
        elif rule.tokens == "last" and first != rows:
            axis = -2 if plan.heads == -3 else -3
            before = [x.narrow(axis, 0, x.shape[axis] - rows) for x in tensors]
            turned = [x.narrow(axis, x.shape[axis] - rows, rows) for x in tensors]
            turned = self._in_pairs(turned, cos, sin, plan)
            rotated = [torch.cat(parts, axis) for parts in zip(before, turned, strict=True)]
        else:
            rotated = self._in_pairs(tensors, cos, sin, plan)
        return [x.to(dtype) for x in rotated] if rule.keeps_dtype else rotated

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
        if len(rotated) < slots and self.rule.lone == "padded":
            return (*rotated, *[None] * (slots - len(rotated)))
        if slots == 1 or (len(rotated) == 1 and self.rule.lone == "alone"):
            return rotated[0]
        return rotated


def _named(module: str, path: str) -> Any:
    """The object of that name, for pickle."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
