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


def test_gradients(device: torch.device) -> None:
    query, key = packed(device, requires_grad=True)
    rope = pe.RotaryEmbedding(16, layout="thd")
    weights = torch.randn_like(query), torch.randn_like(key)
    found = torch.autograd.grad(rope(query, key, cu_seqlens=starts(device)), (query, key), weights)
    expected = torch.autograd.grad(
        (one_by_one(rope, query), one_by_one(rope, key)), (query, key), weights
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_one_compiled_graph_for_all_packings(device: torch.device) -> None:
    rope = pe.RotaryEmbedding(16, layout="thd")
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True, dynamic=True)
    query, _ = packed(device)
    for cu_seqlens in (starts(device), torch.tensor([0, 5, 13], device=device, dtype=torch.int32)):
        assert torch.equal(
            compiled(query, cu_seqlens=cu_seqlens), rope(query, cu_seqlens=cu_seqlens)
        )


def test_vmap_over_documents(device: torch.device) -> None:
    """Copies with different documents, and copies that share them."""
    query, _ = packed(device)
    rope = pe.RotaryEmbedding(16, layout="thd")
    each = torch.stack([starts(device), torch.tensor([0, 2, 2, 2, 9, 13], device=device).int()])
    copies = torch.stack([query, 2 * query])

    def rotated(tensor: Tensor, cu_seqlens: Tensor) -> Tensor:
        return torch.ops.posembed.rotary(tensor, rope.spec.text, None, "thd", 0, False, cu_seqlens)

    own = torch.func.vmap(rotated)(copies, each)
    shared = torch.func.vmap(rotated, in_dims=(0, None))(copies, each[0])
    for i, copy in enumerate(copies):
        assert torch.equal(own[i], rope(copy, cu_seqlens=each[i]))
        assert torch.equal(shared[i], rope(copy, cu_seqlens=each[0]))
