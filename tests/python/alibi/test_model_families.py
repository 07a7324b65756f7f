"""ALiBi of published models, as transformers computes it: the same attention weights.

Their biases are constant along a row up to what softmax ignores; posembed's are distances.
"""

from __future__ import annotations

import math

import posembed as pe
import pytest
import torch
from support.case import assert_close
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi

HEADS = [1, 3, 8, 12, 16, 25, 71, 112]
SEQ = 33


def scores_of(heads: int) -> Tensor:
    return torch.randn(2, heads, SEQ, SEQ, generator=torch.Generator().manual_seed(heads))


def weights(scores: Tensor) -> Tensor:
    future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


@pytest.mark.parametrize("heads", HEADS)
def test_bloom(heads: int) -> None:
    scores = scores_of(heads)
    theirs = bloom_alibi(torch.ones(2, SEQ), heads, torch.float32).view(2, heads, 1, SEQ)
    ours = pe.functional.alibi_add(scores, pe.ALiBi(heads).slopes)
    assert_close(ours.softmax(-1), weights(scores + theirs), 4e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("max_bias", [8, 6])
def test_mpt(heads: int, max_bias: int) -> None:
    """MPT's bias of the last query is the distance itself."""
    theirs = mpt_alibi(heads, SEQ, alibi_bias_max=max_bias)
    ours = pe.ALiBi(heads, max_bias=max_bias)(1, SEQ)
    assert_close(ours, theirs, 1.2e-7)  # their slopes are a float32 power


@pytest.mark.parametrize("heads", HEADS)
def test_falcon(heads: int) -> None:
    """Falcon rounds slopes to bfloat16 and scales the sum of scores and bias by 1 / sqrt(head_dim)."""
    scores, head_dim = scores_of(heads), 64
    theirs = falcon_alibi(torch.ones(2, SEQ), heads, torch.float32).view(2, heads, 1, SEQ)
    slopes = pe.ALiBi(heads).slopes.bfloat16().float() / math.sqrt(head_dim)
    ours = scores / math.sqrt(head_dim)
    pe.ALiBi(heads, slopes=slopes).add_(ours)
    expected = weights((scores + theirs) / math.sqrt(head_dim))
    # theirs is slope * key in bfloat16, which rounds by up to 2^-9 of the bias
    worst = float(theirs.abs().max()) * 2**-8 / math.sqrt(head_dim)
    assert_close(ours.softmax(-1), expected, worst + 1e-6)


@pytest.mark.parametrize("heads", [8, 12])
def test_heads_of_a_tensor_parallel_shard(heads: int) -> None:
    """Bloom's own shards cut the whole model's slopes."""
    theirs = bloom_alibi(torch.ones(1, SEQ), heads, torch.float32)[heads // 2 :]
    shard = pe.ALiBi(heads // 2, total_heads=heads, head_start=heads // 2)
    assert_close(shard.slopes, theirs[:, 0, 1], 1.2e-7)
