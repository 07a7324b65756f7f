"""Tests that tables and large results request huge pages."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import posembed as pe
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

HUGE = Path("/sys/kernel/mm/transparent_hugepage").exists()
pytestmark = [
    pytest.mark.skipif(not HUGE, reason="this system has no transparent huge pages"),
    pytest.mark.usefixtures("fresh_memory"),
]

ROWS, DIM = 16384, 1024  # float32: 64 MiB


def is_advised(tensor: Tensor) -> bool:
    """Whether the system lists the middle of the tensor under memory with the advice."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        begin, end = (int(place, 16) for place in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= middle < end:
            return " hg" in mapping[mapping.index("VmFlags:") :]
    raise AssertionError("the tensor lies nowhere")


def read(folder: Path, **options: object) -> Tensor:
    save_file({"table": torch.zeros(ROWS, DIM)}, folder / "table.safetensors")
    return pe.pretrained.open_vectors(folder / "table.safetensors").table(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: pe.TokenEmbedding(ROWS, DIM).weight,
        lambda _: pe.TokenBag(ROWS, DIM).weight,
        lambda _: pe.LearnedPositionalEmbedding(ROWS, DIM).weight,
        lambda _: pe.cpp.TokenEmbedding(ROWS, DIM).weight,
        lambda _: pe.cpp.LearnedPositionalEmbedding(ROWS, DIM).weight,
        lambda folder: read(folder, dtype=torch.float64),
        lambda _: pe.SinusoidalPositionalEmbedding(DIM).encode(torch.arange(ROWS)),
    ],
    ids=["token", "bag", "learned", "C++ token", "C++ learned", "file", "result"],
)
def test_large_memory_asks_for_them(make: Callable[[Path], Tensor], tmp_path: Path) -> None:
    pe.empty_cache()
    assert is_advised(make(tmp_path))


def test_own_tables_may_ask_for_them() -> None:
    table = torch.empty(ROWS, 2 * DIM)
    pe.prefer_huge_pages(table[5])
    assert is_advised(table)


def test_nothing_else_asks_for_them() -> None:
    pe.prefer_huge_pages(torch.empty(3))
    pe.prefer_huge_pages(torch.empty(ROWS, DIM, device="meta"))
    assert not is_advised(torch.empty(4 * ROWS, DIM))


def test_a_variable_forbids_them() -> None:
    program = (
        "import posembed as pe, test_huge_pages as own\n"
        "print(own.is_advised(pe.TokenEmbedding(own.ROWS, own.DIM).weight))"
    )
    folders = [str(Path(__file__).parent), *map(os.path.abspath, sys.path)]
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "POSEMBED_HUGE_PAGES": "0", "PYTHONPATH": os.pathsep.join(folders)},
    ).stdout
    assert printed == "False\n"
