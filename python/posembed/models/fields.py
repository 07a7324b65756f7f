"""A configuration's values, and what readers ask of them.

Values are JSON's: a configuration object, NumPy's numbers and tuples become such at the door. Every
check here raises ValueError, whose message begins with the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from posembed.models.data import table, words

Fields = dict[str, Any]

MOST_LEVELS = 64
LONGEST_NAME = 256
# Names of classes, which only take memory: each layer's view of a configuration has them.
UNREAD = {"id2label", "label2id"}
# The advice where nothing is known of a model.
IN_FULL = (
    "describe its rotation in full with RotarySpec, from the model's code: head_dim, base, "
    "rotary_dim, pairing (interleaved), scaling and sections, one for each kind of layer, and "
    "which layers rotate"
)
# The keys by whose values models are recognised.
NAMING = ("model_type", "general.architecture")

# -------------------------------------------------------------------------------- what JSON can say


def as_fields(config: Mapping[Any, Any]) -> Fields:
    """A configuration as JSON objects with sorted keys, a copy.

    NaN and Infinity, which JSON lacks, become strings. Readers, and the models' own classes, repeat
    work or take memory for each layer, head and label: counts beyond any model's are refused.
    """
    fields = _json(config, 0)
    for key in NAMING:
        _check_name(text_of(fields.get(key)))
    _check_counts("", fields)
    return fields  # type: ignore[no-any-return]


def _json(value: Any, level: int) -> Any:
    if level > MOST_LEVELS:
        raise ValueError(f"config: expected JSON of at most {MOST_LEVELS} levels")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        # Integers beyond 64 bits are floating numbers, as most programs read them.
        if -(1 << 63) <= value < 1 << 64:
            return int(value)
        try:
            return float(value)
        except OverflowError:
            raise ValueError("config: expected JSON: a number is out of range") from None
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if isinstance(value, Mapping):
        kinds = (str, int, float, type(None))
        named = {_name(key): each for key, each in value.items() if isinstance(key, kinds)}
        return {key: _json(named[key], level + 1) for key in sorted(named.keys() - UNREAD)}
    if isinstance(value, (list, tuple)):
        return [_json(each, level + 1) for each in value]
    if hasattr(value, "to_dict"):
        return _json(value.to_dict(), level + 1)
    if hasattr(value, "tolist"):  # NumPy, torch
        return _json(value.tolist(), level + 1)
    return _json(list(value) if isinstance(value, (set, frozenset)) else str(value), level + 1)


def _name(key: Any) -> str:
    """A key as JSON writes it."""
    name = key if isinstance(key, str) else json.dumps(key)
    _check_name(name)
    return name


def _check_name(name: str) -> None:
    """Rejects names that no model has: they would fill messages."""
    if len(name.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError(
            f"config: expected names of at most {LONGEST_NAME} bytes, got '{brief(name)}'"
        )


def _check_counts(key: str, value: Any) -> None:
    """Checks a value and all values in it. The values of a list have the key of the list."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_counts(name, each)
    elif isinstance(value, list):
        for each in value:
            _check_counts(key, each)
    elif is_number(value):
        limits = table("words")["limits"]
        most = next((most for end, most in limits.items() if key.endswith(end)), None)
        if most is not None and value > most:
            raise ValueError(f"{key}: expected at most {most}, got {shown(value)}")


# ------------------------------------------------------------------------------------ printed forms


def brief(text: str, limit: int = 200) -> str:
    """The text, or its head and its tail around "..." if it has more than ``limit`` bytes."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    head, tail = data[: limit * 2 // 3], data[len(data) - limit // 3 + 3 :]
    return head.decode("utf-8", "ignore") + "..." + tail.decode("utf-8", "ignore")


def shown(value: Any, limit: int = 500) -> str:
    """A value as Python prints it, with at most ``limit`` bytes."""
    return brief(_printed(value), limit)


def _printed(value: Any) -> str:
    if isinstance(value, str):
        return f"'{brief(value)}'"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(key)}: {shown(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return repr(value)


# ------------------------------------------------------------------------------------------- values


def is_number(value: Any) -> bool:
    """Whether a value is an integer or a floating number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def text_of(value: Any) -> str:
    """The value of a string; empty for other values."""
    return value if isinstance(value, str) else ""


def items_of(value: Any) -> list[Any]:
    """The values of a list or an object; none for what is neither."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def same(key: str, values: Iterable[Any]) -> Any:
    """The value on which several sources agree; None if none has one."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise ValueError(f"{key}: the configuration contradicts itself: {shown(given)}")
    return given[0] if given else None


class NoRuleError(ValueError):
    """There is no rule for a model, or for a key; its module may tell."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; or pass read_module=True, which runs transformers' model")


def check_effect(name: str, value: Any, why: str) -> None:
    """Rejects an argument that would have no effect."""
    if value is not None:
        raise ValueError(f"{name}: expected none: {why}, got {shown(value)}")


def check_mapping(value: Any, where: str) -> None:
    """Rejects anything but a dictionary."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a dictionary, got {shown(value)}")


