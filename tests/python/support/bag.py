"""Cases of bags of tokens."""

from typing import Any

import torch
from torch import Tensor

from support.case import Sample, case, decomposed, in_schema_order, transposed

ROWS, COLUMNS = 9, 6


def reference_max(
    weight: Tensor, ids: Tensor, offsets: None = None, padding_idx: int = -1, *_: Any
) -> tuple[Tensor, Tensor]:
    """The maximum, and the first place of each of its elements."""
    rows = torch.where((ids != padding_idx).unsqueeze(-1), weight[ids.long()], -torch.inf)
    rows = torch.cat([rows, rows.new_full((len(ids), 1, weight.shape[1]), -torch.inf)], 1)
    largest, places = rows.max(1)
    empty = largest == -torch.inf
    first = torch.arange(len(ids), device=ids.device).unsqueeze(-1) * ids.shape[1]
    return largest.masked_fill(empty, 0.0), (places + first).masked_fill(empty, -1)


def reference_backward(
    gradient: Tensor,
    num_embeddings: int,
    ids: Tensor,
    offsets: Tensor | None = None,
    padding_idx: int = -1,
    include_last_offset: bool = False,
    mode: str = "sum",
    weights: Tensor | None = None,
    maxima: Tensor | None = None,
) -> Tensor:
    zeros = gradient.new_zeros(num_embeddings, gradient.shape[1])
    if maxima is not None:
        rows = torch.cat([ids.flatten().long(), ids.new_zeros(1)])[maxima]  # -1 is the last place
        return zeros.scatter_add(0, rows, gradient * (maxima >= 0))

    def pooled(weight: Tensor) -> Tensor:
        places = (ids, offsets, padding_idx, include_last_offset)
        return decomposed("token_bag")(weight, *places, mode, weights)

    return transposed(pooled, zeros, gradient)


def reference_weights_backward(gradient: Tensor, weight: Tensor, ids: Tensor, *bags: Any, **options: Any) -> Tensor:
    def pooled(weights: Tensor) -> Tensor:
        return decomposed("token_bag")(weight, ids, *bags, **options, weights=weights)

    return transposed(pooled, weight.new_zeros(ids.shape), gradient)


class Maker:
    """Makes ids, offsets and other arguments of a call, in sizes given by batch and seq."""

    def __init__(
        self, *, offsets: bool = False, weights: bool = False, index: torch.dtype = torch.int64, **options: Any
    ) -> None:
        self.offsets, self.weights, self.index, self.options = offsets, weights, index, options

    def places(self, batch: int, seq: int, device: Any, dtype: torch.dtype) -> list[Any]:
        """Ids, offsets and weights."""
        shape = (seq,) if self.offsets else (batch, seq)
        ids = torch.randint(0, ROWS, shape, device=device, dtype=self.index)
        weights = torch.randn(shape, device=device, dtype=dtype) if self.weights else None
        if not self.offsets:
            return [ids, None, weights]
        offsets = torch.randint(0, seq + 1, (batch,), device=device).sort().values
        offsets[:1] = 0
        return [ids, offsets.to(self.index), weights]

    def pool(self, batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        weight = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
        return Sample((weight, *self.places(batch, seq, device, dtype)), self.options)

    def pool_max(self, batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        sample = self.pool(batch, seq, device, dtype)
        return Sample(sample.args[:-1], self.options)

    def backward(self, batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        ids, offsets, weights = self.places(batch, seq, device, dtype)
        gradient = torch.randn(batch, COLUMNS, device=device, dtype=dtype)
        maxima = None
        if self.options["mode"] == "max":
            table = torch.randn(ROWS, COLUMNS, device=device)
            _, maxima = reference_max(table, ids)
        args = (gradient, ids, offsets, weights, maxima)
        return Sample(args, {"num_embeddings": ROWS, **self.options})

    def weights_backward(self, batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        ids, offsets, _ = self.places(batch, seq, device, dtype)
        weight = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
        gradient = torch.randn(batch, COLUMNS, device=device, dtype=dtype)
        return Sample((gradient, weight, ids, offsets), self.options)


CASES = in_schema_order(
    [
        case("token_bag", Maker().pool),
        case("token_bag-weights", Maker(weights=True, padding_idx=2).pool),
        case("token_bag-offsets", Maker(offsets=True, weights=True).pool),
        case("token_bag-mean", Maker(offsets=True, index=torch.int32, mode="mean", padding_idx=1).pool),
        case("token_bag-max", Maker(offsets=True, mode="max", padding_idx=1).pool),
        case("token_bag_max", Maker(padding_idx=1).pool_max, reference_max),
        case("token_bag_backward", Maker(weights=True, mode="sum", padding_idx=2).backward, reference_backward),
        case("token_bag_backward-mean", Maker(offsets=True, mode="mean", padding_idx=2).backward, reference_backward),
        case("token_bag_backward-max", Maker(mode="max").backward, reference_backward),
        case("token_bag_weights_backward", Maker(offsets=True, padding_idx=2).weights_backward, reference_weights_backward),
    ],
    "gradient",
    "weight",
    "ids",
    "offsets",
    "weights",
    "maxima",
)  # fmt: skip
