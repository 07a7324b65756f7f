"""The JSON files of this folder, which are what is known of models."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def table(name: str) -> dict[str, Any]:
    """A file of this folder, by its name without the suffix; not to be changed."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def words(name: str) -> frozenset[str]:
    """A list of words.json, as a set."""
    return frozenset(table("words")[name])
