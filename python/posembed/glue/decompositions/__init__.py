"""posembed's operators in terms of PyTorch's own, for programs that run without posembed.

A runtime such as ONNX Runtime, ExecuTorch or Core ML knows only the operators of torch.aten. Each
family's file has functions with the names and arguments of its operators.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from posembed.glue.decompositions.shared import TARGET
from posembed.glue.decompositions.simplification import simplify


@functools.cache
def replacements() -> dict[str, Callable[..., Any]]:
    """The functions of all families that replace an operator, by its name."""
    found: dict[str, Callable[..., Any]] = {}
    for file in pkgutil.iter_modules(__path__, __name__ + "."):
        module = importlib.import_module(file.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == file.name and hasattr(torch.ops.posembed, name):
                found[name] = function
    return found


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Functions of PyTorch's own operators, by the posembed operator that they replace."""
    # Composite operators decompose by themselves.
    found: dict[Any, Callable[..., Any]] = {
        operator: function
        for operator, function in torch.export.default_decompositions().items()  # type: ignore[no-untyped-call]
        if operator.namespace == "posembed"
    }
    for name, function in replacements().items():
        operator = getattr(torch.ops.posembed, name).default
        found[operator] = with_every_argument(operator, function)
    return found


def with_every_argument(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that receives all of an operator's arguments in order, with defaults."""

    def call(*args: Any, **named: Any) -> Any:
        others = operator._schema.arguments[len(args) :]
        return function(*args, *(named.get(a.name, a.default_value) for a in others))

    return call


def decompose(program: ExportedProgram, *, target: str | None = None) -> ExportedProgram:
    """Replaces posembed's operators in a program with PyTorch's own.

    The result runs without posembed: pass it to ``torch.onnx.export``, or lower it with ExecuTorch
    or Core ML. Results differ from posembed's by rounding errors. Exact angles need no float64:
    their cosines and sines are products of rows of float32 tables, for positions below 2^31. Steps
    that depend on no input become constants, and equal steps are shared.

    Args:
        program: The result of ``torch.export.export`` for a model in eval mode.
        target: None: for any runtime. ``"onnx"``: rotations call
            ``torch.onnx.ops.rotary_embedding``, which is one node; export the result with
            ``opset_version=23`` or higher.

    Raises:
        TypeError: ``program`` is of another type.
        ValueError: ``target`` is unknown; or the program has a posembed operator that writes in
            place, such as those for paged caches, computes a gradient, or draws a dropout mask. The
            message names it.

    Examples:
        >>> import torch, posembed as pe
        >>> rope = pe.RotaryEmbedding(64)
        >>> query, key = torch.randn(1, 5, 4, 64), torch.randn(1, 5, 4, 64)
        >>> program = pe.decompose(torch.export.export(rope, (query, key)))
        >>> any("posembed" in str(node.target) for node in program.graph.nodes)
        False
    """
    if not isinstance(program, ExportedProgram):
        remedy = "; torch.export.export(model, inputs)" * isinstance(program, torch.nn.Module)
        kind = type(program).__name__
        raise TypeError(f"program: expected an ExportedProgram, got {kind}{remedy}")
    if target not in (None, "onnx"):
        raise ValueError(f"target: expected None or 'onnx', got {target!r}")
    before = TARGET.set(target)
    try:
        with torch.no_grad():
            result: ExportedProgram = program.run_decompositions(decompositions())
            simplify(result)
    finally:
        TARGET.reset(before)
    remaining = sorted(
        {
            name
            for node in result.graph.nodes
            for name in (str(node.target), *map(str, node.args))
            if name.startswith("posembed.")
        }
    )
    if remaining:
        raise ValueError(
            f"decompose: expected operators that PyTorch's own can replace, got {remaining}"
        )
    return result
