"""A test run ends where the device is lost, because every later test would fail for that alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import posembed as pe

TESTS = """
def test_before(): pass
def test_illegal(): raise RuntimeError("CUDA error: {error}")
def test_after(): pass
"""


ERRORS = ("an illegal memory access was encountered", "device-side assert triggered", "out of memory")
RUN = "import sys, pytest; [pytest.main(['-p', 'no:cacheprovider', file]) for file in sys.argv[1:]]"


def test_the_run_stops_after_the_device_is_lost(tmp_path: Path) -> None:
    """But goes on without memory. In one process, whose imports take longest."""
    here = Path(__file__).parent
    shutil.copy(here / "conftest.py", tmp_path)
    files = [tmp_path / f"test_error_{i}.py" for i in range(len(ERRORS))]
    for file, error in zip(files, ERRORS, strict=True):
        file.write_text(TESTS.format(error=error))
    paths = f"{here}{os.pathsep}{Path(pe.__file__).parents[1]}"
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", RUN, *files]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    *lost, without_memory = (run.stdout + run.stderr).split("test session starts")[1:]
    for i, output in enumerate(lost):
        assert "1 failed, 1 passed" in output
        assert f"the CUDA context is lost since test_error_{i}.py::test_illegal" in output
    assert "1 failed, 2 passed" in without_memory
