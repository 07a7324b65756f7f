"""Patches a loaded model by changing its modules' classes; weights and hooks do not change."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from posembed.integrations.huggingface import _exact, _shadow, _tables
from posembed.integrations.huggingface._recognition import refusal
from posembed.integrations.huggingface._report import Counter, Report, Row
from posembed.integrations.huggingface._rotation import rotation_of

BIAS = "it makes one row for each head, too little to gain anything"
INLINE = "it rotates in the code of a method, and posembed replaces functions"
TESTED = ("5.23", "5.24")  # versions of transformers that the tests run with
VERSIONS = "transformers {installed} (posembed is tested with {tested})"
UNREACHED = "tables stay: they are not made by a module from positions alone"
SPECIFICATIONS = "posembed_specifications"
ADDED = (SPECIFICATIONS, *_tables.ADDED)  # to modules
TABLE = "one kernel; equal bits"


def patch(
    model: nn.Module,
    *,
    numerics: Literal["model", "exact"] = "model",
    tables: _tables.Where = "stay",
) -> Report:
    """Makes posembed rotate in a loaded model of transformers, diffusers, timm, or your own.

    Functions that rotate query and key are recognised by what they compute, so posembed does not
    need to know their names or the model. Each module that calls one, and each object that a module
    holds for it, becomes an instance of a subclass, in which ``functional.rotary_tables`` replaces
    the function. Weights, ``state_dict``,
    hooks, ``isinstance`` and other models of the same family do not change. Patched models can be
    compiled, copied and pickled. Patching a second time has no effect.

    Results are bitwise identical to those of the model's own code in eager mode. Complex products
    (Llama 4, DeepSeek-V2) may differ in the last bit, because PyTorch's depend on the memory
    layout.

    With ``numerics="exact"`` there are no tables: rotary modules pass positions to rotations, and
    the kernel computes exact angles from the specification in the model's configuration. Results
    then differ from the model's by the rounding of its float32 angles, which grows with the
    position. This is done only if the specification is verified to rotate like the module, and if
    the model's code passes the tables to rotations only; otherwise the tables stay, and the report
    says why. Integer positions below -1 raise, and -1 leaves a token unchanged.

    Tables whose rows are scaled (Gemma 3n, 4) or hashed from n-grams (qwen4_exp) are looked up in
    one kernel, with equal bits. With ``tables="host"`` those that are no input table of the model
    move to pinned memory of the host, frozen, where the GPU's kernels read their rows: a table may
    then be larger than the GPU's memory. ``unpatch`` moves them back.

    Other threads may run the model meanwhile: each of their calls gives the results of one of the
    numerics, or layer by layer of both.

    Args:
        model: The model; its modules change in place.
        numerics: "model" for results bitwise identical to the model's own code, "exact" for exact
            angles.
        tables: "stay", or "host" to move tables of n-grams and of layers to the host's memory.

    Returns:
        A report of what was replaced and what was not, and why.

    Raises:
        TypeError: The model is not an ``nn.Module``.
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if numerics not in ("model", "exact"):
        raise ValueError(f"numerics: expected 'model' or 'exact', got {numerics!r}")
    if tables not in ("stay", "host"):
        raise ValueError(f"tables: expected 'stay' or 'host', got {tables!r}")
    parts = list(_parts(model))
    classes = {type(part): None for part in parts}
    patched = {cls: _shadow.shadow_class(_shadow.original_of(cls)) for cls in classes}
    rotations: dict[int, Any] = {}
    for shadow in _shadow.SHADOWS.values():
        for rotation in shadow.rotations.values():
            rotations.setdefault(id(rotation.original), rotation.placed())
    # The model may be running: what a class needs is there before a module becomes its instance,
    # and rotations take positions before rotary modules pass them.
    for module in parts:
        _record_as(module, patched[type(module)])
        _become(module, patched[type(module)])
        for name, value in list(vars(module).items()):
            function = value.func if isinstance(value, functools.partial) else value
            if id(function) in rotations:  # kernels put functions on modules
                vars(module)[name] = _with(value, rotations[id(function)])
        for added in ADDED:
            vars(module).pop(added, None)
    decisions = _exact.decide(model) if numerics == "exact" else None
    for decision in decisions or ():
        if decision.texts:
            cls = _shadow.EXACT[_shadow.original_of(type(decision.module))]
            vars(decision.module)[SPECIFICATIONS] = decision.texts
            _become(decision.module, cls)
    report = _report(model, decisions)
    return Report((*report.rows, *_placed(model, tables)), report.notes)


def _parts(model: nn.Module) -> Iterator[Any]:
    """Modules, and objects of other classes that they hold."""
    seen = set()
    for module in model.modules():
        yield module
        for value in _shadow.held(module):
            if id(value) not in seen:
                seen.add(id(value))
                yield value


def _placed(model: nn.Module, where: _tables.Where) -> list[Row]:
    """Puts tables on the kernels, and says which."""
    rows = []
    for cls, count, reason in _tables.place(model, where, _become):
        names, location = (cls.__name__,), _location(cls.forward)
        row = Row("forward", location, names, count, not reason, reason or TABLE, rotates=False)
        rows.append(_counted(row, _tables.class_of(cls).posembed_counter))
    return rows


def _counted(row: Row, counter: Counter) -> Row:
    """The row of a function whose calls are counted from now on."""
    return dataclasses.replace(row, counter=counter, before=(counter.kernel, counter.own))


