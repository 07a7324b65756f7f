"""A test run ends where the device is lost, because every later test would fail for that alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import posembed as pe
import pytest

TESTS = """
def test_before(): pass
def test_illegal(): raise RuntimeError("CUDA error: {error}")
def test_after(): pass
"""


def run(folder: Path, error: str) -> str:
    here = Path(__file__).parent
    shutil.copy(here / "conftest.py", folder)
    (folder / "test_error.py").write_text(TESTS.format(error=error))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", folder]
    paths = f"{here}{os.pathsep}{Path(pe.__file__).parents[1]}"
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    return run.stdout + run.stderr


@pytest.mark.parametrize("error", ["an illegal memory access was encountered", "device-side assert triggered"])
def test_the_run_stops_after_the_device_is_lost(tmp_path: Path, error: str) -> None:
    output = run(tmp_path, error)
    assert "1 failed, 1 passed" in output
    assert "the CUDA context is lost since test_error.py::test_illegal" in output


def test_the_run_goes_on_without_memory(tmp_path: Path) -> None:
    assert "1 failed, 2 passed" in run(tmp_path, "out of memory")
