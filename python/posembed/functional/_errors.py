"""Errors that CUDA kernels recorded."""

from __future__ import annotations

import torch


def check_errors(*, wait: bool = True) -> None:
    """Waits for the CUDA devices and raises the first id or position error that a kernel recorded.

    A CUDA kernel that finds an invalid id or position writes zeros (or leaves the token unchanged)
    and continues; the error is raised here or at the next CUDA call of posembed. Without CUDA this
    returns immediately.

    Args:
        wait: Whether to synchronise first. If False, errors of kernels that are still running are
            not seen; use it in loops that replay a CUDA graph and must not stall.

    Raises:
        IndexError: An id or position was out of range. The message names it, its value, its index,
            the device and the range.
    """
    torch.ops.posembed.check_errors.default(wait)
