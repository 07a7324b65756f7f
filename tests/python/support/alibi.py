"""Cases of the ALiBi operators, and the paper's slopes."""

import math
from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, case, decomposed, transposed


def paper_slopes(heads: int) -> list[float]:
    """The slopes as in the paper's code."""

    def power_of_two(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    below = 2 ** math.floor(math.log2(heads))
    return power_of_two(below) + paper_slopes(2 * below)[0::2][: heads - below]


bias, add, softmax = map(decomposed, ("alibi_bias", "alibi_add", "alibi_softmax"))


def hidden_keys(queries: int, keys: int, causal: bool, device: torch.device | str) -> Tensor:
    """Keys after the query, of which the first is at position 0."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1) & causal


def bias_backward(grad: Tensor, two_sided: bool = False, by_sample: bool = False, **options: Any) -> Tensor:
    """The gradient of the bias by its slopes."""
    sides = (grad.shape[0], 1 + two_sided) if by_sample else (2,) * two_sided

    def biases(slopes: Tensor) -> Tensor:
        return bias(slopes, *grad.shape[-2:], apply_mask=False, **options).expand_as(grad)

    return transposed(biases, grad.new_zeros(*sides, grad.shape[-3]), grad)


def softmax_backward(
    grad: Tensor,
    weights: Tensor,
    scale: float = 1.0,
    sides: int = 1,
    by_sample: bool = False,
    causal: bool = True,
    query_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gradients of the scores and of the slopes; gradients of hidden weights are not read."""
    hidden = hidden_keys(*grad.shape[-2:], causal, grad.device)
    grad = torch.where(hidden, 0.0, grad)
    change = torch.where(hidden, 0.0, weights * (grad - (grad * weights).sum(-1, True)))
    if sides == 0:
        return change * scale, grad.new_empty(0)
    options = {"causal": causal, "query_offset": query_offset}
    return change * scale, bias_backward(change, sides == 2, by_sample, **options)


def lse_correction(
    slopes: Tensor, query_length: int, *, query_start: int, key_start: int, form: str, causal: bool
) -> Tensor:
    """The correction for a block of keys before its queries."""
    steps = torch.arange(query_length, device=slopes.device) * (form == "key")
    return -slopes[:, None] * (query_start - key_start + steps)


def positions_of(*sizes: int, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
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
    slopes = torch.rand(3, device=device, dtype=dtype)
    queries = positions_of(batch, 4, device=device)
    return Sample((out, slopes, 4, 7, True, None, None, False, queries))


def placed_bias_sample(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
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
        slopes = torch.rand(*sides, 3, device=device, dtype=dtype)
        return Sample((scores, slopes), {"query_offset": 0, **options})

    return make


def positions_sample(causal: bool) -> Any:
    """Samples with positions of keys per sequence and of queries for all."""

    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        scores = torch.randn(batch, 3, 4, seq, device=device, dtype=dtype)
        slopes = torch.rand(*[2] * (not causal), 3, device=device, dtype=dtype)
        queries = positions_of(4, device=device, dtype=torch.int32)
        keys = positions_of(batch, seq, device=device)
        return Sample((scores, slopes, 1.0, causal, None, None, False, queries, keys))

    return make


def documents_sample(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
    """Two documents and a mask with a batch."""
    scores = torch.randn(batch, 3, 4, seq, device=device, dtype=dtype)
    slopes = torch.rand(3, device=device, dtype=dtype)
    boundaries = torch.tensor([0, seq // 3, seq], device=device, dtype=torch.int32)
    mask = mask_of(batch, seq, device=device)
    return Sample((scores, slopes, 1.0, True, 0, mask, False, None, None, boundaries))


def padding_sample(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
    """A mask that numbers the keys, among which all queries are."""
    scores = torch.randn(batch, 3, seq, seq, device=device, dtype=dtype)
    slopes = torch.rand(3, device=device, dtype=dtype)
    return Sample((scores, slopes, 1.0, True, None, mask_of(batch, seq, device=device), True))


def samples_sample(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
    """Each sample has its own slopes, and its own position of the first query."""
    scores = torch.randn(batch, 3, 4, seq, device=device, dtype=dtype)
    slopes = torch.rand(batch, 2, 3, device=device, dtype=dtype)
    offsets = torch.arange(batch, device=device) % 3
    absent = (None, None, None)  # query_positions, key_positions, cu_seqlens
    return Sample((scores, slopes, 1.0, False, None, None, False, *absent, True, offsets))


def grad_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        grad = torch.randn(batch, 3, seq, 4, device=device, dtype=dtype)
        return Sample((grad,), {"query_offset": 0, **options})

    return make


def softmax_grad_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> Sample:
        grad = torch.randn(batch, 3, seq, 4, device=device, dtype=dtype)
        hidden = hidden_keys(seq, 4, options.get("causal", True), device)
        weights = torch.rand_like(grad).masked_fill(hidden, 0)
        return Sample((grad, weights), {"query_offset": 0, **options})

    return make


def cases_of_scores(name: str) -> list[OperatorCase]:
    """Cases of alibi_add or alibi_softmax. Finite differences cannot handle infinities."""
    finite = name == "alibi_softmax"
    samples = {
        "": (scores_sample((), causal=False), True),
        "-causal": (scores_sample((), batched=False, apply_mask=False, query_offset=1, scale=0.5), True),
        "-hidden": (scores_sample((), scale=0.25), finite),
        "-positions": (positions_sample(causal=False), True),
        "-documents": (documents_sample, finite),
        "-padding": (padding_sample, finite),
        "-samples": (samples_sample, True),
    }
    return [
        case(name + suffix, sample, differentiable=differentiable)
        for suffix, (sample, differentiable) in samples.items()
    ]


CASES = [
    case("alibi_bias", bias_sample((), causal=False)),
    case("alibi_bias-two-sided", bias_sample((2,), causal=False, query_offset=-1)),
    case("alibi_bias-causal", bias_sample((), apply_mask=False, query_offset=1)),
    case(
        "alibi_bias-hidden",
        bias_sample(()),
        differentiable=False,  # finite differences cannot handle infinities
    ),
    case("alibi_bias_out", bias_out_sample, mutates=True),
    case("alibi_bias-positions", placed_bias_sample),
    case("alibi_bias_backward", grad_sample(causal=False), bias_backward),
    case("alibi_bias_backward-two-sided", grad_sample(two_sided=True, causal=False, query_offset=2), bias_backward),
    case("alibi_bias_backward-samples", grad_sample(by_sample=True, causal=False), bias_backward),
    *cases_of_scores("alibi_add"),
    *cases_of_scores("alibi_softmax"),
    case("alibi_softmax_backward", softmax_grad_sample(causal=False, scale=0.5), softmax_backward),
    case("alibi_softmax_backward-two-sided", softmax_grad_sample(causal=False, sides=2), softmax_backward),
    case("alibi_softmax_backward-samples", softmax_grad_sample(causal=False, by_sample=True), softmax_backward),
    case(
        "alibi_softmax_backward-hidden",
        softmax_grad_sample(sides=0),
        softmax_backward,
        differentiable=False,  # not by weights of hidden keys, which are 0
    ),
    *(case(f"alibi_lse_correction-{form}", lse_sample(form), lse_correction) for form in ("distance", "key")),
    case("alibi_add_", scores_sample((2,), causal=False), mutates=True),
    case("alibi_softmax_", scores_sample((), scale=0.5), mutates=True),
]  # fmt: skip
