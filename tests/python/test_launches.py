"""Tests how many kernels CUDA calls launch, and that the host reads no value."""

import ctypes
import importlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from support.calls import functions
from support.halves import CUDA_ON_CPU
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not CUDA_ON_CPU, reason="counted by make test-cuda-on-cpu"),
    pytest.mark.usefixtures("cuda"),
]

ROOT = Path(__file__).parents[2]
IDS = torch.tensor([[3, 1, 3, 7], [2, 3, 0, 5]])


LIBRARY = Path(pe.__file__).parent / "lib" / "libposembed.so"


def launches(run: Callable[[], Any]) -> int:
    count = ctypes.CDLL(str(LIBRARY)).posembed_launches
    count.restype = ctypes.c_int64
    before = count()
    run()
    return int(count() - before)


def launched_kernels(module: Any) -> set[str]:
    """The kernels that were launched in this process, by the names of scripts/machine_code.py."""
    library = ctypes.CDLL(str(LIBRARY))
    found = (ctypes.c_void_p * 5000)()
    count = library.posembed_kernels(found, ctypes.c_int64(len(found)))
    symbols = subprocess.run(("nm", "--defined-only", LIBRARY), capture_output=True, text=True)
    rows = [line.split() for line in symbols.stdout.splitlines()]
    places = {name: int(place, 16) for place, _, name in rows}
    known = ctypes.cast(library.posembed_launches, ctypes.c_void_p).value
    assert known is not None
    begin = known - places["posembed_launches"]
    names = {place: name for name, place in places.items()}
    launched = [names[place - begin] for place in found[:count] if place is not None]
    return set(module.demangled(launched))


def embed(width: int = 64, **options: Any) -> Tensor:
    return pe.InputEmbedding(10, width, norm="layer", **options)(IDS)


OTHERS: dict[str, Callable[[], Any]] = {
    "token_bag": lambda: pe.functional.token_bag(IDS, torch.randn(10, 32).requires_grad_()),
    "input_embedding": lambda: embed(positions="learned", max_positions=9),
    "input_embedding, sinusoids": lambda: embed(positions="sinusoidal"),
    "input_embedding, wide sinusoids": lambda: embed(4104, positions="sinusoidal"),
    "input_embedding, rows": lambda: embed(positions="sinusoidal", gradient="rows"),
}
FIXED = ("cos", "sin")  # need no gradient


def call_of(name: str) -> Callable[[], Any]:
    """A call with gradients where it may have them, without the positions that a call may have."""
    if name in OTHERS:
        return OTHERS[name]
    function, _, gradient = name.partition(", ")
    left_out = "positions", "padding_idx", "attention_mask", "cu_seqlens", "scale"
    given = {k: v for k, v in functions(2, 4, 4)[function].items() if not k.endswith(left_out)}
    if not function.endswith("_"):
        learned = {k for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()}
        given |= {k: given[k].requires_grad_() for k in learned if k not in FIXED}
    given |= {"gradient": gradient} if gradient else {}
    return lambda: getattr(pe.functional, function)(**given)


def differentiate(output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def documented() -> dict[str, tuple[str, str, str]]:
    """The guide's table: launches forward and backward, and values that the host reads."""
    guide = ROOT / "docs" / "guide" / "kernels.md"
    table = guide.read_text().partition("| operator | forward | backward | values read |")[2]
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d*) ?\| (\d+) \|$", table, re.MULTILINE)
    return {name: (forward, backward, reads) for name, forward, backward, reads in rows}


DOCUMENTED = documented()


def test_the_guide_has_every_function_that_writes() -> None:
    assert len(DOCUMENTED) >= 22
    assert {name for name in functions() if name.endswith("_")} - {"rerotate_"} <= set(DOCUMENTED)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_launches(name: str) -> None:
    forward, backward, _ = DOCUMENTED[name]
    outputs: list[Any] = []
    call = call_of(name)
    assert launches(lambda: outputs.append(call())) == int(forward)
    if backward:
        assert launches(lambda: differentiate(outputs[0])) == int(backward)


def test_models_widths_launch_the_kernels_whose_machine_code_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/gpu/hot.py, which the sweep, captures and sanitizers run on a device."""
    for folder in ("tests/gpu", "scripts"):
        monkeypatch.syspath_prepend(ROOT / folder)
    hot, machine_code = importlib.import_module("hot"), importlib.import_module("machine_code")
    for case in hot.CASES:
        for dtype in case.dtypes:
            sample = case.sample(hot.BATCH, hot.SEQ, "cpu", dtype)
            outputs = case(sample if case.mutates else sample.requires_grad())
            differentiable = [x for x in outputs if x.requires_grad]
            torch.autograd.backward(differentiable, [torch.ones_like(x) for x in differentiable])
    watched = set(json.loads((ROOT / "scripts" / "machine_code.json").read_text()))
    assert watched - launched_kernels(machine_code) == set()


def test_sinusoids_of_whole_rows_are_computed_by_the_kernel() -> None:
    """Rows of whole 16-byte vectors for each lane of a warp, positions that sequences share."""
    assert launches(lambda: embed(512, positions="sinusoidal")) == 1
    assert launches(lambda: embed(512, positions="sinusoidal", num_types=2)) == 1


@pytest.mark.parametrize("name", DOCUMENTED)
def test_values_read_by_the_host(name: str) -> None:
    """Reading a value waits for the device and prevents capture by a CUDA graph."""
    call = call_of(name)
    with torch.profiler.profile() as profile:
        output = call()
        if DOCUMENTED[name][1]:
            differentiate(output)
    called = [event.name for event in profile.events()]
    assert any(one.startswith("posembed::") for one in called)
    waits = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount")
    found = [one for one in called if one in {f"aten::{wait}" for wait in waits}]
    assert len(found) == int(DOCUMENTED[name][2])
