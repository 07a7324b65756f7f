"""Patches a loaded model, and reports what was done, by function."""

from __future__ import annotations

import collections
import dataclasses
import html
import importlib.metadata
import os
import statistics
import sys
import textwrap
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from posembed.glue import notebooks
from posembed.glue.validation import one_of
from posembed.integrations.huggingface import _door, _instances
from posembed.integrations.huggingface._rotation import ATTACHED, Calls, Rotation

NOTHING = "nothing to replace: no function of the model's code rotates"
TESTED = {"transformers": ("5.23", "5.24"), "diffusers": ("0.42",), "timm": ("1.0",)}
PROGRAM = "a traced or exported program, which no longer runs the model's code"
TABLE = "one kernel; equal bits"
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Row:
    """One function of the model's code.

    Args:
        function: Its name.
        location: Its file and line.
        classes: The model's classes that call it.
        modules: How many modules of the model have one of these classes.
        patched: Whether posembed replaces it.
        reason: Why nothing changed, or what runs in place of a table.
        rotates: Whether it is no bias, and no method that only looks as if it rotated.
        exact: Whether modules keep positions beside the tables, for exact angles.
    """

    function: str
    location: str
    classes: tuple[str, ...]
    modules: int
    patched: bool
    reason: str
    rotates: bool = True
    exact: bool = False
    _rotation: Rotation | None = dataclasses.field(default=None, compare=False, repr=False)
    _calls: Calls = dataclasses.field(default_factory=Calls, compare=False, repr=False)
    _before: Calls = dataclasses.field(default_factory=Calls, compare=False, repr=False)

    @property
    def action(self) -> str:
        """What runs now, in the forms that calls have used if there were any; or why not."""
        if self._rotation is None:
            return self.reason
        calls = self.calls()
        exact = self.exact and (calls.exact > 0 or calls.kernel + calls.own == 0)
        return self._rotation.forms() + ("; exact angles" if exact else "")

    @property
    def state(self) -> str:
        """What the comparisons with the model's own code have shown, or ''."""
        if self._calls.difference:
            return f"the model's own code runs for some calls: {self._calls.difference}"
        compared = self._rotation is None or self._rotation.proofs or not self._calls.kernel
        return "" if compared else "not proved yet"

    def calls(self) -> Calls:
        """Calls since the patch."""
        now, then = self._calls, self._before
        counts = now.kernel - then.kernel, now.own - then.own, now.exact - then.exact
        return Calls(self.function, self.location, *counts, now.difference)


