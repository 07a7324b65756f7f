"""Tests how many kernels CUDA calls launch, and that the host reads no value."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from support.halves import CUDA_ON_CPU
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not CUDA_ON_CPU, reason="counted by make test-cuda-on-cpu"),
    pytest.mark.usefixtures("cuda"),
]

call = pe.functional
SPEC = pe.RotarySpec(16)
MLA = pe.RotarySpec(24, rotary_dim=8, rotary_start=16)
IDS = torch.tensor([[3, 1, 3, 7], [2, 3, 0, 5]])
TABLES = (torch.ones(4, 16), torch.zeros(4, 16))
SLOTS = torch.arange(8)


def launches(run: Callable[[], Any]) -> int:
    count = ctypes.CDLL(str(Path(pe.__file__).parent / "lib" / "libposembed.so")).posembed_launches
    count.restype = ctypes.c_int64
    before = count()
    run()
    return int(count() - before)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def embed(width: int = 64, **options: Any) -> Tensor:
    return pe.InputEmbedding(10, width, norm="layer", **options)(IDS)


DIFFERENTIABLE: dict[str, Callable[[], Any]] = {
    "rotary": lambda: call.rotary(tensor(2, 4, 4, 16), tensor(2, 4, 2, 16), spec=SPEC),
    "rotary_tables": lambda: call.rotary_tables(tensor(2, 4, 4, 16), tensor(2, 2, 4, 16), *TABLES),
    "mla_rotary": lambda: call.mla_rotary(tensor(2, 4, 4, 24), tensor(2, 4, 8), spec=MLA),
    "norm_rotary": lambda: call.norm_rotary(
        tensor(2, 4, 4, 16), tensor(2, 4, 2, 16), tensor(16), tensor(16), spec=SPEC
    ),
    "embedding": lambda: call.embedding(IDS, tensor(10, 32)),
    "embedding, rows": lambda: call.embedding(IDS, tensor(10, 32), gradient="rows"),
    "token_bag": lambda: call.token_bag(IDS, tensor(10, 32)),
    "learned_add": lambda: call.learned_add(tensor(2, 4, 32), tensor(9, 32)),
    "sinusoidal": lambda: call.sinusoidal(tensor(2, 4, 32), spec=pe.SinusoidalSpec(32)),
    "alibi_bias": lambda: call.alibi_bias(tensor(4), 6, 6),
    "alibi_softmax": lambda: call.alibi_softmax(tensor(2, 4, 6, 6), tensor(4)),
    "input_embedding": lambda: embed(positions="learned", max_positions=9),
    "input_embedding, sinusoids": lambda: embed(positions="sinusoidal"),
    "input_embedding, wide sinusoids": lambda: embed(4104, positions="sinusoidal"),
    "input_embedding, rows": lambda: embed(positions="sinusoidal", gradient="rows"),
}

IN_PLACE: dict[str, Callable[[], Any]] = {
    "rotary_tables_": lambda: call.rotary_tables_(
        torch.zeros(2, 4, 4, 16), torch.zeros(2, 2, 4, 16), *TABLES
    ),
    "rotary_": lambda: call.rotary_(torch.zeros(2, 4, 4, 16), torch.zeros(2, 4, 2, 16), spec=SPEC),
    "norm_rotary_": lambda: call.norm_rotary_(
        torch.zeros(2, 4, 4, 16),
        torch.zeros(2, 4, 2, 16),
        torch.ones(16),
        torch.ones(16),
        spec=SPEC,
    ),
    "rotary_cache_": lambda: call.rotary_cache_(
        torch.zeros(8, 4, 16),
        *torch.zeros(2, 8, 2, 16),
        *torch.zeros(2, 3, 4, 2, 16),
        SLOTS,
        spec=SPEC,
    ),
    "mla_rotary_cache_": lambda: call.mla_rotary_cache_(
        torch.zeros(8, 4, 24),
        torch.zeros(8, 10),
        torch.zeros(8, 8),
        torch.zeros(3, 4, 18),
        SLOTS,
        spec=MLA,
    ),
    "alibi_add_": lambda: call.alibi_add_(torch.zeros(2, 4, 6, 6), torch.ones(4)),
    "alibi_softmax_": lambda: call.alibi_softmax_(torch.zeros(2, 4, 6, 6), torch.ones(4)),
}


def differentiate(output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def documented() -> dict[str, tuple[str, str, str]]:
    """The guide's table: launches forward and backward, and values that the host reads."""
    guide = Path(__file__).parents[2] / "docs" / "guide" / "kernels.md"
    table = guide.read_text().partition("| operator | forward | backward | values read |")[2]
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d*) ?\| (\d+) \|$", table, re.MULTILINE)
    return {name: (forward, backward, reads) for name, forward, backward, reads in rows}


CALLS = {**DIFFERENTIABLE, **IN_PLACE}
DOCUMENTED = documented()


def test_the_guide_has_every_call() -> None:
    assert list(DOCUMENTED) == list(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_launches(name: str) -> None:
    forward, backward, _ = DOCUMENTED[name]
    outputs: list[Any] = []
    assert launches(lambda: outputs.append(CALLS[name]())) == int(forward)
    if name in DIFFERENTIABLE:
        assert launches(lambda: differentiate(outputs[0])) == int(backward)


def test_sinusoids_of_whole_rows_are_computed_by_the_kernel() -> None:
    """Rows of whole 16-byte vectors for each lane of a warp, positions that sequences share."""
    assert launches(lambda: embed(512, positions="sinusoidal")) == 1
    assert launches(lambda: embed(512, positions="sinusoidal", num_types=2)) == 1


@pytest.mark.parametrize("name", CALLS)
def test_values_read_by_the_host(name: str) -> None:
    """Reading a value waits for the device and prevents capture by a CUDA graph."""
    with torch.profiler.profile() as profile:
        output = CALLS[name]()
        if name in DIFFERENTIABLE:
            differentiate(output)
    called = [event.name for event in profile.events()]
    assert any(one.startswith("posembed::") for one in called)
    waits = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount")
    found = [one for one in called if one in {f"aten::{wait}" for wait in waits}]
    assert len(found) == int(DOCUMENTED[name][2])
