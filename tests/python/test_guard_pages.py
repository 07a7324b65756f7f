"""Operators beside pages that nobody may touch, with every instruction set."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import posembed as pe
import pytest
from support.build_folder import BUILD

HERE = Path(__file__).parent
LIBRARY = BUILD / "tests" / "cpp" / "libguard_pages.so"
STEP = 1 if os.environ.get("POSEMBED_LONG") == "1" else 5

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="make build-tests builds the library")


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, **variables},
        timeout=600,
    )


@pytest.mark.parametrize("instruction_set", pe.build_info()["instruction_sets"])
def test_operators_touch_nothing_beside_their_tensors(instruction_set: str) -> None:
    """`make reliability` takes every width from 0 to 130, make test one in five."""
    arguments = ("-m", "support.guard_pages", LIBRARY, "--step", str(STEP))
    process = run(*arguments, POSEMBED_INSTRUCTION_SET=instruction_set)
    assert process.returncode == 0, process.stderr[-3000:]
    checked, used = process.stdout.split()
    if used != instruction_set:
        pytest.skip(f"this processor has {used}")
    assert int(checked) > 40_000 / STEP


@pytest.mark.parametrize(("placement", "inside", "outside"), [(1, 11, 12), (2, 0, -1)])
def test_a_byte_outside_ends_the_process(placement: int, inside: int, outside: int) -> None:
    """Of a result of 12 bytes."""
    program = f"""
import ctypes, torch
import posembed as pe
ctypes.CDLL({str(LIBRARY)!r}).place_tensors({placement})
x = pe.functional.embedding(torch.tensor([0]), torch.ones(1, 3))
ctypes.c_byte.from_address(x.data_ptr() + {inside}).value
print("inside", flush=True)
ctypes.c_byte.from_address(x.data_ptr() + {outside}).value
"""
    process = run("-c", program)
    assert process.returncode == -signal.SIGSEGV, process.stderr
    assert process.stdout == "inside\n"