def dict_of(config: Any, where: str) -> Fields:
    """A copy of a dictionary, or the dictionary of a configuration object."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, type) or not hasattr(config, "to_dict"):
        raise TypeError(
            f"{where}: expected a dict, a PretrainedConfig or the path of a config.json, got "
            + type(config).__name__
        )
    return dict(config.to_dict())


def check_number(key: str, value: Any) -> None:
    """Rejects anything but a number."""
    if not is_number(value):
        raise ValueError(f"{key}: expected a number, got {shown(value, 60)}")


def real(key: str, value: Any) -> float:
    """A number as a float."""
    check_number(key, value)
    return float(value)


def base_number(key: str, value: Any) -> float:
    """The base of a geometric series: a number of at least 1."""
    base = real(key, value)
    if base < 1.0:
        raise ValueError(f"{key}: expected a finite number of at least 1, got {shown(value)}")
    return base


def optional_real(key: str, value: Any) -> float | None:
    """A number as a float; None for null."""
    return None if value is None else real(key, value)


def reals(key: str, values: Any) -> list[float]:
    """A list of numbers."""
    if not isinstance(values, list):
        raise ValueError(f"{key}: expected numbers, got {shown(values, 60)}")
    return [real(key, value) for value in values]


def whole(key: str, value: Any, least: int = -(2**63)) -> int:
    """An integer of at least ``least``."""
    number = real(key, value)
    if not number.is_integer() or not -(2.0**63) <= number < 2.0**63:
        raise ValueError(f"{key}: expected a whole number, got {shown(value)}")
    if number < least:
        raise ValueError(f"{key}: expected {least} or more, got {int(value)}")
    return int(value)


def positive(key: str, value: Any) -> int:
    """An integer above 0."""
    count = whole(key, value)
    if count <= 0:
        raise ValueError(f"{key}: expected a positive number, got {count}")
    return count


def wholes(key: str, values: Any) -> list[int]:
    """A list of integers."""
    if not isinstance(values, list):
        raise ValueError(f"{key}: expected whole numbers, got {shown(values, 60)}")
    return [whole(key, value) for value in values]


def flag(key: str, value: Any) -> bool:
    """True or False, or 1 or 0."""
    for known in (False, True):
        if value == known:
            return known
    raise ValueError(f"{key}: expected True or False, got {shown(value)}")


def share_of(width: int, factor: float) -> int:
    """A part of a width, without its fraction."""
    return int(max(min(float(width) * factor, 2.0**62), -(2.0**62)))


# -------------------------------------------------------------------------------------- strict keys


class Keys:
    """A dictionary whose keys are taken one by one; :meth:`done` rejects those that remain.

    Keys that are null count as absent. ``where`` names the dictionary in messages.
    """

    def __init__(self, fields: Any, where: str) -> None:
        check_mapping(fields, where)
        self.where = where
        self.names = set(fields)
        self.fields: Fields = {key: value for key, value in fields.items() if value is not None}
        self.accepted: set[str] = set()

    def take(self, key: str, otherwise: Any = None) -> Any:
        """The value of a key that may be absent."""
        self.accepted.add(key)
        value = self.fields.get(key)
        if value is None:
            return otherwise
        if key in words("numbers"):
            check_number(key, value)
        return value

    def need(self, key: str) -> Any:
        """The value of a key that must be present."""
        value = self.take(key)
        if value is None:
            known = shown(sorted(self.fields))
            raise ValueError(f"{key}: missing in {self.where}, which has {known}")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is present, even with null."""
        return key in self.names

    def first(self, keys: Iterable[str]) -> Any:
        """The value of the first key that is present and not zero; None otherwise."""
        found = [self.take(key) for key in keys]
        return next((value for value in found if value), None)

    def same(self, *keys: str) -> Any:
        """The value on which several keys agree; None if none is present."""
        return same(keys[0], [self.take(key) for key in keys])

    def stated(self, *keys: str) -> str:
        """The key of several that is present, for messages; the first if none is."""
        return next((key for key in keys if key in self.fields), keys[0])

    def ignore(self, *keys: str) -> None:
        """Accepts keys that do not matter here."""
        self.accepted.update(keys)

    def left(self, containing: str = "") -> list[str]:
        """The keys that contain a word and were neither taken nor accepted."""
        return [key for key in self.fields if key not in self.accepted and containing in key]

    def done(self, containing: str = "") -> None:
        """Rejects keys that contain a word and were neither taken nor accepted."""
        unknown = self.left(containing)
        if unknown:
            accepted = shown(sorted(key for key in self.accepted if containing in key))
            raise ValueError(
                f"{self.where}: unknown keys {shown(unknown)}; accepted are {accepted}"
            )
