"""Strict reading of a dictionary: unknown and missing keys raise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]


class Keys:
    """A dictionary whose keys are taken one by one; :meth:`done` refuses those that are left.

    Args:
        fields: The dictionary; keys that are None count as absent.
        where: What it is, for error messages.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        check_mapping(fields, where)
        self._names = set(fields)
        self.fields = {key: value for key, value in fields.items() if value is not None}
        self.where = where
        self._accepted: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key that may be absent."""
        self._accepted.add(key)
        return self.fields.get(key, default)

    def has(self, key: str) -> bool:
        """Whether the key is there, be it with None."""
        return key in self._names

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        value = self.take(key)
        if value is None:
            raise ValueError(f"{key}: missing in {self.where}, which has {sorted(self.fields)}")
        return value

    def first(self, *keys: str) -> Any:
        """The value of the first key that is there and is not zero."""
        values = [self.take(key) for key in keys]
        return next((value for value in values if value), None)

    def same(self, *keys: str) -> Any:
        """The one value that several keys agree on; None where none is there."""
        return same(keys[0], *(self.take(key) for key in keys))

    def ignore(self, *keys: str) -> None:
        """Accepts keys that do not matter here."""
        self._accepted.update(keys)

    def done(self, concerning: str = "") -> None:
        """Raises for keys that match the pattern and were not taken."""
        pattern = re.compile(concerning)
        unknown = sorted(set(filter(pattern.search, self.fields)) - self._accepted)
        if unknown:
            accepted = sorted(filter(pattern.search, self._accepted))
            raise ValueError(f"{self.where}: unknown keys {unknown}; accepted are {accepted}")


def check_mapping(value: Any, where: str) -> None:
    """Raises ValueError for what is not a dictionary."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a dictionary, got {value!r}")


def same(key: str, *values: Any) -> Any:
    """The one value that several places agree on; None where no place has one."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise ValueError(f"{key}: the configuration contradicts itself: {given}")
    return given[0] if given else None
