"""Tests that a key may consist of only the rotated window, with the results of a whole key."""

from __future__ import annotations

from typing import Any

import posembed as pe
import pytest
import torch
from torch import Tensor

WINDOW: dict[str, Any] = {"rotary_dim": 8, "rotary_start": 4}


def make(**place: Any) -> tuple[Tensor, Tensor]:
    """A query and a whole key."""
    torch.manual_seed(0)
    return torch.randn(1, 5, 3, 12, **place), torch.randn(1, 5, 1, 12, **place)


@pytest.mark.parametrize(
    "options",
    [{}, {"scaling": pe.XPosScaling(scale_base=16.0)}, {"numerics": "float32_product"}],
    ids=str,
)
def test_turns_as_in_a_whole_key(options: dict[str, Any], device: torch.device) -> None:
    query, key = make(device=device)
    window = key[..., 4:].clone().requires_grad_()
    key.requires_grad_()
    spec = pe.RotarySpec(12, **WINDOW, **options)
    whole = pe.functional.rotary(query, key, spec=spec)[1][..., 4:]
    alone = pe.functional.rotary(query, window, spec=spec)[1]
    assert torch.equal(alone, whole)
    (expected,) = torch.autograd.grad(whole.square().sum(), key)
    (found,) = torch.autograd.grad(alone.square().sum(), window)
    assert torch.equal(found, expected[..., 4:])
