"""Cases of token embedding, with torch.nn's as references of gradients by convention."""

from typing import Any

import torch
from torch import Tensor

from support.case import Sample, case, in_schema_order

ROWS, COLUMNS = 9, 6


def places_of(ids: Tensor, rows: int, padding_idx: int, vocabulary_start: int) -> tuple[Tensor, int]:
    """Rows of a table with one more for ids outside a part of a vocabulary, and the padding row."""
    first = max(0, vocabulary_start)
    places = ids.long() - first
    outside = (places < 0) | (places >= rows)
    return places.masked_fill(outside, rows), max(-1, padding_idx - first)


def reference(
    weight: Tensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    vocabulary_start: int = -1,
    gradient: str = "dense",
) -> Tensor:
    """torch.nn's, whose conventions of gradients are the operator's."""
    places, padding = places_of(ids, len(weight), padding_idx, vocabulary_start)
    table = torch.nn.functional.pad(weight, (0, 0, 0, 1))
    return torch.embedding(table, places, padding, scale_grad_by_freq) * scale


def reference_backward(
    gradient: Tensor,
    num_embeddings: int,
    ids: Tensor,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    vocabulary_start: int = -1,
) -> Tensor:
    """Torch's rule, by a sum that has every derivative."""
    places, padding = places_of(ids, num_embeddings, padding_idx, vocabulary_start)
    rows, tokens = places.flatten(), gradient.flatten(0, -2)
    if scale_grad_by_freq:
        tokens = tokens / rows.bincount(minlength=num_embeddings + 1)[rows].unsqueeze(-1)
    tokens = torch.where((rows == padding).unsqueeze(-1), 0.0, tokens * scale)
    return tokens.new_zeros(num_embeddings + 1, tokens.shape[-1]).index_add(0, rows, tokens)[:-1]


def make_ids(batch: int, seq: int, device: Any, dtype: torch.dtype = torch.int64, first: int = 0) -> Tensor:
    """Ids of a vocabulary; with ``first``, of one that extends beyond both ends of the table."""
    low, high = first - min(first, 3), first + ROWS + min(first, 3)
    return torch.randint(low, high, (batch, seq), device=device, dtype=dtype)


def padded_ids(batch: int, seq: int, device: Any, index: torch.dtype, options: Any) -> Tensor:
    """Ids of which the first is that of padding, if there is one."""
    ids = make_ids(batch, seq, device, index, options.get("vocabulary_start", 0))
    ids.view(-1)[:1] = options.get("padding_idx", ids.view(-1)[:1])
    return ids


def sample(index: torch.dtype = torch.int64, **options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        weight = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
        return Sample((weight, padded_ids(batch, seq, device, index, options)), options)

    return make


def backward_sample(**options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        gradient = torch.randn(batch, seq, COLUMNS, device=device, dtype=dtype)
        ids = padded_ids(batch, seq, device, torch.int64, options)
        return Sample((gradient, ids), {"num_embeddings": ROWS, **options})

    return make


def features_sample(mask: bool, **options: Any) -> Any:
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        every = torch.arange(batch * seq, device=device).view(batch, seq)
        # All of the first sequence, or -1, 0 and 1 in turn.
        places = every < seq if mask else every % 3 - 1
        count = (seq if batch else 0) if mask else 2
        tables = [torch.randn(rows, COLUMNS, device=device, dtype=dtype) for rows in (ROWS, count)]
        return Sample((*tables, make_ids(batch, seq, device), places), options)

    return make


CASES = in_schema_order(
    [
        case("embedding", sample()),
        case("embedding-scale-int32", sample(torch.int32, scale=2.5)),
        case("embedding-padding", sample(padding_idx=2), reference, conventional=True),
        case("embedding-frequency", sample(scale_grad_by_freq=True, scale=0.5), reference, conventional=True),
        case("embedding-part", sample(scale=2.5, vocabulary_start=20, padding_idx=22), reference, conventional=True),
        # Only dense gradients are differentiable for torch; tests/python/token tests the sparse ones.
        case("embedding-rows", sample(gradient="rows"), differentiable=False),
        case("embedding_backward", backward_sample(scale=0.5), reference_backward),
        case("embedding_backward-padding", backward_sample(padding_idx=2), reference_backward),
        case("embedding_backward-frequency", backward_sample(scale_grad_by_freq=True), reference_backward),
        case("embedding_backward-part", backward_sample(vocabulary_start=20, padding_idx=22), reference_backward),
    ],
    "gradient",
    "weight",
    "ids",
)  # fmt: skip
CASES += [
    case("embedding_with_features", features_sample(True, scale=2.5)),
    case("embedding_with_features-places", features_sample(False)),
]
