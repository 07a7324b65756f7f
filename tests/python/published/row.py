"""A row of the tables: a published file, the keys of it that matter, and the right answer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import posembed as pe

# The specification; or that of each kind of layer, None where the kind does not rotate.
Right = pe.RotarySpec | Mapping[str, pe.RotarySpec | None]


@dataclasses.dataclass(frozen=True)
class Row:
    """The contents of a file, and the right reading.

    Args:
        file: Whose file it is.
        says: Its keys about sizes, layers and positions.
        right: What its model does.
        source: Where that is written.
        arguments: What a caller has to say beside the file.
        layers: The kind of each layer, where layers differ; "no" for one that does not rotate.
    """

    file: str
    says: dict[str, Any]
    right: Right
    source: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.file


FULL, SLIDING = "full_attention", "sliding_attention"


def every(period: int, length: int, last: str = FULL, others: str = SLIDING) -> tuple[str, ...]:
    """Kinds of layers of which the last of each period differs."""
    return tuple(others if (place + 1) % period else last for place in range(length))
