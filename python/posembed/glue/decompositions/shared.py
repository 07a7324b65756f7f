"""What the families share."""

from __future__ import annotations

import contextvars
import functools
import json
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# "onnx": rotations become ONNX's own RotaryEmbedding, of opset 23.
TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)
POSITION_BITS = 31
DIGIT_NUMBERS = 2**18  # at most in the table of a digit, unless it has 128 rows


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute: float32 for data of 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scalar(value: float, device: torch.device) -> Tensor:
    """A float64 scalar in a tensor: the ONNX exporter rounds Python's floats to float32."""
    return torch.full((), value, dtype=torch.float64, device=device)


def frequencies_of(operator: Any, spec: str, device: torch.device) -> Tensor:
    """The frequencies of a specification in turns per position, in float64.

    The call has no tensor argument, so ``decompose`` replaces it by its result.
    """
    turns: Tensor = operator(spec).to(device) * scalar(0.5 / math.pi, device)
    return turns


def whole_numbers(values: list[int], device: torch.device) -> Tensor:
    """A constant, in steps that ``decompose`` replaces by their result."""
    each = [torch.full((), value, dtype=torch.int64, device=device) for value in values]
    return torch.stack(each)


def fields(operator: Any, spec: str) -> dict[str, Any]:
    """All fields of a specification; its text may omit defaults."""
    with _disable_current_modes():
        found: dict[str, Any] = json.loads(operator(spec))
    return found


def cosines_and_sines(turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of float64 angles, first reduced to one turn; float32 then suffices."""
    angles = (turns - turns.floor()).to(dtype) * (2 * math.pi)
    return angles.cos(), angles.sin()


def exact_cosines_and_sines(
    positions: Tensor, turns: Tensor, dtype: torch.dtype, signed: bool
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., pairs] of position times ``turns`` [pairs], which are constants.

    In float32, each is a product of rows for the position's digits. Only the digits' tables, which
    ``decompose`` computes, need float64. Not ``signed``: none is negative.
    """
    if torch.float64 in (dtype, positions.dtype):
        return cosines_and_sines(positions.double().unsqueeze(-1) * turns, dtype)
    size = positions.abs() if signed else positions
    if not positions.is_floating_point():
        cosines, sines = of_digits(size.long(), turns)
    else:
        size = size.float()
        whole = size.floor()
        rest = (size - whole).unsqueeze(-1) * (turns * (2 * math.pi)).float()
        cosines, sines = product(*of_digits(whole.long(), turns), rest.cos(), rest.sin())
    return cosines, sines * positions.sign().to(dtype).unsqueeze(-1) if signed else sines


def of_digits(positions: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Complex products of a row for each digit of positions below 2^31."""
    # A digit of 7 bits leaves 24, which float32 holds; one of 11 bits makes three digits.
    most = max(7, min(11, (DIGIT_NUMBERS // max(1, 2 * turns.shape[0])).bit_length() - 1))
    count = -(-POSITION_BITS // most)
    bits = -(-POSITION_BITS // count)
    digits = []
    for _ in range(count - 1):
        digits.append(torch.remainder(positions, 2**bits))
        # Exact in float32, and two steps where exporters make seven of a division of integers.
        positions = ((positions - digits[-1]).float() * 2.0**-bits).long()
    digits.append(positions)
    tables = []
    for place in range(0, bits * count, bits):
        values = torch.arange(2 ** min(bits, POSITION_BITS - place), device=turns.device)
        angles = (values.double() * 2.0**place).unsqueeze(-1) * turns
        cosines, sines = cosines_and_sines(angles, torch.float64)
        tables.append((cosines.float(), sines.float()))
    if TARGET.get() == "onnx":
        return joined_by_onnx(digits, tables)
    rows_of = torch.nn.functional.embedding
    rows = [
        (rows_of(d, cos), rows_of(d, sin)) for d, (cos, sin) in zip(digits, tables, strict=True)
    ]
    return functools.reduce(lambda found, row: product(*found, *row), reversed(rows))


def joined_by_onnx(
    digits: list[Tensor], tables: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The same by ONNX's rotation, which finds the rows of all digits but the highest itself."""
    # ONNX Runtime refuses more tokens of a batch than a table has rows: each is a batch.
    *lower, highest = (digit.reshape(-1, 1) for digit in digits)
    found = torch.nn.functional.embedding(highest, torch.cat(tables[-1], -1))
    for digit, table in zip(reversed(lower), reversed(tables[:-1]), strict=True):
        found = torch.onnx.ops.rotary_embedding(found, *table, digit, num_heads=1)
    found = found.reshape(*digits[0].shape, found.shape[-1])
    cosines, sines = found.chunk(2, -1)
    return cosines, sines


def product(x: Tensor, y: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """The components of (x + yi)(cosines + i sines)."""
    return x * cosines - y * sines, y * cosines + x * sines


def consecutive(count: Any, offset: Any, device: torch.device) -> Tensor:
    return torch.arange(offset, offset + count, device=device)


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
