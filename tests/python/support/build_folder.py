"""Locks the build folder, where a wheel may be linked while other processes install from it."""

import os
from pathlib import Path

from filelock import FileLock  # torch needs it

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / os.environ.get("POSEMBED_BUILD", "build/dev")

# Tests of packaging take the objects of BUILD, unless they are to compile all themselves.
FROM_SCRATCH = bool(os.environ.get("POSEMBED_PACKAGING_FROM_SCRATCH"))


def used_alone() -> FileLock:
    """A lock under which no other process uses the folder."""
    return FileLock(BUILD / "tests.lock")
