"""Keys of configuration files that no reader has taken.

A key about positions raises, so a new name for the base or the scaling is never passed over; all
others are ignored, and so are keys that say once more what is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from posembed.models import catalogue
from posembed.models.data import table, words
from posembed.models.fields import Keys, NoRuleError, shown
from posembed.specifications import RotarySpec

Said = Mapping[str, Collection[Any]]


def _names_positions(key: str) -> bool:
    """Whether a key has a word about positions: "RoPE_base" has "rope" and "base"."""
    if key.startswith(tuple(table("words")["experts"])) or key in words("others"):
        return False
    found = set(re.findall(r"[a-z0-9]+", key.lower()))
    if not found.isdisjoint(words("schedules")):
        found -= {"freq", "freqs"}  # every so many layers or steps
    known, beginnings = words("about_positions"), tuple(table("words")["beginnings"])
    return any(x in known or x.endswith("rope") or x.startswith(beginnings) for x in found)


def _repeats(key: str, value: Any, said: Said) -> bool:
    """Whether a key, or how it ends, says what is known; indexers rotate in their own way."""
    names = [name for name, values in said.items() if value in values]
    ends = tuple(f"_{name}" for name in names)
    return key in names or (key.endswith(ends) and not key.startswith("index"))


def _concerns_positions(key: str, value: Any, said: Said, parts: Collection[str] = ()) -> bool:
    """Whether a key or, in a block, a member may change the rotation.

    Parts of the model are read on their own.
    """
    if _repeats(key, value, said):
        return False
    if _names_positions(key):
        return True
    if isinstance(value, dict):
        if key in parts or "model_type" in value:
            return False
        return any(_concerns_positions(name, each, said) for name, each in value.items())
    return isinstance(value, list) and any(_concerns_positions("", each, said) for each in value)


def repeated(spec: RotarySpec, bases: list[Any], rope_type: str) -> dict[str, list[Any]]:
    """What words.json's repeats may repeat of a specification."""
    return {
        "base": [spec.base, *bases],
        "factor": [getattr(spec.scaling, "factor", 1.0)],
        "interleaved": [spec.interleaved],
        "rope_type": [rope_type],
        "share": [(spec.rotary_dim or 0) / spec.head_dim],
    }


def check_understood(
    keys: Keys, known: Collection[str], read: Mapping[str, Collection[Any]]
) -> None:
    """Raises ValueError for keys about positions that readers left and nobody knows.

    ``read`` is what was read, by its name in words.json's repeats.
    """
    rules = catalogue.of(keys.fields)
    said: dict[str, Collection[Any]] = {**table("words")["said"], **rules.get("said", {})}
    for fact, names in table("words")["repeats"].items():
        said |= dict.fromkeys(names, read[fact])
    unknown = [
        key
        for key in keys.left()
        if key not in known
        and _concerns_positions(key, keys.fields[key], said, rules.get("parts", {}))
    ]
    if unknown:
        raise NoRuleError(
            f"{keys.where}: keys that are not understood: {shown(unknown)}: pass "
            f"ignore={shown(unknown)} if they do not concern rotary positions"
        )
