"""Keys of configuration files that no reader has taken.

A key about positions raises, so a new name for the base or the scaling is never passed over; all
others are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from posembed.models import catalogue
from posembed.models.data import table, words
from posembed.models.fields import Keys, NoRuleError, shown, text_of

# What position_embedding_type says of a model that rotates.
ROTATIONS = {"rope", "rope_gptj", "rotary"}


def _is_about_positions(word: str) -> bool:
    beginnings = tuple(table("words")["beginnings"])
    return word in words("about_positions") or word.endswith("rope") or word.startswith(beginnings)


def _names_positions(key: str) -> bool:
    """Whether a key has a word about positions: "RoPE_base" has "rope" and "base"."""
    if key.startswith(tuple(table("words")["experts"])) or key in words("others"):
        return False
    found = set(re.findall(r"[a-z0-9]+", key.lower()))
    if not found.isdisjoint(words("schedules")):
        found -= {"freq", "freqs"}  # every so many layers or steps
    return any(map(_is_about_positions, found))


def _concerns_positions(key: str, value: Any, parts: Collection[str] = ()) -> bool:
    """Whether a key or, in a block, a member may change the rotation.

    Parts of the model are read on their own.
    """
    if key == "position_embedding_type" and text_of(value) in ROTATIONS:
        return False
    if _names_positions(key):
        return True
    if isinstance(value, dict):
        if key in parts or "model_type" in value:
            return False
        return any(_concerns_positions(name, each) for name, each in value.items())
    return isinstance(value, list) and any(_concerns_positions("", each) for each in value)


def check_understood(
    keys: Keys,
    accounted: Collection[str],
    ignore: Collection[str],
    said: Mapping[str, Collection[Any]] = MappingProxyType({}),
) -> None:
    """Raises ValueError for remaining keys about positions.

    Args:
        keys: The configuration, after its readers.
        accounted: Keys that the model's configuration class knows.
        ignore: Keys that the caller knows.
        said: Keys that are understood if they have one of these values, which say what is known of
            the model anyway.
    """
    known = {*accounted, *ignore}
    says = {**table("words")["said"], **said}
    parts = catalogue.of(keys.fields).get("parts", {})
    unknown = [
        key
        for key in keys.left()
        if key not in known
        and keys.fields[key] not in says.get(key, ())
        and _concerns_positions(key, keys.fields[key], parts)
    ]
    if unknown:
        raise NoRuleError(
            f"{keys.where}: keys that are not understood: {shown(unknown)}: pass "
            f"ignore={shown(unknown)} if they do not concern rotary positions"
        )
