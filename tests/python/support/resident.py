"""Memory of this process that calls leave behind."""

import gc
import os
from collections.abc import Callable
from pathlib import Path


def resident() -> int:
    """The bytes of this process that are in memory, also those of mapped files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def assert_little_is_left(call: Callable[[], object], times: int, most: int) -> None:
    """Calls leave less than ``most`` bytes behind, after a tenth as many.

    What else this process keeps, such as gaps of malloc's heap, grows in one of three tries; what calls leave, in all.
    """
    for _ in range(times // 10):
        call()
    found: list[int] = []
    while len(found) < 3 and (not found or found[-1] >= most):
        before = resident()
        for _ in range(times):
            call()
        found.append(resident() - before)
    assert min(found) < most, found
