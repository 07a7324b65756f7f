"""Converts options to the types that are stored; ValueError names the option."""

from __future__ import annotations

import dataclasses
import math
import operator
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.compiler import is_compiling

Number = TypeVar("Number", int, float)

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 200
_BRIEF.maxlist = _BRIEF.maxset = _BRIEF.maxdict = 8


def shown(value: Any) -> str:
    """``repr(value)`` for a message, without the middle of what is long."""
    return _BRIEF.repr(value)


def written(owner: Any, first: str, **usual: Any) -> str:
    """What stands first, and the options of an object that are not as usual, as C++ prints them."""
    given = {name: getattr(owner, name) for name in usual}
    options = (f"{name}={_option(x)}" for name, x in given.items() if x != usual[name])
    return ", ".join([first, *options])


def _option(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_option, value))}{',' * (len(value) == 1)})"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def constant(number: Number) -> Number:
    """Makes torch.compile treat a number as a constant: the graph is for this number only."""
    if not is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)  # type: ignore[return-value]


def one_of(name: str, value: Any, *known: str | None) -> None:
    """Raises ValueError unless ``value`` is one of the known ones."""
    if value not in known:
        *others, last = map(repr, known)
        raise ValueError(f"{name}: expected {', '.join(others)} or {last}, got {shown(value)}")


def whole(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int, from any integer type but bool; of at least ``least``."""
    if isinstance(value, bool):
        raise ValueError(f"{name}: expected a whole number, got {value}")
    try:
        number = constant(operator.index(value))
    except TypeError:
        raise ValueError(f"{name}: expected a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}: expected {least} or more, got {number}")
    return number


def finite(name: str, value: Any) -> float:
    """``value`` as a float. It must be finite, because JSON has only finite numbers."""
    if isinstance(value, bool):
        raise ValueError(f"{name}: expected a number, got {value}")
    try:
        if isinstance(value, str):
            raise TypeError
        number = constant(float(value))
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {shown(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def not_negative(name: str, value: Any) -> float:
    """``value`` as a finite float of at least 0."""
    number = finite(name, value)
    if number < 0:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {number:g}")
    return number


def positive(name: str, value: Any) -> int:
    """``value`` as an int of at least 1."""
    number = whole(name, value)
    if number < 1:
        raise ValueError(f"{name}: expected a positive number, got {number}")
    return number


def fields_of(specification: Any) -> dict[str, Any]:
    """The fields of a dataclass; torch.compile cannot trace the copies of ``asdict``."""
    fields = dataclasses.fields(specification)
    return {field.name: getattr(specification, field.name) for field in fields if field.init}


def finites(name: str, values: Any) -> tuple[float, ...]:
    """``values`` as a tuple of finite floats."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected numbers, got {values!r}")
    return tuple(finite(name, value) for value in values)


def wholes(name: str, values: Any) -> tuple[int, ...]:
    """``values`` as a tuple of ints."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected whole numbers, got {values!r}")
    return tuple(whole(name, value) for value in values)


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool; strings such as "false" are rejected."""
    if isinstance(value, str) or value not in (True, False):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def convert_fields(specification: Any) -> None:
    """Converts a frozen dataclass's numbers to the types that its fields declare.

    Equal numbers then make equal specifications.
    """
    for field in dataclasses.fields(specification):
        declared, value = str(field.type), getattr(specification, field.name, None)
        convert = _CONVERSIONS.get(declared.removesuffix(" | None"))
        if convert is None or (value is None and declared.endswith("None")):
            continue
        object.__setattr__(specification, field.name, convert(field.name, value))


_CONVERSIONS: dict[str, Callable[[str, Any], Any]] = {
    "int": whole,
    "float": finite,
    "bool": flag,
    "Sequence[float]": finites,
    "Sequence[int]": wholes,
}
