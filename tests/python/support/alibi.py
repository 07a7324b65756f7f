"""Slow, obvious references for ALiBi, and the cases of its operators."""

from __future__ import annotations

import math
from typing import Any

import posembed  # noqa: F401  (registers the operators)
import torch
from torch import Tensor

from support.case import OperatorCase, Sample

INFINITY = float("inf")


def paper_slopes(heads: int) -> list[float]:
    """The slopes as in the paper's code."""

    def power_of_two(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    below = 2 ** math.floor(math.log2(heads))
    return power_of_two(below) + paper_slopes(2 * below)[0::2][: heads - below]


def distances(
    query_length: int,
    key_length: int,
    causal: bool = True,
    query_offset: int | None = None,
    attention_mask: Tensor | None = None,
    positions_from_mask: bool = False,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Query position - key position, and which keys are hidden: both [batch or 1, 1, query, key]."""
    offset = key_length - query_length if query_offset is None else query_offset
    places = torch.arange(query_length) + offset
    if positions_from_mask:
        visible = attention_mask.cpu() != 0
        key_positions = (visible.cumsum(-1) - 1) * visible
        if 0 <= offset <= key_length - query_length:  # otherwise the mask says nothing about them
            query_positions = key_positions[..., offset : offset + query_length]
    queries = places if query_positions is None else query_positions.cpu().long()
    keys = torch.arange(key_length) if key_positions is None else key_positions.cpu().long()
    distance = queries[..., :, None] - keys[..., None, :]
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if cu_seqlens is not None:
        ends = cu_seqlens.cpu().long()[1:].contiguous()
        documents = [
            torch.bucketize(p, ends, right=True) for p in (places, torch.arange(key_length))
        ]
        hidden = hidden | (documents[0][:, None] != documents[1][None])
        hidden = hidden | ((places < 0) | (places >= key_length))[:, None]
    if attention_mask is not None:
        hidden = hidden | (attention_mask.cpu() == 0)[..., None, :]
    shape = (1, *distance.shape) if distance.dim() == 2 else distance.shape
    hidden = hidden if hidden.dim() == 3 else hidden.unsqueeze(0)
    return distance.view(shape).unsqueeze(1), hidden.unsqueeze(1)


def bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    dtype: torch.dtype | None = None,
    *options: Any,
    apply_mask: bool = True,
    **named: Any,
) -> Tensor:
    """The bias, minus slope times distance, element by element."""
    distance, hidden = distances(query_length, key_length, *options, **named)
    given = (*options, *named.values())
    batched = any(isinstance(option, Tensor) and option.dim() == 2 for option in given)
    distance, hidden = distance.to(slopes.device, slopes.dtype), hidden.to(slopes.device)
    left, right = (slopes[0], slopes[1]) if slopes.dim() == 2 else (slopes, slopes)
    line = torch.where(
        distance >= 0, -left[:, None, None] * distance, right[:, None, None] * distance
    )
    result = torch.where(hidden, torch.full_like(line, -INFINITY if apply_mask else 0.0), line)
    result = result if batched else result.squeeze(0)
    return result if dtype is None else result.to(dtype)


def add(scores: Tensor, slopes: Tensor, scale: float = 1.0, *options: Any, **named: Any) -> Tensor:
    """Scores plus bias; a hidden score is minus infinity, whatever it was."""
    added = bias(slopes, *scores.shape[-2:], None, *options, **named)
    return torch.where(added == -INFINITY, added, scores * scale + added)


def softmax(scores: Tensor, slopes: Tensor, *options: Any, **named: Any) -> Tensor:
    """Attention weights; a query that sees no key has weights 0."""
    biased = add(scores, slopes, *options, **named)
    sees = (biased != -INFINITY).any(-1, True)
    zero = torch.zeros_like(biased)
    return torch.where(sees, torch.where(sees, biased, zero).softmax(-1), zero)


def in_place(reference: Any) -> Any:
    def call(scores: Tensor, slopes: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return reference(scores, slopes, *args, **options), slopes

    return call


def bias_backward(grad: Tensor, two_sided: bool = False, **options: Any) -> Tensor:
    """The gradient of the bias by its slopes."""
    sides = (2,) if two_sided else ()
    slopes = torch.ones(*sides, grad.shape[-3], dtype=grad.dtype, device=grad.device)

    def biases(slopes: Tensor) -> Tensor:
        return bias(slopes, *grad.shape[-2:], apply_mask=False, **options).expand_as(grad)

    return torch.func.vjp(biases, slopes)[1](grad)[0]


def softmax_backward(
    grad: Tensor, weights: Tensor, scale: float = 1.0, sides: int = 1, **options: Any
) -> tuple[Tensor, Tensor]:
    """The gradients of the scores and of the slopes; gradients of hidden weights are not read."""
    _, hidden = distances(*grad.shape[-2:], causal=options.get("causal", True))
    grad = torch.where(hidden.to(grad.device), 0.0, grad)
    change = weights * (grad - (grad * weights).sum(-1, True))
    if sides == 0:
        return change * scale, grad.new_empty(0)
    return change * scale, bias_backward(change, two_sided=sides == 2, **options)


def lse_correction(
    slopes: Tensor, query_length: int, *, query_start: int, key_start: int, form: str, causal: bool
) -> Tensor:
    """The correction for a block of keys before its queries."""
    steps = torch.arange(query_length, device=slopes.device) * (form == "key")
    return -slopes[:, None] * (query_start - key_start + steps)


def positions_of(
    *sizes: int, device: torch.device | str, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Positions that are neither ordered nor all different."""
    count = torch.Size(sizes).numel()
    return ((torch.arange(count) * 7) % 11 - 3).to(device, dtype).view(sizes)


def mask_of(*sizes: int, device: torch.device | str) -> Tensor:
    """A mask that hides some keys; in the first row all but one."""
    count = torch.Size(sizes).numel()
    return ((torch.arange(count) * 5) % 3 != 1).view(sizes).to(device)


def bias_sample(sides: tuple[int, ...], extra_keys: int = 2, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        slopes = torch.rand(*sides, 3, device=device, dtype=dtype)
        lengths = {"query_length": seq, "key_length": seq + extra_keys}
        return Sample((slopes,), {**lengths, **options})

    return make


def bias_out_sample(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
    """Arguments with a view as output and every kind of hidden key."""
    out = torch.randn(batch, 3, 4, 9, device=device, dtype=dtype)[..., :7]
    slopes = torch.rand(2, 3, device=device, dtype=dtype)
    queries = positions_of(batch, 4, device=device)
    return Sample((out, slopes, 4, 7, True, None, None, False, queries))


def bias_out(
    out: Tensor, slopes: Tensor, query_length: int, key_length: int, *options: Any
) -> tuple[Tensor, ...]:
    return bias(slopes, query_length, key_length, None, *options), slopes


def placed_bias_sample(
    batch: int, seq: int, device: torch.device | str, dtype: torch.dtype
) -> Sample:
    """Lengths are numbers, which an exported program keeps, so they must not depend on sizes."""
    slopes = torch.rand(2, 3, device=device, dtype=dtype)
    queries, keys = positions_of(batch, 4, device=device), positions_of(7, device=device)
    return Sample((slopes, 4, 7, None, False, None, None, False, queries, keys))


def lse_sample(form: str) -> Any:
    """Lengths are numbers here too."""
    starts = {"query_start": 12, "key_start": 5}

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        slopes = torch.rand(3, device=device, dtype=dtype)
        return Sample((slopes, 4), {**starts, "form": form, "causal": True})

    return make


def scores_sample(sides: tuple[int, ...], batched: bool = True, **options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        shape = (batch, 3, 4, seq) if batched else (3, 4, seq)
        scores = torch.randn(shape, device=device, dtype=dtype)
        return Sample((scores, torch.rand(*sides, 3, device=device, dtype=dtype)), options)

    return make


def positions_sample(causal: bool) -> Any:
    """Samples with positions of keys per sequence and of queries for all."""

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        scores = torch.randn(batch, 3, 4, seq, device=device, dtype=dtype)
        slopes = torch.rand(2, 3, device=device, dtype=dtype)
        queries = positions_of(4, device=device, dtype=torch.int32)
        keys = positions_of(batch, seq, device=device)
        return Sample((scores, slopes, 1.0, causal, None, None, False, queries, keys))

    return make


def documents_sample(
    batch: int, seq: int, device: torch.device | str, dtype: torch.dtype
) -> Sample:
    """Two documents and a mask with a batch."""
    scores = torch.randn(batch, 3, 4, seq, device=device, dtype=dtype)
    slopes = torch.rand(3, device=device, dtype=dtype)
    boundaries = torch.tensor([0, seq // 3, seq], device=device, dtype=torch.int32)
    mask = mask_of(batch, seq, device=device)
    return Sample((scores, slopes, 1.0, True, None, mask, False, None, None, boundaries))


def padding_sample(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
    """A mask that numbers the keys, among which all queries are."""
    scores = torch.randn(batch, 3, seq, seq, device=device, dtype=dtype)
    slopes = torch.rand(3, device=device, dtype=dtype)
    return Sample((scores, slopes, 1.0, True, None, mask_of(batch, seq, device=device), True))


def grad_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        return Sample((torch.randn(batch, 3, seq, 4, device=device, dtype=dtype),), options)

    return make


def softmax_grad_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        grad = torch.randn(batch, 3, seq, 4, device=device, dtype=dtype)
        _, hidden = distances(seq, 4, causal=options.get("causal", True))
        return Sample((grad, torch.rand_like(grad).masked_fill(hidden.to(device), 0)), options)

    return make


def cases_of_scores(name: str, reference: Any) -> list[OperatorCase]:
    """Cases of alibi_add or alibi_softmax. Finite differences cannot handle infinities."""
    operator = getattr(OPERATORS, name).default
    finite = name == "alibi_softmax"
    samples = {
        "": (scores_sample((), causal=False), True),
        "-causal": (
            scores_sample((2,), batched=False, apply_mask=False, query_offset=1, scale=0.5),
            True,
        ),
        "-hidden": (scores_sample((), scale=0.25), finite),
        "-positions": (positions_sample(causal=False), True),
        "-documents": (documents_sample, finite),
        "-padding": (padding_sample, finite),
    }
    return [
        OperatorCase(name + suffix, operator, sample, reference, differentiable=differentiable)
        for suffix, (sample, differentiable) in samples.items()
    ]


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
        bias_sample((2,), apply_mask=False, query_offset=1),
        bias,
    ),
    OperatorCase(
        "alibi_bias-hidden",
        OPERATORS.alibi_bias.default,
        bias_sample(()),
        bias,
        differentiable=False,  # finite differences cannot handle infinities
    ),
    OperatorCase(
        "alibi_bias_out",
        OPERATORS.alibi_bias_out.default,
        bias_out_sample,
        bias_out,
        mutates=True,
    ),
    OperatorCase("alibi_bias-positions", OPERATORS.alibi_bias.default, placed_bias_sample, bias),
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
    *cases_of_scores("alibi_add", add),
    *cases_of_scores("alibi_softmax", softmax),
    OperatorCase(
        "alibi_softmax_backward",
        OPERATORS.alibi_softmax_backward.default,
        softmax_grad_sample(causal=False, scale=0.5),
        softmax_backward,
    ),
    OperatorCase(
        "alibi_softmax_backward-two-sided",
        OPERATORS.alibi_softmax_backward.default,
        softmax_grad_sample(causal=False, sides=2),
        softmax_backward,
    ),
    OperatorCase(
        "alibi_softmax_backward-hidden",
        OPERATORS.alibi_softmax_backward.default,
        softmax_grad_sample(sides=0),
        softmax_backward,
        differentiable=False,  # not by weights of hidden keys, which are 0
    ),
    *(
        OperatorCase(
            f"alibi_lse_correction-{form}",
            OPERATORS.alibi_lse_correction.default,
            lse_sample(form),
            lse_correction,
        )
        for form in ("distance", "key")
    ),
    OperatorCase(
        "alibi_add_",
        OPERATORS.alibi_add_.default,
        scores_sample((2,)),
        in_place(add),
        mutates=True,
    ),
    OperatorCase(
        "alibi_softmax_",
        OPERATORS.alibi_softmax_.default,
        scores_sample((), scale=0.5),
        in_place(softmax),
        mutates=True,
    ),
]
