"""A rotation that stands in for a model's own function, with the same arguments and results.

A rule says what the function computes; the roles say which argument is what.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from posembed import functional

KERNEL_DEVICES = ("cpu", "cuda", "meta")
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a function computes.

    Args:
        pairs: "halves" are components i and i + n/2, "adjacent" are 2i and 2i + 1, and
            "regrouped" reads adjacent pairs and writes halves.
        tables: "whole" tables repeat each value; of whole ones, "first half" reads a part;
            "half" tables have each value once; "complex" is cos + i sin.
        numerics: "float32" rounds each product as PyTorch does, "float32_product" once,
            "float64" computes in float64.
        keeps_dtype: Whether results have the dtype of their tensors although tables are wider.
        window: Which components turn: "all", the "first" or the "last" of the head.
        backwards: Whether the angle is negative.
        unsqueeze: The dimension of the heads that the function inserts into its tables; None if
            it inserts none.
        gathers: Whether tables are looked up by position.
        tokens: Which tokens turn: "all" have a row in the tables, only the "last" have one, or
            the query has the "table's last".
        sine_first: Whether the first half of a joint table is the sine.
        layouts: The layouts in which this is known: dimensions of a tensor, dimensions of a table,
            and the dimension of heads that is inserted into it, or is there. None: all.
        lone: What is returned without a key: nothing is known, a "tensor", or a "pair" with None.
    """

    pairs: Literal["halves", "adjacent", "regrouped"] = "halves"
    tables: Literal["whole", "first half", "half", "complex"] = "whole"
    numerics: Literal["float32", "float32_product", "float64"] = "float32"
    keeps_dtype: bool = False
    window: Literal["all", "first", "last"] = "all"
    backwards: bool = False
    unsqueeze: int | None = None
    gathers: bool = False
    tokens: Literal["all", "last", "table's last"] = "all"
    sine_first: bool = False
    layouts: frozenset[tuple[int, int, int]] | None = None
    lone: Literal["", "tensor", "pair"] = ""

    def __str__(self) -> str:
        words = {
            "halves": "half-split",
            "adjacent": "interleaved",
            "regrouped": "adjacent pairs to halves",
        }[self.pairs]
        if self.tables != "whole":
            words += f", {self.tables}" + (" tables" if self.tables != "complex" else "")
        if self.window != "all":
            words += f", {self.window} part of the head"
        if self.tokens != "all":
            words += f", {self.tokens} tokens"
        if self.backwards:
            words += ", backwards"
        if self.numerics != "float32":
            words += ", " + self.numerics.replace("_product", "")
        return words


