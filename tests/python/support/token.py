"""Token embedding the slow and obvious way, and its operators' cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample

ROWS, COLUMNS = 9, 6


def one_hot(ids: Tensor, rows: int, vocabulary_start: int) -> Tensor:
    """Rows of zeros for ids outside the table."""
    first = max(0, vocabulary_start)
    known = torch.arange(first, first + rows, device=ids.device)
    return (ids.unsqueeze(-1) == known).double()


def reference(
    weight: Tensor, ids: Tensor, *, scale: float = 1.0, vocabulary_start: int = -1
) -> Tensor:
    """A look-up is a product with one-hot vectors."""
    return one_hot(ids, weight.shape[0], vocabulary_start) @ weight * scale


def reference_backward(
    gradient: Tensor,
    ids: Tensor,
    *,
    num_embeddings: int,
    scale: float = 1.0,
    vocabulary_start: int = -1,
) -> Tensor:
    hot = one_hot(ids, num_embeddings, vocabulary_start)
    return torch.einsum("bsv,bsd->vd", hot, gradient) * scale


def make_ids(
    batch: int, seq: int, device: Any, dtype: torch.dtype = torch.int64, first: int = 0
) -> Tensor:
    """Of a whole vocabulary; with ``first``, of one that goes on at both ends of the table."""
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
        return Sample((gradient, ids), {"num_embeddings": ROWS, "scale": 0.5} | options)

    return make


CASES = [
    OperatorCase("embedding", torch.ops.posembed.embedding.default, sample(), reference),
    OperatorCase(
        "embedding-scale-int32",
        torch.ops.posembed.embedding.default,
        sample(torch.int32, scale=2.5),
        reference,
    ),
    OperatorCase(
        "embedding-part",
        torch.ops.posembed.embedding.default,
        sample(scale=2.5, vocabulary_start=20),
        reference,
    ),
    OperatorCase(
        "embedding_backward",
        torch.ops.posembed.embedding_backward.default,
        backward_sample(),
        reference_backward,
    ),
    OperatorCase(
        "embedding_backward-part",
        torch.ops.posembed.embedding_backward.default,
        backward_sample(vocabulary_start=20),
        reference_backward,
    ),
]
