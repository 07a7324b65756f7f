"""Errors that CUDA kernels recorded."""

from __future__ import annotations

import torch


def check_errors(*, wait: bool = True) -> None:
    """Waits for the CUDA devices and raises the first id or position error that a kernel recorded.

    A CUDA kernel that meets a bad id or position writes zeros (or leaves the token as it is) and
    continues; the error is raised here or at the next CUDA call of posembed. Returns at once on
    machines without CUDA.

    Args:
        wait: Whether to wait. Without, errors of kernels that still run are not seen: for loops
            that replay a CUDA graph and must not stop.

    Raises:
        IndexError: Names what was out of range, its value, its place, the device and the range.
    """
    torch.ops.posembed.check_errors.default(wait)