@dataclasses.dataclass(frozen=True)
class Roles:
    """Names of the arguments that have a part in a rotation, in the order of the function."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    tensors: tuple[str, ...]
    cos: str
    sin: str | None = None
    joint: bool = False
    unsqueeze: str | None = None
    positions: str | None = None

    def others(self) -> list[str]:
        """Arguments without a part: a rotation takes their default value alone."""
        known = {*self.tensors, self.cos, self.sin, self.unsqueeze, self.positions}
        return [name for name in self.names if name not in known]


def _regroup(x: Tensor) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def _inserted(table: Tensor, dim: int, rank: int) -> tuple[Tensor, int] | None:
    """A table and the dimension of the heads, counted from the last."""
    dim = dim if dim < 0 else dim - table.dim() - 1
    return (table, dim) if dim in (-2, -3) and table.dim() in (2, rank - 1) else None


def _broadcast(table: Tensor, query: Tensor) -> tuple[Tensor, int] | None:
    """The same for a table that has the dimension of the heads already."""
    rank = table.dim()
    if rank == 2:
        return table, -3
    if rank > query.dim():
        return None
    if table.shape[-3] == 1 and table.shape[-2] != 1:
        table, dim = table.squeeze(-3), -3
    elif table.shape[-2] == 1 and table.shape[-3] == query.shape[-3]:
        table, dim = table.squeeze(-2), -2
    elif table.shape[-3] == 1 and query.shape[-2] == 1:
        table, dim = table.squeeze(-3), -3
    else:
        return None
    return table, dim


def _tokens(x: Tensor, dim: int) -> int:
    return x.shape[-2 if dim == -3 else -3]


class Rotation:
    """Calls ``rotary_tables`` in place of a model's function, or the function itself.

    The function runs for arguments that ``rotary_tables`` does not take: other devices, dtypes
    and ways of broadcasting.
    """

    def __init__(self, original: Callable[..., Any], roles: Roles, rule: Rule, home: str) -> None:
        self.original = original
        self.roles = roles
        self.rule = rule
        self.home = home
        self.others = tuple(roles.others())
        self.__name__ = str(getattr(original, "__name__", type(original).__name__))
        self.__qualname__ = str(getattr(original, "__qualname__", self.__name__))
        self.__doc__ = getattr(original, "__doc__", None)
        self.__wrapped__ = original

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.home, self.__qualname__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Rotates as the model's function does."""
        given = dict(self.roles.defaults)
        given.update(zip(self.roles.names, args, strict=False))
        given.update(kwargs)
        result = self.rotate(given)
        return self.original(*args, **kwargs) if result is None else result

    def rotate(self, given: dict[str, Any]) -> Any:
        """The result, or None where the function itself has to run."""
        roles, rule = self.roles, self.rule
        if len(given) > len(roles.names):
            return None
        for name in self.others:
            if given.get(name) is not roles.defaults.get(name):
                return None
        tensors = [given.get(name) for name in roles.tensors]
        query = tensors[0]
        cos, sin = given.get(roles.cos), given.get(roles.sin) if roles.sin else None
        if (
            not isinstance(query, Tensor)
            or not isinstance(cos, Tensor)
            or query.dim() not in (3, 4)
        ):
            return None
        present = [x for x in tensors if x is not None]
        if len(present) < len(tensors) and not rule.lone:
            return None
        if roles.joint:
            cos, sin = cos.chunk(2, -1)
            if rule.sine_first:
                cos, sin = sin, cos
        if roles.sin and not isinstance(sin, Tensor):
            return None
        tables = self._prepare(cos, sin, given, query)
        if tables is None or not all(self._takes(x, query, *tables) for x in present):
            return None
        cos, sin, dim = tables
        rotated = self._rotate_all(present, cos, sin, dim)
        return self._packed(rotated, len(tensors))

    def _packed(self, rotated: list[Tensor], slots: int) -> Any:
        if slots == 1 or (len(rotated) == 1 and self.rule.lone == "tensor"):
            return rotated[0]
        if self.rule.lone == "pair" and len(rotated) < slots:
            return (*rotated, *[None] * (slots - len(rotated)))
        return tuple(rotated)

    def _prepare(
        self, cos: Tensor, sin: Tensor | None, given: dict[str, Any], query: Tensor
    ) -> tuple[Tensor, Tensor | None, int] | None:
        """Tables without a dimension for heads, and where that dimension is."""
        roles, rule = self.roles, self.rule
        if sin is not None and sin.shape != cos.shape:
            return None
        if rule.gathers:
            positions = given[roles.positions or ""]
            if cos.dim() != 2 or not isinstance(positions, Tensor):
                return None
            cos, sin = cos[positions], None if sin is None else sin[positions]
        if rule.tables == "first half":
            half = cos.shape[-1] // 2
            cos, sin = cos[..., :half], None if sin is None else sin[..., :half]
        dim = self._inserts(given)
        laid = _broadcast(cos, query) if dim is None else _inserted(cos, dim, query.dim())
        if laid is None:
            return None
        layout = (query.dim(), cos.dim(), laid[1] if dim is None else dim)
        if rule.layouts is not None and layout not in rule.layouts:
            return None
        cos, dim = laid
        if cos.dim() not in (2, query.dim() - 1):
            return None
        if sin is not None:
            sin = sin.reshape(cos.shape)
            sin = -sin if rule.backwards else sin
        return cos, sin, dim

    def _inserts(self, given: dict[str, Any]) -> int | None:
        return given[self.roles.unsqueeze] if self.roles.unsqueeze else self.rule.unsqueeze

    def _takes(self, x: Tensor, query: Tensor, cos: Tensor, sin: Tensor | None, dim: int) -> bool:
        rule = self.rule
        if x.device.type not in KERNEL_DEVICES or x.device != cos.device:
            return False
        if x.dim() != query.dim() or x.dtype != query.dtype or not x.is_floating_point():
            return False
        if rule.numerics == "float32_product" and (
            x.dtype not in ROUNDED or cos.dtype not in (*ROUNDED, torch.complex64)
        ):
            return False
        if cos.is_complex() != (rule.tables == "complex"):
            return False
        if sin is not None and sin.dtype != cos.dtype:
            return False
        if cos.dim() == 3 and not (x.dim() == 4 and cos.shape[0] in (1, x.shape[0])):
            return False
        width, head = self._width(cos), x.shape[-1]
        if width > head or (rule.window == "all" and width != head):
            return False
        rows, tokens = cos.shape[-2], _tokens(x, dim)
        if rule.tokens == "last":
            return bool(tokens >= rows)
        if rule.tokens == "table's last" and x is query:
            return bool(tokens <= rows)
        return bool(tokens == rows)

    def _width(self, cos: Tensor) -> int:
        return cos.shape[-1] * (1 if self.rule.tables == "whole" else 2)

    def _rotate_all(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, dim: int
    ) -> list[Tensor]:
        rows = cos.shape[-2]
        if self.rule.tokens == "table's last" and _tokens(tensors[0], dim) != rows:
            first = _tokens(tensors[0], dim)
            query_cos = cos[..., rows - first :, :]
            query_sin = None if sin is None else sin[..., rows - first :, :]
            rest = self._rotate_all(tensors[1:], cos, sin, dim) if tensors[1:] else []
            return [*self._call(tensors[:1], query_cos, query_sin, dim), *rest]
        if self.rule.tokens == "last" and _tokens(tensors[0], dim) != rows:
            axis = -2 if dim == -3 else -3
            before = [x.narrow(axis, 0, x.shape[axis] - rows) for x in tensors]
            turned = [x.narrow(axis, x.shape[axis] - rows, rows) for x in tensors]
            turned = self._call(turned, cos, sin, dim)
            return [torch.cat(parts, axis) for parts in zip(before, turned, strict=True)]
        return self._call(tensors, cos, sin, dim)

    def _call(
        self, tensors: list[Tensor], cos: Tensor, sin: Tensor | None, dim: int
    ) -> list[Tensor]:
        rule, dtype = self.rule, tensors[0].dtype
        numerics = rule.numerics
        if numerics == "float64":
            tensors = [x.double() for x in tensors]
            cos, sin = cos.double(), None if sin is None else sin.double()
            numerics = "float32"
        elif rule.keeps_dtype and dtype in ROUNDED and cos.dtype == torch.float32:
            numerics = "float32_product"  # the same bits, rounded where they are computed
        if rule.pairs == "regrouped":
            tensors = [_regroup(x) for x in tensors]
        start = tensors[0].shape[-1] - self._width(cos) if rule.window == "last" else 0
        rotated: list[Tensor] = []
        for at in range(0, len(tensors), 2):
            key = tensors[at + 1] if at + 1 < len(tensors) else None
            result = functional.rotary_tables(
                tensors[at],
                key,
                cos,
                sin,
                interleaved=rule.pairs == "adjacent",
                unsqueeze_dim=dim,
                start=start,
                numerics=numerics,
                half_width=rule.tables in ("first half", "half"),
            )
            rotated.extend(result if isinstance(result, tuple) else (result,))
        return [x.to(dtype) for x in rotated] if rule.keeps_dtype else rotated


def _named(module: str, path: str) -> Any:
    """The object of that name, for pickle."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
