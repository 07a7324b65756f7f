"""Slow, obvious references for token embedding, and the cases of its operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order

ROWS, COLUMNS = 9, 6


def one_hot(ids: Tensor, rows: int, vocabulary_start: int) -> Tensor:
    """One-hot rows; rows of zeros for ids outside the table."""
    first = max(0, vocabulary_start)
    known = torch.arange(first, first + rows, device=ids.device)
    return (ids.unsqueeze(-1) == known).double()


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
    """A look-up is a product with one-hot vectors."""
    hot = one_hot(ids, weight.shape[0], vocabulary_start)
    share = torch.ones(weight.shape[0], 1, dtype=weight.dtype, device=weight.device)
    if scale_grad_by_freq:
        share = share / hot.sum((0, 1)).clamp_min(1).unsqueeze(1)
    if padding_idx >= 0:
        share[padding_idx - max(0, vocabulary_start)] = 0
    # Has the values of `weight`, but passes on only a share of the gradient.
    table = weight * share + (weight * (1 - share)).detach()
    return hot @ table * scale


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
    hot = one_hot(ids, num_embeddings, vocabulary_start)
    if padding_idx >= 0:
        hot[..., padding_idx - max(0, vocabulary_start)] = 0
    if scale_grad_by_freq:
        hot = hot / hot.sum((0, 1)).clamp_min(1)
    return torch.einsum("bsv,bsd->vd", hot, gradient) * scale


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
