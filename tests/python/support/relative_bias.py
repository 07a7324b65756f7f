"""Cases of the relative-bias operators for the shared operator tests."""

from __future__ import annotations

import torch
from torch import Tensor

from support.case import OperatorCase, Sample

BIAS = torch.ops.posembed.relative_bias.default


def sample(*options: object):
    """Lengths are options: the family's own tests have others."""

    def make(batch: int, seq: int, device: torch.device, dtype: torch.dtype) -> Sample:
        weight = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        return Sample((weight, 5, 7, *options))

    return make


def reference(
    weight: Tensor,
    queries: int,
    keys: int,
    offset: int | None = None,
    max_distance: int = 128,
    bidirectional: bool = True,
    kind: str = "t5",
) -> Tensor:
    """A look-up of each pair of query and key, in float64."""
    first = keys - queries if offset is None else offset
    distances = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - first
    buckets = torch.ops.posembed.relative_buckets(
        distances, len(weight), max_distance, bidirectional, kind
    )
    return weight.double()[buckets.to(weight.device)].movedim(-1, 0)


CASES = [
    OperatorCase("relative_bias", BIAS, sample(), reference),
    OperatorCase("relative_bias, causal", BIAS, sample(2, 20, False), reference),
]
