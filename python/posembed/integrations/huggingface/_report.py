"""The report of a patch, by function."""

from __future__ import annotations

import dataclasses
import html
import os
import sys
from typing import NamedTuple

from posembed import _html

NOTHING = "nothing to replace: no function of the model's code rotates"


def _in_package(location: str) -> str:
    """A file and line without the folder that Python imports the file from, if there is one."""
    folders = [os.path.join(folder, "") for folder in sys.path if folder]
    known = [folder for folder in folders if location.startswith(folder)]
    return location.removeprefix(max(known, key=len, default=""))


class Counter:
    """How often the kernel ran in place of a function, and how often the function itself."""

    __slots__ = ("kernel", "own")

    def __init__(self) -> None:
        self.kernel = self.own = 0


class Calls(NamedTuple):
    """Calls of one function since the patch.

    Args:
        function: Its name.
        location: Its file and line.
        kernel: How often posembed's kernel ran.
        own: How often the model's own code ran, for arguments that posembed does not support.
    """

    function: str
    location: str
    kernel: int
    own: int


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
        rotates: Whether it is a function that rotates, and no bias, input layer or method that only
            looks as if it rotated.
        counter: The calls of all patched models that share the function.
        before: ``counter.kernel`` and ``counter.own`` when the model was patched.
    """

    function: str
    location: str
    classes: tuple[str, ...]
    modules: int
    patched: bool
    action: str
    rotates: bool = True
    counter: Counter = dataclasses.field(default_factory=Counter, compare=False, repr=False)
    before: tuple[int, int] = dataclasses.field(default=(0, 0), compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Report:
    """All functions of a model that rotate or make a bias, and what was done; prints as a table.

    Args:
        rows: One row for each function.
        notes: The installed version of transformers, and those that posembed is tested with.
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

    def calls(self) -> tuple[Calls, ...]:
        """How often the kernel has run since the patch: one entry for each row of ``patched``.

        Models of a family share their functions, so calls of other patched models count too. Calls
        in compiled code and replays of a CUDA graph do not count. Calls on several threads at once
        may be counted as fewer.

        Examples:
            >>> import torch, transformers
            >>> from posembed.integrations.huggingface import patch
            >>> config = transformers.LlamaConfig(
            ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            ...     num_attention_heads=2)
            >>> model = transformers.LlamaForCausalLM(config)
            >>> report = patch(model)
            >>> _ = model(torch.arange(5)[None])
            >>> [(calls.function, calls.kernel, calls.own) for calls in report.calls()]
            [('apply_rotary_pos_emb', 2, 0)]
        """
        return tuple(
            Calls(
                row.function,
                row.location,
                row.counter.kernel - row.before[0],
                row.counter.own - row.before[1],
            )
            for row in self.patched
        )

    def _lines(self) -> list[tuple[str, str, str, str]]:
        """The cells of each row, below a head."""
        lines = [("function", "modules", "now", "where")]
        for row in self.rows:
            classes = f"{row.modules} x {', '.join(row.classes)}"
            action = row.action if row.patched else f"left: {row.action}"
            lines.append((row.function, classes, action, _in_package(row.location)))
        return lines

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        head, *rows = self._lines()
        notes = self.notes if rows else (NOTHING, *self.notes)
        texts = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        return (_html.table(head, rows) if rows else "") + texts

    def __str__(self) -> str:
        if not self.rows:
            return "\n".join([NOTHING, *self.notes])
        table = self._lines()
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([*lines, *self.notes])
