"""Runs every module in the runtimes that programs are exported to, and prints a table.

PYTHONPATH=python python scripts/export_matrix.py > benchmarks/results/exports.md

A cell is the largest difference from the module itself, as a part of its largest component, with
another batch and length than those of the export. Needs onnxscript, onnxruntime and executorch
(1.2 for torch 2.11), which is in no file of requirements: it brings packages of its own.
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import posembed as pe
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/python"))
from support.case import as_tuple
from support.modules import MODULES, Row, ids, packed

Results = list[Tensor]


def float8() -> nn.Module:
    """A table of bytes."""
    rows = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    return pe.QuantizedTable(*pe.functional.quantize_rows(rows, "float8"))


ROWS = {
    **MODULES,
    "bag-max": Row(lambda: pe.TokenBag(9, 8, "max"), ids),
    "bag-max-offsets": Row(lambda: pe.TokenBag(9, 8, "max", include_last_offset=True), packed),
    "quantized-float8": Row(float8, ids),
}


def in_onnx_runtime(program: ExportedProgram, given: Any, target: str | None) -> Results:
    """Results of an ONNX file."""
    file = io.BytesIO()
    decomposed = pe.decompose(program, target=target)
    opset = 20 if target is None else 23
    torch.onnx.export(decomposed, dynamo=True, verbose=False, opset_version=opset).save(file)
    session = import_module("onnxruntime").InferenceSession(file.getvalue())
    names = [each.name for each in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, given, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, feed)]


def in_executorch(program: ExportedProgram, given: Any) -> Results:
    """Results of ExecuTorch's portable kernels."""
    lowered = import_module("executorch.exir").to_edge(pe.decompose(program)).to_executorch()
    runtime = import_module("executorch.runtime").Runtime.get()
    return list(runtime.load_program(lowered.buffer).load_method("forward").execute(given))


def in_aot_inductor(program: ExportedProgram, given: Any) -> Results:
    """Results of a compiled package."""
    inductor = torch._inductor
    with tempfile.TemporaryDirectory() as folder:
        path = inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return list(as_tuple(inductor.aoti_load_package(path)(*given)))


Run = Callable[[nn.Module, ExportedProgram, Any, Any], Results]
RUNTIMES: dict[str, Run] = {
    "ONNX Runtime, opset 20": lambda _, program, given, others: in_onnx_runtime(
        program, others, None
    ),
    "ONNX Runtime, opset 23": lambda _, program, given, others: in_onnx_runtime(
        program, others, "onnx"
    ),
    "ExecuTorch": lambda _, program, given, others: in_executorch(program, others),
    "AOTInductor": lambda _, program, given, others: in_aot_inductor(program, others),
    "torch.jit.trace": lambda module, _, given, others: list(
        as_tuple(torch.jit.trace(module, given)(*others))
    ),
}


def exported(module: nn.Module, given: Any, others: Any) -> ExportedProgram:
    """A program for a batch and a length up to 64."""
    hint = torch.export.Dim.AUTO(min=2, max=64)  # type: ignore[operator]
    dynamic = tuple(
        {d: hint for d in range(x.dim()) if x.shape[d] != other.shape[d]}
        for x, other in zip(given, others, strict=True)
    )
    return torch.export.export(module, given, dynamic_shapes=dynamic)


def cell(run: Callable[[], Results], expected: Results) -> str:
    """The largest difference, or the kind of error, which the log names whole."""
    try:
        with warnings.catch_warnings(action="ignore"):
            found = run()
        pairs = list(zip(found, expected, strict=True))
        errors = [((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in pairs]
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return "no"
    return "equal" if max(errors) == 0 else f"{max(errors):.0e}"


def line(name: str, row: Row, runtimes: list[str]) -> str:
    """A row of the table."""
    torch.manual_seed(0)
    module, given, others = row.make().eval(), row.inputs(3, 7), row.inputs(5, 11)
    expected = [x.detach() for x in as_tuple(module(*others))]
    program = exported(module, given, others)
    cells = []
    for runtime in runtimes:
        print(name, runtime, file=sys.stderr, flush=True)
        cells.append(
            cell(functools.partial(RUNTIMES[runtime], module, program, given, others), expected)
        )
    return " | ".join((f"| `{name}`", *cells)) + " |"


def main() -> None:
    """Prints the table; what failed and why goes to the standard error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="rows; default: all")
    parser.add_argument("--runtime", action="append", help="default: all")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    runtimes = options.runtime or list(RUNTIMES)
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("onnxruntime", "executorch"))
    print("# Modules in other runtimes\n")
    print(f"torch {torch.__version__.split('+')[0]}, {versions}, on a CPU.\n")
    print("| module | " + " | ".join(runtimes) + " |\n|---|" + "--:|" * len(runtimes))
    with torch.no_grad():
        for name in options.names or ROWS:
            print(line(name, ROWS[name], runtimes), flush=True)


if __name__ == "__main__":
    main()
