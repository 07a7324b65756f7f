"""Token embedding the slow and obvious way, and its operators' cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample

ROWS, COLUMNS = 9, 6


def one_hot(ids: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.one_hot(ids.long(), rows).double()


def reference(weight: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    """A look-up is a product with one-hot vectors."""
    return one_hot(ids, weight.shape[0]) @ weight * scale


def reference_backward(
    gradient: Tensor, ids: Tensor, *, num_embeddings: int, scale: float = 1.0
) -> Tensor:
    return torch.einsum("bsv,bsd->vd", one_hot(ids, num_embeddings), gradient) * scale


def make_ids(batch: int, seq: int, device: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, ROWS, (batch, seq), device=device, dtype=dtype)


def sample(index: torch.dtype = torch.int64, **options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        weight = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
        return Sample((weight, make_ids(batch, seq, device, index)), options)

    return make


def backward_sample(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
    gradient = torch.randn(batch, seq, COLUMNS, device=device, dtype=dtype)
    return Sample((gradient, make_ids(batch, seq, device)), {"num_embeddings": ROWS, "scale": 0.5})


CASES = [
    OperatorCase("embedding", torch.ops.posembed.embedding.default, sample(), reference),
    OperatorCase(
        "embedding-scale-int32",
        torch.ops.posembed.embedding.default,
        sample(torch.int32, scale=2.5),
        reference,
    ),
    OperatorCase(
        "embedding_backward",
        torch.ops.posembed.embedding_backward.default,
        backward_sample,
        reference_backward,
    ),
]
