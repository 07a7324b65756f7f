"""Heads and lengths that a configuration states; words.json has their keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from posembed.models.data import table
from posembed.models.fields import Fields, text_of


class Sizes(NamedTuple):
    """None for what is not stated, or differs by layer."""

    heads: int | None = None
    key_heads: int | None = None
    max_positions: int | None = None


def of(fields: Fields) -> Sizes:
    """The sizes of a part of a model, or of GGUF's metadata."""
    architecture = f"{text_of(fields.get('general.architecture'))}."
    fields = {name.removeprefix(architecture): value for name, value in fields.items()}
    names = table("words")["sizes"]
    heads, key_heads, length = (_only(fields, names[size]) for size in Sizes._fields)

    def states(kind: str) -> bool:
        return any(fields.get(name) for name in names[kind])

    if states("other_heads"):
        heads = None
    doubles = fields.get("model_type") in names["doubled_key_heads"]  # in some layers, by the code
    if doubles or states("other_key_heads"):
        key_heads = None
    return Sizes(heads, 1 if states("latent") else key_heads, length)


def _only(fields: Fields, names: list[str]) -> int | None:
    """The number under one of several names; None if layers differ."""
    for name in names:
        value: Any = fields.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62:
            return value
        if value is not None:
            return None
    return None
