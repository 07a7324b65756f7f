"""Tests ALiBi from GGUF metadata: the architectures that llama.cpp runs with a bias instead of a rotation."""

import numpy as np
import posembed as pe
import pytest
from support.refusals import refused


@pytest.mark.parametrize("architecture", ["bloom", "jais", "jina-bert-v2", "mpt", "refact"])
def test_alibi(architecture: str) -> None:
    says = {"attention.head_count": 12, "attention.max_alibi_bias": 8.0}
    metadata = {f"{architecture}.{key}": value for key, value in says.items()}
    found = pe.ALiBi.from_config({"general.architecture": architecture, **metadata})
    # ggml's soft_max_ext: powers of 2^(-8/8) for 8 heads, then the odd ones of 2^(-4/8).
    right = [2.0 ** -(head + 1) for head in range(8)] + [2.0 ** -(0.5 + head) for head in range(4)]
    np.testing.assert_allclose(found.slopes.numpy(), right, rtol=1e-6)
    assert found.causal == (architecture != "jina-bert-v2")


def test_alibi_of_baichuan_and_mpt() -> None:
    says = {"attention.head_count": 8, "block_count": 40}
    metadata = {f"baichuan.{key}": value for key, value in says.items()}
    baichuan = {"general.architecture": "baichuan", **metadata}
    assert pe.ALiBi.from_config(baichuan).slopes[0].item() == 0.5
    mpt = {"general.architecture": "mpt", "mpt.attention.head_count": 8}
    biased = pe.ALiBi.from_config({**mpt, "mpt.attention.max_alibi_bias": 16.0})
    assert biased.slopes[0].item() == 0.25
    for metadata, message in (
        ({**baichuan, "baichuan.block_count": 32}, "block_count: only the model of 40 layers"),
        (mpt, "attention.max_alibi_bias: missing in the metadata"),
        ({**mpt, "general.architecture": "llama"}, "general.architecture: expected one with ALiBi"),
        ({"general.architecture": "bloom", "bloom.attention.max_alibi_bias": 4.0,
          "bloom.attention.head_count": 8}, "attention.max_alibi_bias: the configuration contra"),
    ):  # fmt: skip
        refused((lambda: pe.ALiBi.from_config(metadata), ValueError, message))
