"""Tests that the example of distributed training has the same losses on 1, 2 and 4 processes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python" / "train_distributed.py"
SHORT = ("--steps", "11", "--batch", "8", "--length", "32")


def losses() -> list[float]:
    spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.train(example.parse_settings([*SHORT]))


@pytest.mark.program
def test_losses_do_not_depend_on_the_number_of_processes(groups: Groups) -> None:
    alone = groups.of(1).run(losses)[0]
    assert alone[0] == pytest.approx(5.54, abs=0.1)  # ln 256: nothing is known
    assert alone[-1] < alone[0] - 1
    for size in (2, 4):
        for found in groups.of(size).run(losses):
            assert found == pytest.approx(alone, abs=1e-4)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")  # a free port
    command = (*run, EXAMPLE, *SHORT)
    for _ in range(2):  # torch may abort while a finished process ends: a thread of its own is left
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if "terminate called without an active exception" not in result.stderr:
            break
    assert result.returncode == 0, result.stderr
    printed = [float(number) for number in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert printed == pytest.approx([alone[0], alone[10]], abs=2e-4)
