"""Cases of the relative-bias operators for the shared operator tests."""

import torch
from torch import Tensor

from support.case import Sample, case


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
    buckets = torch.ops.posembed.relative_buckets(distances, len(weight), max_distance, bidirectional, kind)
    return weight.double()[buckets.to(weight.device)].movedim(-1, 0)


def window_sample(class_token: bool):
    def make(batch: int, seq: int, device: torch.device, dtype: torch.dtype) -> Sample:
        rows = 15 + 3 * class_token
        weight = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        return Sample((weight, [2, 3], class_token))

    return make


def window_reference(weight: Tensor, window: list[int], class_token: bool) -> Tensor:
    """A look-up of each pair of query and key, in float64."""
    rows, columns = window
    tokens = [None] * class_token + [(y, x) for y in range(rows) for x in range(columns)]
    first = len(weight) - 3
    found = torch.empty(len(tokens), len(tokens), dtype=torch.long)
    for q, query in enumerate(tokens):
        for k, key in enumerate(tokens):
            if query is None or key is None:
                found[q, k] = first + (2 if query is key else 0 if query is None else 1)
            else:
                y, x = query[0] - key[0] + rows - 1, query[1] - key[1] + columns - 1
                found[q, k] = y * (2 * columns - 1) + x
    return weight.double()[found.to(weight.device)].movedim(-1, 0)


def resample_sample(batch: int, seq: int, device: torch.device, dtype: torch.dtype) -> Sample:
    weight = torch.randn(18, 3, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return Sample((weight, [2, 3], [4, 2]))


def resample_reference(weight: Tensor, window: list[int], new_window: list[int]) -> Tensor:
    image = weight.double()[:15].reshape(1, 3, 5, 3).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(image, (7, 3), mode="bilinear")
    return torch.cat([resized[0].flatten(1).T, weight.double()[15:]])


CASES = [
    case("relative_window_bias", window_sample(False), window_reference),
    case("relative_window_bias-class-token", window_sample(True), window_reference),
    case("relative_window_resample", resample_sample, resample_reference),
    case("relative_bias", sample(), reference),
    case("relative_bias-causal", sample(2, 20, False), reference),
]
