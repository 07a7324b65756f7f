"""The limits of memory: the fastest copy, update and fill of the same bytes that we know.

torch's own ``copy_`` is no limit: it reads what it is about to overwrite. Where the library of
limits is not built (``make benchmark`` builds it), and for small sizes, tables are without.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

Call = Callable[[], object]
Part = tuple[int, int]

COPY, UPDATE, FILL = "fastest copy", "fastest update", "fastest fill"

# These take whole blocks of four pages, and enough of them for the start of threads not to count.
BLOCK = 4 * 4096
LEAST_BYTES = 4 << 20


@functools.cache
def library() -> ctypes.CDLL | None:
    """The limits that the kernels' benchmarks use, or None where they are not built."""
    root = Path(__file__).resolve().parents[2]
    build = Path(os.environ.get("POSEMBED_BUILD", root / "build" / "dev"))
    file = build / "benchmarks" / "libposembed_bandwidth_limits.so"
    return ctypes.CDLL(str(file)) if file.exists() else None


@functools.cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def parts(tensor: Tensor) -> list[Part]:
    """Start in bytes and length for each thread; none where blocks do not fit."""
    size = tensor.nbytes
    if tensor.is_cuda or size < LEAST_BYTES or size % BLOCK or not tensor.is_contiguous():
        return []
    threads = torch.get_num_threads()
    cuts = [size // BLOCK * i // threads * BLOCK for i in range(threads + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(cuts) if b > a]


def together(calls: list[Call]) -> None:
    """Runs calls at once, one of them on this thread; ctypes lets go of the interpreter."""
    others = [pool(len(calls)).submit(call) for call in calls[1:]]
    calls[0]()
    for other in others:
        other.result()


def fastest(candidates: list[Call]) -> Call:
    """The candidate whose best of five runs is the shortest."""

    def seconds(call: Call) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    return min(candidates, key=seconds)


def limit(kind: str, count: str, groups: Sequence[tuple[Tensor, ...]]) -> Call | None:
    """The fastest function of a kind over all tensors, if there is any.

    Args:
        kind: Its name in the library.
        count: The name of the function that says how many there are.
        groups: The tensors of each call, all of one size.
    """
    built = library()
    if built is None or not all(parts(group[0]) for group in groups):
        return None
    run = getattr(built, kind)

    def part(which: int, group: tuple[Tensor, ...], start: int, size: int) -> Call:
        addresses = [ctypes.c_void_p(tensor.data_ptr() + start) for tensor in group]
        # The call keeps its tensors: addresses do not.
        return lambda _kept=group: run(ctypes.c_size_t(which), *addresses, ctypes.c_size_t(size))

    def whole(which: int) -> Call:
        jobs = [[part(which, group, *block) for block in parts(group[0])] for group in groups]
        return lambda: [together(job) for job in jobs]

    return fastest([whole(which) for which in range(getattr(built, count)())])


def copy(*pairs: tuple[Tensor, Tensor]) -> dict[str, Call]:
    """Copies the first of each pair into the second."""
    call = limit("posembed_copy", "posembed_copies", pairs)
    return {COPY: call} if call else {}


def update(*tensors: Tensor) -> dict[str, Call]:
    """Reads, changes and writes tensors in place."""
    call = limit("posembed_update", "posembed_updates", [(t,) for t in tensors])
    return {UPDATE: call} if call else {}


def fill(*tensors: Tensor) -> dict[str, Call]:
    """Writes tensors."""
    call = limit("posembed_fill", "posembed_fills", [(t,) for t in tensors])
    return {FILL: call} if call else {}
