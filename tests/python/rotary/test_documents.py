"""Tests cu_seqlens: packed documents, each with its own positions."""

from __future__ import annotations

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from torch import Tensor

LENGTHS = (3, 0, 1, 7, 2)


def starts(device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    ends = torch.tensor(LENGTHS, device=device).cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0)).to(dtype)


def packed(
    device: torch.device, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    options = {"device": device, "dtype": dtype, "requires_grad": requires_grad}
    return torch.randn(tokens, 4, 16, **options), torch.randn(tokens, 2, 16, **options)


def one_by_one(rope: pe.RotaryEmbedding, tensor: Tensor, **options: int) -> Tensor:
    return torch.cat([rope(document, **options) for document in tensor.split(LENGTHS)])


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_as_every_document_alone(
    dtype: torch.dtype, index: torch.dtype, device: torch.device
) -> None:
    query, key = packed(device, dtype)
    rope = pe.RotaryEmbedding(16, layout="thd")
    rotated = rope(query, key, offset=9, cu_seqlens=starts(device, index))
    assert torch.equal(rotated[0], one_by_one(rope, query, offset=9))
    assert torch.equal(rotated[1], one_by_one(rope, key, offset=9))
    rope.rotate_(query, key, offset=9, cu_seqlens=starts(device, index))
    assert torch.equal(query, rotated[0])
    assert torch.equal(key, rotated[1])


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_batch_of_one(layout: str, device: torch.device) -> None:
    query, _ = packed(device)
    expected = one_by_one(pe.RotaryEmbedding(16, layout="thd"), query)
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    rope = pe.RotaryEmbedding(16, layout=layout)
    rotated = rope(query.unsqueeze(0).permute(order), cu_seqlens=starts(device))
    assert torch.equal(rotated, expected.unsqueeze(0).permute(order))
