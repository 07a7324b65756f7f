"""Slow, obvious references for token embedding, and the cases of its operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order

ROWS, COLUMNS = 9, 6


class Scaled(torch.autograd.Function):
    """The same values, of which gradients are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factors,) = ctx.saved_tensors
        return torch.where(factors == 0, 0.0, gradients[0] * factors), None


def shares(
    ids: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool, vocabulary_start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each id's row and whether the table has it, and what each row takes of its gradients."""
    first = max(0, vocabulary_start)
    places = ids.long() - first
    known = (places >= 0) & (places < rows)
    share = torch.ones(rows, 1, dtype=torch.float64, device=ids.device)
    if scale_grad_by_freq:
        share = share / places[known].bincount(minlength=rows).clamp_min(1).unsqueeze(1)
    if padding_idx >= 0:
        share[padding_idx - first] = 0
    return places.clamp(0, rows - 1), known, share


def reference(
    weight: Tensor,
    ids: Tensor,
    *,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    gradient: str = "dense",
    vocabulary_start: int = -1,
) -> Tensor:
    """Rows by indexing; zeros for ids outside the table."""
    rows = weight.shape[0]
    places, known, share = shares(ids, rows, padding_idx, scale_grad_by_freq, vocabulary_start)
    table = weight if bool((share == 1).all()) else Scaled.apply(weight, share)
    return torch.where(known.unsqueeze(-1), table[places] * scale, 0.0)


def reference_backward(
    gradient: Tensor,
    ids: Tensor,
    *,
    num_embeddings: int,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    vocabulary_start: int = -1,
) -> Tensor:
    places, known, share = shares(
        ids, num_embeddings, padding_idx, scale_grad_by_freq, vocabulary_start
    )
    zeros = gradient.new_zeros(num_embeddings, gradient.shape[-1])
    sums = zeros.index_add(0, places[known], gradient[known] * scale)
    return torch.where(share == 0, 0.0, sums * share)


def make_ids(
    batch: int, seq: int, device: Any, dtype: torch.dtype = torch.int64, first: int = 0
) -> Tensor:
    """Ids of a vocabulary; with ``first``, of one that extends beyond both ends of the table."""
    low, high = first - min(first, 3), first + ROWS + min(first, 3)
    return torch.randint(low, high, (batch, seq), device=device, dtype=dtype)


def sample(index: torch.dtype = torch.int64, **options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        weight = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
        first = options.get("vocabulary_start", 0)
        return Sample((weight, make_ids(batch, seq, device, index, first)), options)

    return make


def backward_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        gradient = torch.randn(batch, seq, COLUMNS, device=device, dtype=dtype)
        ids = make_ids(batch, seq, device, first=options.get("vocabulary_start", 0))
        return Sample((gradient, ids), {"num_embeddings": ROWS, **options})

    return make


EMBEDDING = torch.ops.posembed.embedding.default
BACKWARD = torch.ops.posembed.embedding_backward.default

CASES = in_schema_order(
    [
        OperatorCase("embedding", EMBEDDING, sample(), reference),
        OperatorCase("embedding-scale-int32", EMBEDDING, sample(torch.int32, scale=2.5), reference),
        OperatorCase(
            "embedding-padding", EMBEDDING, sample(padding_idx=2), reference, conventional=True
        ),
        OperatorCase(
            "embedding-frequency",
            EMBEDDING,
            sample(scale_grad_by_freq=True, scale=0.5),
            reference,
            conventional=True,
        ),
        OperatorCase(
            "embedding-part",
            EMBEDDING,
            sample(scale=2.5, vocabulary_start=20, padding_idx=22),
            reference,
            conventional=True,
        ),
        # Only dense gradients are differentiable for torch; tests/python/token tests the sparse ones.
        OperatorCase(
            "embedding-rows", EMBEDDING, sample(gradient="rows"), reference, differentiable=False
        ),
        OperatorCase(
            "embedding_backward", BACKWARD, backward_sample(scale=0.5), reference_backward
        ),
        OperatorCase(
            "embedding_backward-padding",
            BACKWARD,
            backward_sample(padding_idx=2),
            reference_backward,
        ),
        OperatorCase(
            "embedding_backward-frequency",
            BACKWARD,
            backward_sample(scale_grad_by_freq=True),
            reference_backward,
        ),
        OperatorCase(
            "embedding_backward-part",
            BACKWARD,
            backward_sample(vocabulary_start=20, padding_idx=22),
            reference_backward,
        ),
    ],
    "gradient",
    "weight",
    "ids",
)
