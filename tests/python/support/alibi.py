"""ALiBi the slow and obvious way, and its operators' cases."""

from __future__ import annotations

from typing import Any

import posembed  # noqa: F401  (registers the operators)
import torch
from torch import Tensor

from support.case import OperatorCase, Sample


def bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    *,
    query_offset: int | None = None,
    causal: bool = True,
    hide_future: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Minus slope times distance, element by element."""
    offset = key_length - query_length if query_offset is None else query_offset
    queries = torch.arange(query_length, device=slopes.device) + offset
    distance = (queries[:, None] - torch.arange(key_length, device=slopes.device)).to(slopes.dtype)
    left, right = (slopes[0], slopes[1]) if slopes.dim() == 2 else (slopes, slopes)
    past = -left[:, None, None] * distance
    if not causal:
        future = right[:, None, None] * distance
    else:
        future = torch.full_like(past, float("-inf") if hide_future else 0.0)
    result = torch.where(distance >= 0, past, future)
    return result if dtype is None else result.to(dtype)


def add(scores: Tensor, slopes: Tensor, **options: Any) -> Tensor:
    return scores + bias(slopes, scores.shape[-2], scores.shape[-1], **options)


def add_in_place(scores: Tensor, slopes: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return add(scores, slopes, **options), slopes


def bias_backward(grad: Tensor, *, two_sided: bool = False, **options: Any) -> Tensor:
    """By the derivative of the bias: its value where one slope is 1, on the side of that slope."""
    heads = grad.shape[-3]
    ones = torch.ones(2, heads, dtype=grad.dtype, device=grad.device)
    sides = [ones * torch.tensor(side, device=grad.device)[:, None] for side in ([1, 0], [0, 1])]
    weights = [
        bias(side, grad.shape[-2], grad.shape[-1], hide_future=False, **options) for side in sides
    ]
    both = torch.stack([(grad * weight).sum((-2, -1)) for weight in weights])
    if grad.dim() == 4:
        both = both.sum(1)
    return both if two_sided else both.sum(0)


def bias_sample(sides: tuple[int, ...], extra_keys: int = 2, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        slopes = torch.rand(*sides, 3, device=device, dtype=dtype)
        lengths = {"query_length": seq, "key_length": seq + extra_keys}
        return Sample((slopes,), {**lengths, **options})

    return make


def add_sample(sides: tuple[int, ...], batched: bool = True, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        shape = (batch, 3, 4, seq) if batched else (3, 4, seq)
        scores = torch.randn(shape, device=device, dtype=dtype)
        return Sample((scores, torch.rand(*sides, 3, device=device, dtype=dtype)), options)

    return make


def grad_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        return Sample((torch.randn(batch, 3, seq, 4, device=device, dtype=dtype),), options)

    return make


OPERATORS = torch.ops.posembed
CASES = [
    OperatorCase("alibi_bias", OPERATORS.alibi_bias.default, bias_sample((), causal=False), bias),
    OperatorCase(
        "alibi_bias-two-sided",
        OPERATORS.alibi_bias.default,
        bias_sample((2,), causal=False, query_offset=-1),
        bias,
    ),
    OperatorCase(
        "alibi_bias-causal",
        OPERATORS.alibi_bias.default,
        bias_sample((2,), hide_future=False, query_offset=1),
        bias,
    ),
    OperatorCase(
        "alibi_bias-hidden",
        OPERATORS.alibi_bias.default,
        bias_sample(()),
        bias,
        differentiable=False,  # finite differences cannot tell infinities apart
    ),
    OperatorCase(
        "alibi_bias_backward",
        OPERATORS.alibi_bias_backward.default,
        grad_sample(causal=False),
        bias_backward,
    ),
    OperatorCase(
        "alibi_bias_backward-two-sided",
        OPERATORS.alibi_bias_backward.default,
        grad_sample(two_sided=True, causal=False, query_offset=2),
        bias_backward,
    ),
    OperatorCase("alibi_add", OPERATORS.alibi_add.default, add_sample((), causal=False), add),
    OperatorCase(
        "alibi_add-causal",
        OPERATORS.alibi_add.default,
        add_sample((2,), batched=False, hide_future=False, query_offset=1),
        add,
    ),
    OperatorCase(
        "alibi_add-hidden", OPERATORS.alibi_add.default, add_sample(()), add, differentiable=False
    ),
    OperatorCase(
        "alibi_add_", OPERATORS.alibi_add_.default, add_sample((2,)), add_in_place, mutates=True
    ),
]
