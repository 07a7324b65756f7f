"""The benchmark program imports all of its cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "run.py"


def test_the_program_starts() -> None:
    command = [sys.executable, str(PROGRAM), "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--case" in result.stdout
