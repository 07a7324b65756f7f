"""The report of a patch, by function."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """One function of the model's code.

    Args:
        function: Its name.
        location: Its file and line.
        classes: The model's classes that call it.
        modules: How many modules of the model have one of these classes.
        patched: Whether posembed replaces it.
        action: What runs now, or why nothing changed.
    """

    function: str
    location: str
    classes: tuple[str, ...]
    modules: int
    patched: bool
    action: str


@dataclasses.dataclass(frozen=True)
class Report:
    """All functions of a model that rotate or make a bias, and what was done; prints as a table.

    Args:
        rows: One row for each function.
        notes: What was deliberately not changed.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def patched(self) -> tuple[Row, ...]:
        """Functions that posembed replaces."""
        return tuple(row for row in self.rows if row.patched)

    @property
    def left(self) -> tuple[Row, ...]:
        """Functions that run as before; ``action`` says why."""
        return tuple(row for row in self.rows if not row.patched)

    def __str__(self) -> str:
        table = [("function", "modules", "now", "where")]
        for row in self.rows:
            classes = f"{row.modules} x {', '.join(row.classes)}"
            action = row.action if row.patched else f"left: {row.action}"
            table.append((row.function, classes, action, row.location))
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([*lines, *self.notes])
