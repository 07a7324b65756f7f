"""Rules: the rotation that a model's function computes, and the roles of its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

Packing = Literal["separate", "pair", "joint", "stacked", "angles", "matrices", "complex"]
Part = Literal["whole", "exchanged", "first half", "second half", "even", "odd"]
WHOLE: tuple[Part, Part] = ("whole", "whole")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rotation that a function computes.

    Args:
        pairs: "halves" are components i and i + n/2, "adjacent" are 2i and 2i + 1, and
            "regrouped" reads adjacent pairs and writes halves.
        tables: "whole" tables have a value for each component, "half" ones for each pair;
            "complex" is cos + i sin.
        parts: What is read of the first whole table and of the second: all columns, all with those
            of each pair exchanged, a half, or every other one.
        numerics: "float32" rounds each product as PyTorch does, "float32_product" rounds once,
            "float64" computes in float64.
        keeps_dtype: Whether results keep the dtype of their tensors even if tables are wider.
        window: Which components rotate: "all", the "first" or the "last" of the head.
        backwards: Whether the angle is negated.
        unsqueeze: The head dimension that the function inserts into its tables; None if it inserts
            none.
        gathers: Whether tables are gathered by position.
        tokens: Which tokens rotate: "all" have a row in the tables, only the "last" have one, or
            the query uses the "table's last" or the "table's first" rows.
        sine_first: Whether the sine comes before the cosine.
        layouts: The layouts for which this is verified: rank of a tensor, rank of a table, and the
            head dimension that the table has or that is inserted, if there is one. None: all.
        casts: Whether tables are converted to the dtype of the tensors first.
        dtypes: The dtypes of tensors and tables for which this is verified; None: all.
        packs: Whether results are contiguous, whatever the memory order of the tensors.
        least: How many tensors it needs, if it takes None for the others; 0: it needs all.
        lone: What is returned without the others: the rest "alone" or "padded" with None.
    """

    pairs: Literal["halves", "adjacent", "regrouped"] = "halves"
    tables: Literal["whole", "half", "complex"] = "whole"
    parts: tuple[Part, Part] = WHOLE
    numerics: Literal["float32", "float32_product", "float64"] = "float32"
    keeps_dtype: bool = False
    window: Literal["all", "first", "last"] = "all"
    backwards: bool = False
    unsqueeze: int | None = None
    gathers: bool = False
    tokens: Literal["all", "last", "table's last", "table's first"] = "all"
    sine_first: bool = False
    layouts: frozenset[tuple[int, int, int | None]] | None = None
    casts: bool = False
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]] | None = None
    packs: bool = False
    least: int = 0
    lone: Literal["", "alone", "padded"] = ""

    @property
    def has_halves(self) -> bool:
        """Whether tables, or what is read of them, have a value for each pair."""
        return self.tables == "half" or {"whole", "exchanged"}.isdisjoint(self.parts)

    def __str__(self) -> str:
        words = {
            "halves": "half-split",
            "adjacent": "interleaved",
            "regrouped": "adjacent pairs to halves",
        }[self.pairs]
        if self.tables != "whole":
            words += f", {self.tables}" + (" tables" if self.tables != "complex" else "")
        elif set(self.parts) == {"first half"}:
            words += ", first half tables"
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
    """Names of the arguments that matter for a rotation, in the function's order.

    Args:
        names: All arguments.
        defaults: Values of those that have one.
        tensors: What is rotated.
        cos: The tables, or the first of two.
        sin: The second of two tables.
        packing: How tables are passed: in "separate" arguments, as a "pair", "joint" side by side,
            "stacked" in a last dimension of 2, as their "angles", as "matrices" of 2 x 2, or
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
    packing: Packing = "separate"
    unsqueeze: str | None = None
    positions: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def others(self) -> dict[str, Any]:
        """Arguments without a role, and the only value of each that a rotation supports."""
        known = {*self.tensors, self.cos, self.sin, self.unsqueeze, self.positions}
        values = {**self.defaults, **dict(self.options)}
        return {name: values.get(name) for name in self.names if name not in known}