@dataclasses.dataclass(frozen=True)
class Report:
    """All functions of a model that rotate or make a bias, and what was done; prints as a list.

    A report without rows is false.

    Args:
        rows: One row for each function.
        notes: The installed versions of libraries, and those that posembed is tested with.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

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

        Models of a family share their functions, so calls of other models count too. Calls in
        compiled code and replays of a CUDA graph do not count. Calls on several threads at once may
        be counted as fewer.

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
        return tuple(row.calls() for row in self.patched)

    def benchmark(
        self, model: Any, *inputs: Any, rounds: int = 5, **named: Any
    ) -> dict[str, float]:
        """Times calls of a patched model with posembed's kernels and with its own code, in turn.

        Meanwhile other threads' calls of the same functions alternate, too. Compiled models are
        timed after both have been compiled.

        Args:
            model: The model.
            inputs: Its arguments.
            rounds: How often each is timed.
            named: Its named arguments.

        Returns:
            The median seconds of a call, by "kernel" and "own".

        Examples:
            >>> import torch
            >>> from posembed.integrations.huggingface import patch
            >>> model = torch.nn.Linear(2, 2)
            >>> times = patch(model).benchmark(model, torch.ones(1, 2))
            >>> times["kernel"] > 0
            True
        """

        def seconds() -> float:
            begin = time.perf_counter()
            with torch.no_grad():
                model(*inputs, **named)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        times: dict[str, list[float]] = {"kernel": [], "own": []}
        for _ in range(rounds + 1):
            times["kernel"].append(seconds())
            with _door.own_code():
                times["own"].append(seconds())
        return {which: statistics.median(x[1:]) for which, x in times.items()}

    def _lines(self) -> Iterator[tuple[str, str, str]]:
        """What each row says: the function, what runs now, and where it stands."""
        for row in self.rows:
            calls, text = row.calls(), row.action if row.patched else f"left: {row.action}"
            total = calls.kernel + calls.own
            if row.patched:
                text += f"; {calls.kernel} of {total} calls" if total else "; 0 of your calls"
            if row.state:
                text += f"; {row.state}"
            folders = [os.path.join(folder, "") for folder in sys.path if folder]
            known = [folder for folder in folders if row.location.startswith(folder)]
            where = row.location.removeprefix(max(known, key=len, default=""))
            yield row.function, text, f"{row.modules} x {', '.join(row.classes)}, {where}"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        rows, notes = list(self._lines()), self.notes if self.rows else (NOTHING, *self.notes)
        texts = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        return (notebooks.table(("function", "now", "where"), rows) if rows else "") + texts

    def __str__(self) -> str:
        lines: list[str] = [] if self.rows else [NOTHING]
        for function, text, where in self._lines():
            lines += textwrap.wrap(f"{function}: {text}", WIDTH, subsequent_indent="    ")
            lines += textwrap.wrap(where, WIDTH, initial_indent="    ", subsequent_indent="    ")
        return "\n".join([*lines, *self.notes])


def patch(
    model: Any, *, numerics: Literal["model", "exact"] = "model", tables: _instances.Where = "stay"
) -> Report:
    """Makes posembed rotate in a loaded model of transformers, diffusers, timm, or your own.

    Functions that rotate query and key are recognised by what they compute. Each gets other code,
    which calls the kernel; the function objects stay the same, and so do weights, ``state_dict``,
    hooks and classes. The whole process is affected: other models of the family run the kernel too,
    with the same bits, until ``unpatch`` of the last patched one. Patched models can be compiled
    and copied; a model that was compiled before is compiled again by itself. A pickled model is not
    patched: patch it again in another process. Patching a second time has no effect.

    Results are bitwise identical to those of the model's own code in eager mode: the first call of
    each kind (dtypes, widths, heads, layout, gradients, autocast) runs that code too and compares.
    If bits differ, the model's code stays for such calls, and the report says where. Complex
    products (Llama 4, DeepSeek-V2) may differ in the last bit, because PyTorch's depend on the
    memory layout.

    With ``numerics="exact"`` the model's rotary modules keep the positions with the tables of
    cosines and sines that they compute. A rotation that gets these tables unchanged computes exact
    angles from the specification in the model's configuration. Results then differ from the model's
    by the rounding of its float32 angles, which grows with the position. Other rotations, compiled
    code and inference mode use the tables. ``report.calls()`` counts both. Integer positions below
    -1 raise, and -1 leaves a token unchanged.

    Tables whose rows are scaled (Gemma 3n, 4) or hashed from n-grams (qwen4_exp) are looked up in
    one kernel, with bitwise identical results. With ``tables="host"``, all but input tables move to
    pinned memory of the host, frozen, where the GPU's kernels read their rows: a table may then be
    larger than the GPU's memory. ``unpatch`` moves them back.

    Other threads may run the model meanwhile.

    Args:
        model: The model, or a pipeline whose components are models.
        numerics: "model" for results bitwise identical to the model's own code, "exact" for exact
            angles.
        tables: "stay", or "host" to move tables of n-grams and of layers to the host's memory.

    Returns:
        A report of what was replaced and what was not, and why.

    Raises:
        TypeError: The model is neither an ``nn.Module`` nor a pipeline.
        ValueError: ``numerics`` or ``tables`` is unknown, or a table cannot be pinned.

    Examples:
        >>> import transformers
        >>> from posembed.integrations.huggingface import patch, unpatch
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        ...     num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> report = patch(model)
        >>> [(row.function, row.modules, row.action) for row in report.patched]
        [('apply_rotary_pos_emb', 2, 'half-split')]
        >>> patch(model, numerics="exact").patched[0].action
        'half-split; exact angles'
        >>> unpatch(model)
    """
    models = _models(model)
    one_of("numerics", numerics, "model", "exact")
    one_of("tables", tables, "stay", "host")
    parts = [part for one in models for part in _door.parts_of(one)]
    counts = collections.Counter(_instances.original_of(type(part)) for part in parts)
    users: dict[_door.Place, tuple[Rotation | str, dict[type, None]]] = {}
    reached: set[type] = set()
    for part in parts:
        cls = _instances.original_of(type(part))
        held = any(isinstance(x, types.FunctionType) for x in vars(part).values())
        if cls not in reached or held:
            reached.add(cls)
            for place, found in _door.reach(part).items():
                users.setdefault(place, (found, {}))[1][cls] = None
    others = collections.Counter[Any]()
    for one in models:
        for place, (found, _) in users.items():
            if isinstance(found, Rotation):
                _door.swap(place, found, one)
        others.update(_instances.place(one, tables, numerics == "exact"))
    exact = any(module in ATTACHED for one in models for module in one.modules())
    programs = torch.jit.ScriptModule | torch.fx.GraphModule
    others |= {(cls, PROGRAM): n for cls, n in counts.items() if issubclass(cls, programs)}
    rows = []
    for place, (found, classes) in sorted(users.items(), key=lambda x: x[0].title[0]):
        count = sum(counts[cls] for cls in classes)
        rows.append(_row(place.title, classes, count, found, found not in _door.LOOKS, exact))
    for (cls, reason), count in others.items():
        calls = None if reason else _instances.class_of(cls).posembed_calls
        where = repr(cls) if reason == PROGRAM else _door.Place(cls.forward).title[1]
        rows.append(_row(("forward", where), [cls], count, reason or TABLE, False, calls=calls))
    roots, notes = {cls.__module__.partition(".")[0] for cls in counts}, []
    for library in sorted(TESTED.keys() & roots):
        version, tested = importlib.metadata.version(library), " and ".join(TESTED[library])
        notes.append(f"{library} {version} (posembed is tested with {tested})")
    return Report(tuple(rows), tuple(notes))


def _row(
    title: tuple[str, str],
    classes: Iterable[type],
    count: int,
    found: Rotation | str,
    rotates: bool,
    exact: bool = False,
    calls: Calls | None = None,
) -> Row:
    """The row of a rotation, of a table that has calls, or of what stays for a reason."""
    rotation = found if isinstance(found, Rotation) else None
    live = calls if rotation is None else rotation.calls
    names, reason = tuple(cls.__name__ for cls in classes), "" if rotation else str(found)
    patched, exact, live = live is not None, exact and rotation is not None, live or Calls()
    before = dataclasses.replace(live)
    return Row(*title, names, count, patched, reason, rotates, exact, rotation, live, before)


def unpatch(model: Any) -> None:
    """Ends a patch: functions that no other patched model uses have the models' own code again.

    Other threads may run the model meanwhile.

    Args:
        model: The model, or the pipeline.

    Raises:
        TypeError: The model is neither an ``nn.Module`` nor a pipeline.
    """
    for one in _models(model):
        for module in one.modules():
            _instances.restore(module)
        _door.restore(one)


def _models(model: Any) -> list[nn.Module]:
    """The models of a pipeline, or the model itself."""
    if isinstance(model, nn.Module):
        return [model]
    held = getattr(model, "components", None)
    values = held.values() if isinstance(held, dict) else [getattr(model, "model", None)]
    found = [x for x in values if isinstance(x, nn.Module)]
    if not found:
        expected = "a torch.nn.Module or a pipeline of them"
        raise TypeError(f"model: expected {expected}, got {type(model).__name__}")
    return found
