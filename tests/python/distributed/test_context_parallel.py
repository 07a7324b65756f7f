"""Tests context parallelism: parts of a sequence give what the whole sequence gives."""

from typing import Any

import posembed as pe
import pytest
import torch
from posembed.integrations.distributed import ContextPart, context_part
from support.processes import Processes
from support.refusals import refused
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh

LENGTH, HEADS, DIM = 16, 2, 8
DOCUMENTS = {
    "one": None,
    "packed": torch.tensor([0, 3, 3, 9, 16]),  # cut by each border of chunks, one is empty
}


def mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def gathered(part: Tensor, zigzag: bool) -> Tensor:
    """[batch, heads, tokens, width] of all processes, in the order of the sequence."""
    size = torch.distributed.get_world_size()
    whole = all_gather_tensor_autograd(part.contiguous(), 2, mesh())
    parts = [context_part(LENGTH, mesh(), zigzag=zigzag, rank=rank) for rank in range(size)]
    return whole[:, :, torch.cat([each.indices for each in parts]).argsort()]


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, HEADS, LENGTH, DIM, generator=generator, dtype=torch.float64) for _ in range(3)]


def visible(documents: Tensor | None) -> Tensor:
    """[query, key]: earlier keys of the same document."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if documents is None:
        return mask
    of_token = torch.bucketize(torch.arange(LENGTH), documents, right=True)
    return mask & (of_token[:, None] == of_token)


def whole_rotation(rope: nn.Module, documents: Tensor | None) -> Tensor:
    query, key, value = tensors()
    boundaries = torch.tensor([0, LENGTH]) if documents is None else documents
    query, key = rope(query, key, cu_seqlens=boundaries)
    attention = nn.functional.scaled_dot_product_attention
    return attention(query, key, value, attn_mask=visible(documents))


def part_rotation(rope: nn.Module, part: ContextPart, zigzag: bool) -> Tensor:
    """Each piece of a document attends to its document, from the start to the piece's end."""
    query, key, value = (tensor[:, :, part.indices] for tensor in tensors())
    query, key = rope(query, key, positions=part.positions)
    key, value = gathered(key, zigzag), gathered(value, zigzag)
    results = []
    for start, end in zip(part.cu_seqlens[:-1], part.cu_seqlens[1:], strict=True):
        last = int(part.indices[end - 1]) + 1
        keys = slice(last - int(part.positions[end - 1]) - 1, last)
        seen = visible(None)[part.positions[start:end], : last - keys.start]
        results.append(
            nn.functional.scaled_dot_product_attention(
                query[:, :, start:end], key[:, :, keys], value[:, :, keys], attn_mask=seen
            )
        )
    return torch.cat(results, dim=2)


def part_alibi(alibi: pe.ALiBi, part: ContextPart, zigzag: bool, documents: Tensor | None) -> Tensor:
    query, key, value = (tensor[:, :, part.indices] for tensor in tensors())
    key, value = gathered(key, zigzag), gathered(value, zigzag)
    results, first = [], 0
    for start, end in part.chunks:
        own = query[:, :, first : first + end - start]
        positions = {"query_offset": start, "cu_seqlens": documents}
        results.append(alibi.attention(own, key, value, **positions))
        first += end - start
    return torch.cat(results, dim=2)


def compare(module: nn.Module, whole: Tensor, part: Tensor, indices: Tensor) -> None:
    """Results, and the sum over processes of the gradient of the module's parameter."""
    torch.testing.assert_close(part, whole[:, :, indices])
    parameters = list(module.parameters())
    (expected,) = torch.autograd.grad(whole.square().sum(), parameters)
    (found,) = torch.autograd.grad(part.square().sum(), parameters)
    torch.distributed.all_reduce(found)
    torch.testing.assert_close(found, expected)


def check(zigzag: bool, name: str) -> None:
    documents = DOCUMENTS[name]
    part = context_part(LENGTH, mesh(), zigzag=zigzag, cu_seqlens=documents)
    options: dict[str, Any] = {"dtype": torch.float64}
    rope = pe.RotaryEmbedding(DIM, layout="bhsd", learned_frequencies=True, **options)
    whole = whole_rotation(rope, documents)
    compare(rope, whole, part_rotation(rope, part, zigzag), part.indices)
    alibi = pe.ALiBi(HEADS, learned=True, **options)
    whole = alibi.attention(*tensors(), cu_seqlens=documents)
    compare(alibi, whole, part_alibi(alibi, part, zigzag, documents), part.indices)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("zigzag", [False, True], ids=["plain", "zigzag"])
def test_a_cut_sequence(zigzag: bool, documents: str, two: Processes) -> None:
    two.run(check, zigzag, documents)


def test_four_parts(four: Processes) -> None:
    four.run(check, True, "packed")


def check_parts() -> tuple[Any, ...]:
    documents = torch.tensor([0, 4, 8], dtype=torch.int32)
    part = context_part(8, mesh(), zigzag=True, cu_seqlens=documents)
    uneven = context_part(5, mesh())
    refused(
        (lambda: context_part(6, mesh(), zigzag=True), ValueError, "seq_len: expected a multiple of 4, got 6"),
        (lambda: context_part(9, mesh(), cu_seqlens=documents), ValueError, "cu_seqlens: expected a list from 0 to 9, got tensor"),
    )  # fmt: skip
    numbers = (part.indices.tolist(), part.positions.tolist(), part.cu_seqlens.tolist())
    return (*numbers, part.chunks, uneven.indices.tolist())


def test_parts(two: Processes) -> None:
    assert two.run(check_parts) == [
        ([0, 1, 6, 7], [0, 1, 2, 3], [0, 2, 4], ((0, 2), (6, 8)), [0, 1, 2]),
        ([2, 3, 4, 5], [2, 3, 0, 1], [0, 2, 4], ((2, 4), (4, 6)), [3, 4]),
    ]
