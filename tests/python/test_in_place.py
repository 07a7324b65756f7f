"""Tests that in-place functions return their tensors, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from torch import Tensor

SPEC = pe.RotarySpec(16)
MLA = pe.RotarySpec(24, rotary_dim=8, rotary_start=16)
PLACES = torch.arange(3)
ROPE = pe.RotaryEmbedding(16)


def caches() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)


# A call, and the tensors that it writes.
Written = tuple[Callable[..., Any], tuple[Tensor, ...]]

CALLS: dict[str, Callable[[], Written]] = {
    "rotary_": lambda: (lambda q: functional.rotary_(q, spec=SPEC), (torch.randn(1, 3, 2, 16),)),
    "rotary_, pair": lambda: (
        lambda q, k: functional.rotary_(q, k, spec=SPEC),
        (torch.randn(1, 3, 2, 16), torch.randn(1, 3, 1, 16)),
    ),
    "rotary, out": lambda: (
        lambda q: functional.rotary(torch.ones(1, 3, 2, 16), spec=SPEC, out=q),
        (torch.randn(1, 3, 2, 16),),
    ),
    "rerotate_": lambda: (
        lambda k: functional.rerotate_(k, PLACES, PLACES + 1, spec=SPEC),
        (torch.randn(1, 3, 2, 16),),
    ),
    "norm_rotary_": lambda: (
        lambda q, k: functional.norm_rotary_(q, k, torch.ones(16), torch.ones(16), spec=SPEC),
        (torch.randn(1, 3, 2, 16), torch.randn(1, 3, 1, 16)),
    ),
    "rotary_cache_": lambda: (
        lambda q: functional.rotary_cache_(
            q, torch.ones(3, 2, 16), torch.ones(3, 2, 16), *caches(), PLACES, spec=SPEC
        ),
        (torch.randn(3, 4, 16),),
    ),
    "rotary_cache_, query_out": lambda: (
        lambda q: functional.rotary_cache_(
            torch.ones(3, 4, 16),
            torch.ones(3, 2, 16),
            torch.ones(3, 2, 16),
            *caches(),
            PLACES,
            spec=SPEC,
            query_out=q,
        ),
        (torch.randn(3, 4, 16),),
    ),
    "mla_rotary_cache_": lambda: (
        lambda q: functional.mla_rotary_cache_(
            q, torch.ones(3, 32), torch.ones(3, 8), torch.zeros(2, 4, 40), PLACES, spec=MLA
        ),
        (torch.randn(3, 4, 24),),
    ),
    "mla_rotary_cache_, query_out": lambda: (
        lambda q: functional.mla_rotary_cache_(
            torch.ones(3, 4, 24),
            torch.ones(3, 32),
            torch.ones(3, 8),
            torch.zeros(2, 4, 40),
            PLACES,
            spec=MLA,
            query_out=q,
        ),
        (torch.randn(3, 4, 24),),
    ),
    "alibi_bias, out": lambda: (
        lambda b: functional.alibi_bias(functional.alibi_slopes(2), 3, 3, out=b),
        (torch.randn(2, 3, 3),),
    ),
    "alibi_add_": lambda: (
        lambda s: functional.alibi_add_(s, functional.alibi_slopes(2)),
        (torch.randn(1, 2, 3, 3),),
    ),
    "alibi_softmax_": lambda: (
        lambda s: functional.alibi_softmax_(s, functional.alibi_slopes(2)),
        (torch.randn(1, 2, 3, 3),),
    ),
    "RotaryEmbedding.rotate_": lambda: (ROPE.rotate_, (torch.randn(1, 3, 2, 16),)),
    "RotaryEmbedding.rotate_, pair": lambda: (
        ROPE.rotate_,
        (torch.randn(1, 3, 2, 16), torch.randn(1, 3, 1, 16)),
    ),
    "RotaryEmbedding.rerotate_": lambda: (
        lambda k: ROPE.rerotate_(k, PLACES, PLACES + 1),
        (torch.randn(1, 3, 2, 16),),
    ),
    "ALiBi.add_": lambda: (pe.ALiBi(2).add_, (torch.randn(1, 2, 3, 3),)),
    "ALiBi.softmax_": lambda: (pe.ALiBi(2).softmax_, (torch.randn(1, 2, 3, 3),)),
    "cpp.RotaryEmbedding.rotate_": lambda: (
        pe.cpp.RotaryEmbedding(16).rotate_,
        (torch.randn(1, 3, 2, 16),),
    ),
    "cpp.RotaryEmbedding.rotate_, pair": lambda: (
        pe.cpp.RotaryEmbedding(16).rotate_,
        (torch.randn(1, 3, 2, 16), torch.randn(1, 3, 1, 16)),
    ),
    "cpp.RotaryEmbedding.rerotate_": lambda: (
        lambda k: pe.cpp.RotaryEmbedding(16).rerotate_(k, PLACES, PLACES + 1),
        (torch.randn(1, 3, 2, 16),),
    ),
    "cpp.ALiBi.add_": lambda: (pe.cpp.ALiBi(2).add_, (torch.randn(1, 2, 3, 3),)),
    "cpp.ALiBi.softmax_": lambda: (pe.cpp.ALiBi(2).softmax_, (torch.randn(1, 2, 3, 3),)),
}


def check(call: Callable[..., Any], written: tuple[Tensor, ...]) -> None:
    before = [tensor.clone() for tensor in written]
    returned = call(*written)
    assert isinstance(returned, tuple) == (len(written) > 1)
    results = returned if isinstance(returned, tuple) else (returned,)
    for result, tensor, old in zip(results, written, before, strict=True):
        assert result is tensor
        assert not torch.equal(tensor, old)


@pytest.mark.parametrize("name", CALLS)
def test_return_what_they_write(name: str) -> None:
    call, written = CALLS[name]()
    with torch.no_grad():
        check(call, written)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("cpp.")])
def test_return_what_they_write_compiled(name: str) -> None:
    call, written = CALLS[name]()
    with torch.no_grad():
        check(torch.compile(call, fullgraph=True, backend="aot_eager"), written)


# ------------------------------------------------------------------------- tensors without elements


def without_elements(*shape: int) -> Tensor:
    """As numpy makes it: all strides are 0."""
    assert 0 in shape
    return torch.empty(0).as_strided(shape, (0,) * len(shape))


def rows(batch: int, seq: int, heads: int, dim: int = 16) -> Tensor:
    return without_elements(batch, seq, heads, dim)


NO_PLACES = torch.empty(0, dtype=torch.int64)
ONES = torch.ones(16)

EMPTY: dict[str, Callable[[], Any]] = {
    "rotary_, no batch": lambda: functional.rotary_(rows(0, 3, 2), spec=SPEC),
    "rotary_, no tokens": lambda: functional.rotary_(rows(2, 0, 2), rows(2, 0, 1), spec=SPEC),
    "rotary_, no heads": lambda: functional.rotary_(rows(2, 3, 0), rows(2, 3, 0), spec=SPEC),
    "rotary_, learned": lambda: functional.rotary_(
        rows(0, 3, 2), spec=SPEC, frequencies=SPEC.frequencies().float()
    ),
    "rotary_, float32": lambda: functional.rotary_(
        rows(0, 3, 2), spec=pe.RotarySpec(16, numerics="float32")
    ),
    "rotary, out": lambda: functional.rotary(rows(0, 3, 2), spec=SPEC, out=rows(0, 3, 2)),
    "rotary, pair, out": lambda: functional.rotary(
        rows(2, 0, 2), rows(2, 0, 1), spec=SPEC, out=(rows(2, 0, 2), rows(2, 0, 1))
    ),
    "rerotate_": lambda: functional.rerotate_(rows(2, 0, 1), NO_PLACES, NO_PLACES, spec=SPEC),
    "norm_rotary_": lambda: functional.norm_rotary_(
        rows(2, 0, 2), rows(2, 0, 1), ONES, ONES, spec=SPEC
    ),
    "norm_rotary_, no heads": lambda: functional.norm_rotary_(
        rows(2, 3, 0), rows(2, 3, 0), ONES, ONES, spec=SPEC
    ),
    "rotary_cache_": lambda: functional.rotary_cache_(
        without_elements(0, 4, 16),
        without_elements(0, 2, 16),
        without_elements(0, 2, 16),
        without_elements(0, 4, 2, 16),
        without_elements(0, 4, 2, 16),
        NO_PLACES,
        spec=SPEC,
        query_out=without_elements(0, 4, 16),
        rotate_key=True,
    ),
    "mla_rotary_cache_": lambda: functional.mla_rotary_cache_(
        without_elements(0, 4, 24),
        without_elements(0, 32),
        without_elements(0, 8),
        without_elements(0, 4, 40),
        NO_PLACES,
        spec=MLA,
    ),
    "alibi_bias, out": lambda: functional.alibi_bias(
        functional.alibi_slopes(2), 0, 3, out=without_elements(2, 0, 3)
    ),
    "alibi_add_": lambda: functional.alibi_add_(
        without_elements(0, 2, 3, 3), functional.alibi_slopes(2)
    ),
    "alibi_softmax_": lambda: functional.alibi_softmax_(
        without_elements(1, 2, 0, 3), functional.alibi_slopes(2)
    ),
    "alibi_softmax_, no keys": lambda: functional.alibi_softmax_(
        without_elements(1, 2, 3, 0), functional.alibi_slopes(2), query_offset=0
    ),
    "RotaryEmbedding.rotate_": lambda: ROPE.rotate_(rows(0, 3, 2), rows(0, 3, 1)),
    "ALiBi.add_": lambda: pe.ALiBi(2).add_(without_elements(0, 2, 3, 3)),
    "ALiBi.softmax_": lambda: pe.ALiBi(2).softmax_(without_elements(0, 2, 3, 3)),
    "ALiBi, out": lambda: pe.ALiBi(2)(0, 3, out=without_elements(2, 0, 3)),
    "cpp.RotaryEmbedding.rotate_": lambda: pe.cpp.RotaryEmbedding(16).rotate_(rows(2, 0, 2)),
    "cpp.ALiBi.add_": lambda: pe.cpp.ALiBi(2).add_(without_elements(0, 2, 3, 3)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_take_tensors_without_elements(name: str) -> None:
    with torch.no_grad():
        returned = EMPTY[name]()
    for result in returned if isinstance(returned, tuple) else (returned,):
        assert result.numel() == 0


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_inference_mode_are_written_or_refused(name: str) -> None:
    """Never both: torch itself refuses some after they were written."""
    call, tensors = CALLS[name]()
    with torch.inference_mode():
        given = [tensor.clone() for tensor in tensors]
    try:
        call(*given)
        refused = False
    except (ValueError, RuntimeError):
        refused = True
    assert all(map(torch.equal, given, tensors)) == refused
    if "rerotate_" in name:
        assert refused
    with torch.inference_mode():
        call(*given)
    assert not all(map(torch.equal, given, tensors))