def unpatch(model: nn.Module) -> None:
    """Restores a patched model's own code; other models do not change.

    Other threads may run the model meanwhile, unless it has exact angles: a call that has begun
    would give positions to the model's own functions, which expect tables, and raise
    ``AttributeError``. If so, ``patch(model)`` first, and ``unpatch`` when those calls have ended.

    Args:
        model: The model; its modules change in place.

    Raises:
        TypeError: The model is not an ``nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules = list(_parts(model))
    # The reverse of patch: rotary modules make tables again before the model's functions get them.
    for module in sorted(modules, key=lambda x: SPECIFICATIONS not in vars(x)):
        if isinstance(module, nn.Module):
            _tables.release(module)
        _become(module, _shadow.original_of(type(module)))
        for added in ADDED:
            vars(module).pop(added, None)
        for name, value in list(vars(module).items()):
            rotation = rotation_of(value.func if isinstance(value, functools.partial) else value)
            if rotation is not None:
                vars(module)[name] = _with(value, rotation.original)


def _with(value: Any, function: Any) -> Any:
    """Another function in place of one, or of that of a partial."""
    if not isinstance(value, functools.partial):
        return function
    return functools.partial(function, *value.args, **value.keywords)


def _record_as(module: nn.Module, cls: type) -> None:
    """Registers a module's additional outputs, which transformers looks up by the class's name."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    outputs: Any = getattr(capturing, "_CAN_RECORD_REGISTRY", {})
    recorded = outputs.get(module)
    if recorded:
        dict.__setitem__(outputs, str(cls), recorded)


def _become(module: nn.Module, cls: type) -> None:
    """Changes a module's class, and the bound methods that hooks have stored on the module."""
    before = type(module)
    module.__class__ = cls
    for name, value in list(vars(module).items()):
        if isinstance(value, types.MethodType) and value.__self__ is module:
            method = value.__func__
            if getattr(before, method.__name__, None) is method:  # accelerate's _old_forward
                vars(module)[name] = getattr(cls, method.__name__).__get__(module)


def _report(model: nn.Module, decisions: list[_exact.Decision] | None) -> Report:
    modules = [_shadow.original_of(type(part)) for part in _parts(model)]
    counts = collections.Counter(modules)
    users: dict[tuple[str, str], list[type]] = {}
    for cls in counts:
        for found in sorted(_functions_of(cls)):
            users.setdefault(found, []).append(cls)
    rows = []
    angles = None if decisions is None else _angles(decisions)
    for (module, name), classes in users.items():
        shadow = _shadow.SHADOWS[module]
        row = _row(shadow, name, classes, sum(counts[cls] for cls in classes))
        if angles is not None and row.patched:
            where = angles.get((module, name), [UNREACHED])
            row = dataclasses.replace(row, action="; ".join([row.action, *where]))
        rows.append(row)
    notes = []
    if any(cls.__module__.startswith("transformers.") for cls in counts):
        version = importlib.metadata.version("transformers")
        notes.append(VERSIONS.format(installed=version, tested=" and ".join(TESTED)))
    return Report(tuple(rows), tuple(notes))


def _angles(decisions: list[_exact.Decision]) -> dict[tuple[str, str], list[str]]:
    """What each function receives with exact numerics: angles, or tables and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for decision in decisions:
        maker = type(decision.module).__name__
        classes = {
            _shadow.original_of(type(m)) for owner in decision.owners for m in owner.modules()
        }
        for module, name in sorted(set().union(*map(_functions_of, classes))):
            rotation = _shadow.SHADOWS[module].rotations.get(name)
            if rotation is not None and rotation in decision.rotations:
                text = "exact angles"
            elif decision.reason:
                text = f"tables of {maker} stay: {decision.reason}"
            else:
                continue
            texts = found.setdefault((module, name), [])
            if text not in texts:
                texts.append(text)
    return found


def _row(shadow: _shadow.Shadow, name: str, classes: list[type], modules: int) -> Row:
    rotation = shadow.rotations.get(name)
    action = str(rotation) if rotation else refusal(shadow.function(name))
    action = BIAS if name in shadow.biases else INLINE if name in shadow.inline else action
    names = tuple(cls.__name__ for cls in classes)
    location = _location(shadow.function(name))
    rotates = name not in shadow.biases and name not in shadow.inline
    row = Row(name, location, names, modules, rotation is not None, action, rotates)
    return _counted(row, rotation.counter) if rotation else row


def _location(function: Any) -> str:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(type(function))


def _functions_of(cls: type) -> set[tuple[str, str]]:
    """Functions in the report that a class reaches: their module and name."""
    found: set[tuple[str, str]] = set()
    overridden: set[str] = set()
    for base in cls.__mro__:
        shadow = _shadow.SHADOWS.get(base.__module__)
        if shadow is None:
            continue
        named = _shadow.is_named(base)  # otherwise its own methods stay
        for key, value in vars(base).items() if named else ():
            name = f"{base.__name__}.{key}"
            if shadow.function(name) is not None:
                if key not in overridden:
                    found.add((base.__module__, name))
            else:
                found |= _reached(value)
        overridden.update(vars(base))
    return found


def _reached(value: Any) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    pending, seen = list(_shadow.inner(value)), set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        shadow = _shadow.SHADOWS.get(str(function.__globals__.get("__name__", "")))
        used = list(_globals_used(function))
        for module, name in shadow.uses.get(function.__code__, ()) if shadow else ():
            used.append((module, name, vars(_shadow.SHADOWS[module].original).get(name)))
        for module, name, target in used:
            if _shadow.SHADOWS[module].function(name) is not None:
                found.add((module, name))
            else:
                pending.extend(_shadow.inner(target))
    return found


def _globals_used(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Functions that a function calls by name: their module, name, and the function."""
    module = str(function.__globals__.get("__name__", ""))
    if module in _shadow.SHADOWS:
        for name in _shadow.names_in(function.__code__):
            target = function.__globals__.get(name)
            known = _shadow.SHADOWS[module].function(name) is not None
            if known or isinstance(target, types.FunctionType | nn.Module):
                yield module, name, target
