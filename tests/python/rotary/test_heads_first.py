"""Tests [batch, heads, seq, head_dim] in memory, where tokens of a head are rotated together."""

import posembed as pe
import pytest
import torch
from torch import Tensor

BATCH, SEQ, HEAD_DIM, ROTARY_DIM = 3, 517, 128, 96  # a partial tile, and components to copy


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous()


def positions_with_gaps(device: torch.device) -> Tensor:
    """Positions with -1 for some tokens, in some tiles only."""
    positions = torch.arange(BATCH * SEQ, device=device).reshape(BATCH, SEQ) * 3
    positions[1, 40:200:9] = -1
    return positions


# The kernel writes 24 heads past the caches, 2 not.
@pytest.mark.parametrize("heads", [24, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_tokens_first(heads: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    query = torch.randn(BATCH, SEQ, heads, HEAD_DIM, device=device).to(dtype)
    key = torch.randn(BATCH, SEQ, 1, HEAD_DIM, device=device).to(dtype)
    options = {"rotary_dim": ROTARY_DIM, "interleaved": interleaved}
    tokens_first = pe.RotaryEmbedding(HEAD_DIM, **options)
    rope = pe.RotaryEmbedding(HEAD_DIM, layout="bhsd", **options)
    for positions in (None, positions_with_gaps(query.device)):
        expected = [heads_first(x) for x in tokens_first(query, key, positions)]
        found = heads_first(query), heads_first(key)
        for ours, theirs in zip(rope(*found, positions), expected, strict=True):
            assert torch.equal(ours, theirs)
        rope.rotate_(*found, positions)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("heads", [24, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_frequencies_have_the_same_bits(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """For any order of tokens and heads in the data and in their gradient."""
    torch.manual_seed(0)
    data, gradient = torch.randn(2, BATCH, SEQ, heads, HEAD_DIM, device=device).to(dtype)
    positions = positions_with_gaps(data.device)
    rope = pe.RotaryEmbedding(HEAD_DIM, rotary_dim=ROTARY_DIM, learned_frequencies=True).to(device)

    def of_frequencies(data: Tensor, gradient: Tensor) -> Tensor:
        return torch.autograd.grad(rope(data, positions=positions), rope.frequencies, gradient)[0]

    expected = of_frequencies(data, gradient)
    moved_data, moved_gradient = (heads_first(x).transpose(1, 2) for x in (data, gradient))
    assert torch.equal(of_frequencies(moved_data, gradient), expected)
    assert torch.equal(of_frequencies(data, moved_gradient), expected)
    assert torch.equal(of_frequencies(moved_data, moved_gradient), expected)
