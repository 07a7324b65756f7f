"""Cases of relative logits."""

from typing import Any

import torch
from torch import Tensor

from support.case import Sample, case, decomposed

HEADS, DIM, ROWS, OTHER = 2, 4, 9, 5

Tensors = tuple[Tensor, ...]


def factors(batch: int, seq: int, device: Any, dtype: torch.dtype, form: str, by_key: bool) -> Tensors:
    """query, table and rows; some rows are -1 or -2."""
    query = torch.randn(batch, HEADS, seq, DIM, device=device, dtype=dtype)
    per_head = (HEADS,) if form == "heads" else ()
    table = torch.randn(*per_head, ROWS, DIM, device=device, dtype=dtype)
    pairs = (OTHER, seq) if by_key else (seq, OTHER)
    leading = {"plain": (), "heads": (batch,), "axes": (3, 1)}[form]
    rows = torch.randint(-2, ROWS, (*leading, *pairs), device=device, dtype=torch.int32)
    return query, table, rows


def sample(form: str = "plain", scores: bool = False, by_key: bool = False, scale: float = 1.0):
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        query, table, rows = factors(batch, seq, device, dtype, form, by_key)
        rows = rows.clamp_min(-1)  # no infinities in tests of derivatives
        pairs = (batch, HEADS, *rows.shape[-2:])
        added = torch.randn(pairs, device=device, dtype=dtype) if scores else None
        return Sample((query, table, rows, scale, by_key, added))

    return make


def in_place_sample(form: str, by_key: bool):
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        query, table, rows = factors(batch, seq, device, dtype, form, by_key)
        scores = torch.randn(batch, HEADS, *rows.shape[-2:], device=device, dtype=dtype)
        return Sample((scores, query, table, rows, 0.5, by_key))

    return make


def backward_sample(form: str, by_key: bool):
    def make(batch: int, seq: int, device: Any, dtype: torch.dtype) -> Sample:
        query, table, rows = factors(batch, seq, device, dtype, form, by_key)
        gradient = torch.randn(batch, HEADS, *rows.shape[-2:], device=device, dtype=dtype)
        return Sample((gradient, query, table, rows, 0.5, by_key))

    return make


def reference_backward(
    gradient: Tensor,
    query: Tensor,
    table: Tensor,
    rows: Tensor,
    scale: float,
    by_key: bool,
    query_gradient: bool = True,
    table_gradient: bool = True,
) -> Tensors:
    def logits(query: Tensor, table: Tensor) -> Tensor:
        return decomposed("relative_logits")(query, table, rows, scale, by_key)

    found: Tensors = torch.func.vjp(logits, query, table)[1](gradient)
    return found


CASES = [
    case("relative_logits", sample()),
    case("relative_logits-heads", sample("heads", scores=True, scale=0.5)),
    case("relative_logits-axes", sample("axes")),
    case("relative_logits-key", sample("heads", by_key=True, scale=-2.0)),
    case("relative_logits_", in_place_sample("heads", False), mutates=True),
    case("relative_logits_-key", in_place_sample("axes", True), mutates=True),
    case("relative_logits_backward", backward_sample("plain", False), reference_backward),
    case("relative_logits_backward-heads", backward_sample("heads", False), reference_backward),
    case("relative_logits_backward-key", backward_sample("axes", True), reference_backward),
]
