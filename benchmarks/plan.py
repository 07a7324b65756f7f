"""A case that is known by its name before anything is built for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from measure import Case


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tensors, limits and compiled peers take seconds; only the cases that run build them.

    Attributes:
        name: Of the case.
        build: Makes it.
    """

    name: str
    build: Callable[[], Case]


def plan(name: str, build: Callable[..., Case], *arguments: object) -> Plan:
    """The case that ``build(name, *arguments)`` makes."""
    return Plan(name, functools.partial(build, name, *arguments))
