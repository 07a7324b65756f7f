"""What the families share."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute: float32 for data of 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scalar(value: float, device: torch.device) -> Tensor:
    """A float64 scalar, built from an integer: the ONNX exporter rounds floats to float32."""
    mantissa, exponent = math.frexp(value)
    whole = torch.full((), int(mantissa * 2**53), dtype=torch.int64, device=device)
    return whole.double() * 2.0 ** (exponent - 53)


def frequencies_of(operator: Any, spec: str, device: torch.device) -> Tensor:
    """The frequencies of a specification in turns per position, in float64.

    A decomposition cannot add constants to a program, so it adds the steps that compute them.
    """
    with _disable_current_modes():
        values = [x * (0.5 / math.pi) for x in operator(spec).tolist()]
    ratio = values[1] / values[0] if len(values) > 1 and values[0] != 0 else 1.0
    if all(math.isclose(values[0] * ratio**i, x, rel_tol=1e-13) for i, x in enumerate(values)):
        steps = torch.arange(len(values), dtype=torch.float64, device=device)
        first = values[0] if values else 0.0
        return scalar(first, device) * scalar(ratio, device) ** steps
    return torch.stack([scalar(x, device) for x in values])  # for some scalings


def fields(operator: Any, spec: str) -> dict[str, Any]:
    """All fields of a specification; its text may omit defaults."""
    with _disable_current_modes():
        found: dict[str, Any] = json.loads(operator(spec))
    return found


def cosines_and_sines(turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of float64 angles, first reduced to one turn; float32 then suffices."""
    angles = (turns - turns.floor()).to(dtype) * (2 * math.pi)
    return angles.cos(), angles.sin()


def consecutive(count: Any, offset: Any, device: torch.device) -> Tensor:
    return torch.arange(offset, offset + count, device=device)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
