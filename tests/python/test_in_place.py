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
