"""The limits of a GPU's memory: a copy and a fill of the same bytes by kernels.

``cudaMemcpyAsync`` is no limit: on an H200 it copies more than 1 GiB a third slower than a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

VECTORS = 2  # 16-byte vectors that a thread has in flight: faster than four
BLOCK = 256 * 2 * VECTORS  # int64 values of a block of 8 warps


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copies a block of values."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, place < count), place < count)


@triton.jit
def fill_kernel(target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Fills a block of values."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, place, place < count)


def copy_of(moved: int) -> Callable[[], object]:
    """A call that reads half of ``moved`` bytes and writes the other half."""
    count = max(moved // 16, 2)
    source, target = torch.ones(2, count, device="cuda", dtype=torch.int64)
    grid = (triton.cdiv(count, BLOCK),)
    return lambda: copy_kernel[grid](source, target, count, BLOCK=BLOCK, num_warps=8)


def fill_of(moved: int) -> Callable[[], object]:
    """A call that writes ``moved`` bytes."""
    count = max(moved // 8, 2)
    target = torch.empty(count, device="cuda", dtype=torch.int64)
    grid = (triton.cdiv(count, BLOCK),)
    return lambda: fill_kernel[grid](target, count, BLOCK=BLOCK, num_warps=8)
