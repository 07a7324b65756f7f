"""A short run of the fuzzer of operators, and what longer ones have found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import posembed as pe
import pytest
import torch

FUZZER = Path(__file__).resolve().parents[1] / "fuzz" / "operators.py"


def test_no_call_crashes_or_writes_outside() -> None:
    command = [sys.executable, FUZZER, "--calls", "1000", "--seed", "50000"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(re.search(r"'returned': (\d+)", run.stdout)[1]) > 200


def test_the_fuzzer_sees_an_input_that_changes() -> None:
    """Another process in which rotary writes to its query."""
    code = f"""
import sys
sys.argv = ["operators.py", "--calls", "50"]
sys.path.insert(0, {str(FUZZER.parent)!r})
import operators, torch
class Broken:
    _schema = torch.ops.posembed.rotary.default._schema
    def __call__(self, query, *rest):
        result = torch.ops.posembed.rotary.default(query, *rest)
        query.detach().fill_(3)
        return result
import dataclasses
draw = operators.Fuzzer.__init__
def only_broken(self, *options):
    draw(self, *options)
    first = next(case for case in self.cases if case.name == "rotary")
    self.cases = [dataclasses.replace(first, operator=Broken())]
operators.Fuzzer.__init__ = only_broken
operators.main()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert "an input changed" in run.stderr
    assert "failed: --seed" in run.stderr


@pytest.mark.parametrize("start", [2**63 - 1, 2**63 - 8, 3])
def test_a_window_past_the_head_is_refused(start: int) -> None:
    """The sum of start and width overflowed, and the rotation wrote outside the head."""
    x, table = torch.randn(1, 2, 3, 10), torch.rand(3, 8)
    with pytest.raises(ValueError, match="query: expected head_dim of at least start"):
        pe.functional.rotary_tables(x, None, table, table, start=start)


def test_the_order_of_a_derivative_is_bounded() -> None:
    """A step for each order would take for ever."""
    spec = '{"embedding_dim":6}'
    encode = torch.ops.posembed.sinusoidal_encode.default
    assert encode(torch.ones(2), spec, None, 1000).isfinite().all()
    with pytest.raises(ValueError, match="order: expected 0 to 1000, got 9223372036854775807"):
        encode(torch.ones(2), spec, None, 2**63 - 1)
