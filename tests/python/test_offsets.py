"""Tests of offsets that are tensors: the position of each sample's first token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from torch import Tensor

OFFSETS = [7, 0, 19]


def rotary(layout: str, shape: tuple[int, ...]) -> Any:
    def make(modules: Any) -> tuple[Any, Callable[[int | Tensor], Any], int]:
        rope = modules.RotaryEmbedding(8, layout=layout)
        query = torch.randn(*shape, 8)
        return rope, lambda x, offset: rope(x, x, offset=offset)[1], query

    return make


def learned(modules: Any) -> Any:
    torch.manual_seed(0)
    module = modules.LearnedPositionalEmbedding(30, 8)
    return module, lambda x, offset: module(x, offset=offset), torch.randn(3, 5, 8)


def sinusoidal(modules: Any) -> Any:
    module = modules.SinusoidalPositionalEmbedding(8)
    return module, lambda x, offset: module(x, offset=offset), torch.randn(3, 5, 8)


def whole_input(modules: Any) -> Any:
    torch.manual_seed(0)
    module = modules.InputEmbedding(11, 8, positions="learned", max_positions=30)
    return module, lambda x, offset: module(x, offset=offset), torch.randint(11, (3, 5))


def in_place(modules: Any) -> Any:
    rope = modules.RotaryEmbedding(8)
    return rope, lambda x, offset: rope.rotate_(x.clone(), offset=offset), torch.randn(3, 5, 2, 8)


CASES = {
    "bshd": (rotary("bshd", (3, 5, 2)), 0),
    "bhsd": (rotary("bhsd", (3, 2, 5)), 0),
    "sbhd": (rotary("sbhd", (5, 3, 2)), 1),
    "in place": (in_place, 0),
    "learned": (learned, 0),
    "sinusoidal": (sinusoidal, 0),
    "input": (whole_input, 0),
}


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("name", CASES)
def test_each_sample_begins_at_its_own(name: str, modules: Any, device: torch.device) -> None:
    make, batch = CASES[name]
    module, call, x = make(modules)
    module.to(device)
    x = x.to(device)
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor(OFFSETS, dtype=dtype, device=device)
        found = call(x, offsets).split(1, batch)
        for part, alone, offset in zip(found, x.split(1, batch), OFFSETS, strict=True):
            assert torch.equal(part, call(alone, offset))


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
def test_what_is_refused(modules: Any) -> None:
    rope = modules.RotaryEmbedding(8)
    x = torch.randn(3, 5, 2, 8)
    offsets = torch.tensor(OFFSETS)
    with pytest.raises(
        ValueError, match=r"offset: expected 0 where positions are given, got \[3\]"
    ):
        rope(x, positions=torch.arange(5), offset=offsets)
    with pytest.raises(TypeError, match="offset: expected int32 or int64"):
        rope(x, offset=offsets.float())
    with pytest.raises(ValueError, match=r"expected a number or \[batch\] with batch 3, got \[2\]"):
        rope(x, offset=offsets[:2])
    with pytest.raises(ValueError, match="offset: expected a number where there is no batch"):
        modules.RotaryEmbedding(8, layout="thd")(x[0], offset=offsets)
    with pytest.raises(ValueError, match="offset: expected a number where there is no batch"):
        modules.SinusoidalPositionalEmbedding(8)(x[0, 0], offset=offsets)
    counted = modules.InputEmbedding(
        11, 8, positions="learned", max_positions=9, padding_idx=1, position_rule="roberta"
    )
    with pytest.raises(ValueError, match="offset: expected a number where padding is counted"):
        counted(torch.zeros(3, 5, dtype=torch.int64), offset=offsets)


def test_in_compiled_functions() -> None:
    rope = pe.RotaryEmbedding(8)
    x, offsets = torch.randn(3, 5, 2, 8), torch.tensor(OFFSETS)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, offset=offsets), rope(x, offset=offsets))


@pytest.mark.parametrize("modules", [pe, pe.cpp], ids=["python", "cpp"])
def test_positions_that_would_wrap_are_refused(modules: Any) -> None:
    last = 2**63 - 3  # the third position does not fit
    rows, ids = torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=torch.int64)
    embed = modules.InputEmbedding(11, 8, positions="sinusoidal")
    for call in (
        lambda: modules.RotaryEmbedding(8)(rows.unsqueeze(2), offset=last),
        lambda: modules.SinusoidalPositionalEmbedding(8)(rows, offset=last),
        lambda: embed(ids, offset=last),
    ):
        with pytest.raises(ValueError, match=r"offset: expected a sum below 2\^63, got 92"):
            call()
