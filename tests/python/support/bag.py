"""Slow, obvious references for bags of tokens, and the cases of their operators."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from support.case import OperatorCase, Sample, in_schema_order

ROWS, COLUMNS = 9, 6


def bags(
    ids: Tensor, offsets: Tensor | None, padding_idx: int, include_last_offset: bool
) -> list[list[int]]:
    """The places of each bag that count."""
    flat = ids.flatten().tolist()
    if offsets is None:
        size = ids.shape[1]
        ends = [(i * size, (i + 1) * size) for i in range(ids.shape[0])]
    else:
        bounds = [*offsets.tolist(), *([] if include_last_offset else [len(flat)])]
        ends = list(itertools.pairwise(bounds))
    return [[p for p in range(*end) if flat[p] != padding_idx] for end in ends]


def reference(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    mode: str = "sum",
    padding_idx: int = -1,
    include_last_offset: bool = False,
    gradient: str = "dense",
) -> Tensor:
    rows = weight[ids.flatten().long()]
    if weights is not None:
        rows = rows * weights.flatten().unsqueeze(1)
    results = [weight.new_zeros(0, weight.shape[1])]
    for places in bags(ids, offsets, padding_idx, include_last_offset):
        if not places:
            pooled = weight.new_zeros(weight.shape[1])
        elif mode == "max":
            pooled = rows[places].max(0).values
        else:
            pooled = rows[places].sum(0) / (len(places) if mode == "mean" else 1)
        results.append(pooled.unsqueeze(0))
    return torch.cat(results)


def reference_max(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    *,
    padding_idx: int = -1,
    include_last_offset: bool = False,
    gradient: str = "dense",
) -> tuple[Tensor, Tensor]:
    """The maximum, and the first place of each of its elements."""
    places = [
        [
            max(
                bag,
                key=lambda p: (float(weight.detach()[ids.flatten()[p], column]), -p),
                default=-1,
            )
            for column in range(weight.shape[1])
        ]
        for bag in bags(ids, offsets, padding_idx, include_last_offset)
    ]
    options = {"mode": "max", "padding_idx": padding_idx}
    pooled = reference(weight, ids, offsets, include_last_offset=include_last_offset, **options)
    return pooled, torch.tensor(places, device=ids.device).long().view_as(pooled)


def reference_backward(
    gradient: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    maxima: Tensor | None = None,
    *,
    num_embeddings: int,
    mode: str = "sum",
    padding_idx: int = -1,
    include_last_offset: bool = False,
) -> Tensor:
    """Adds every place's part to its row, without assignment, so that it is differentiable."""
    flat = ids.flatten().tolist()
    parts = []
    for number, places in enumerate(bags(ids, offsets, padding_idx, include_last_offset)):
        for place in places:
            part = gradient[number] / (len(places) if mode == "mean" else 1)
            if weights is not None:
                part = part * weights.flatten()[place]
            if maxima is not None:
                part = torch.where(maxima[number] == place, part, 0.0)
            parts.append((flat[place], part))
    zeros = gradient.new_zeros(gradient.shape[1])
    return torch.stack(
        [sum((p for row, p in parts if row == r), zeros) for r in range(num_embeddings)]
    )


def reference_weights_backward(
    gradient: Tensor,
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    *,
    padding_idx: int = -1,
    include_last_offset: bool = False,
) -> Tensor:
    rows = weight[ids.flatten().long()]
    parts = {
        place: gradient[number] @ rows[place]
        for number, places in enumerate(bags(ids, offsets, padding_idx, include_last_offset))
        for place in places
    }
    zero = gradient.new_zeros(())
    products = [parts.get(place, zero) for place in range(ids.numel())]
    return torch.stack(products).view_as(ids) if products else gradient.new_zeros(ids.shape)


class Maker:
    """Makes ids, offsets and other arguments of a call, in sizes given by batch and seq."""

    def __init__(
        self,
        *,
        offsets: bool = False,
        weights: bool = False,
        index: torch.dtype = torch.int64,
        **options: Any,
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
            options = {k: v for k, v in self.options.items() if k != "mode"}
            table = torch.randn(ROWS, COLUMNS, device=device)
            _, maxima = reference_max(table, ids, offsets, **options)
        args = (gradient, ids, offsets, weights, maxima)
        return Sample(args, {"num_embeddings": ROWS, **self.options})

    def weights_backward(self, batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        ids, offsets, _ = self.places(batch, seq, device, dtype)
        weight = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype)
        gradient = torch.randn(batch, COLUMNS, device=device, dtype=dtype)
        return Sample((gradient, weight, ids, offsets), self.options)


def case(operator: str, name: str, make: Any, expected: Any) -> OperatorCase:
    overload = getattr(torch.ops.posembed, operator).default
    return OperatorCase("-".join(filter(None, [operator, name])), overload, make, expected)


CASES = in_schema_order(
    [
        case("token_bag", "", Maker().pool, reference),
        case("token_bag", "weights", Maker(weights=True, padding_idx=2).pool, reference),
        case("token_bag", "offsets", Maker(offsets=True, weights=True).pool, reference),
        case(
            "token_bag",
            "mean",
            Maker(
                offsets=True,
                index=torch.int32,
                mode="mean",
                padding_idx=1,
            ).pool,
            reference,
        ),
        case("token_bag", "max", Maker(offsets=True, mode="max", padding_idx=1).pool, reference),
        case("token_bag_max", "", Maker(padding_idx=1).pool_max, reference_max),
        case(
            "token_bag_backward",
            "",
            Maker(weights=True, mode="sum", padding_idx=2).backward,
            reference_backward,
        ),
        case(
            "token_bag_backward",
            "mean",
            Maker(offsets=True, mode="mean", padding_idx=2).backward,
            reference_backward,
        ),
        case("token_bag_backward", "max", Maker(mode="max").backward, reference_backward),
        case(
            "token_bag_weights_backward",
            "",
            Maker(offsets=True, padding_idx=2).weights_backward,
            reference_weights_backward,
        ),
    ],
    "gradient",
    "weight",
    "ids",
    "offsets",
    "weights",
    "maxima",
)
