"""Tests that a module that knows its model's heads refuses tensors of another layout."""

import copy
import pickle
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.models import reading
from support.refusals import refused
from torch import Tensor

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rope_theta": 1e4,
    "rope_interleave": True,
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {"model_type": "qwen2_vl", "embed_dim": 320, "num_heads": 4, "depth": 1},
}
REFUSED = "expected .* heads.*, got .*heads=None takes"


def of(heads: int, width: int, layout: str = "bshd") -> Tensor:
    shape = {"bshd": (2, 5, heads), "bhsd": (2, heads, 5), "sbhd": (5, 2, heads), "thd": (5, heads)}
    return torch.randn(*shape[layout], width)


@pytest.mark.parametrize("kind", [pe.RotaryEmbedding, pe.cpp.RotaryEmbedding])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_heads_are_checked_in_every_layout(kind: Any, layout: str) -> None:
    rope = kind(16, layout=layout, heads=8, key_heads=2)
    plain = kind(16, layout=layout)
    assert ", heads=8, key_heads=2" in repr(rope)
    query = of(8, 16, layout)
    for keys in (2, 8):  # as they are, and repeated
        key = of(keys, 16, layout)
        for ours, theirs in zip(rope(query, key), plain(query, key), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(rope(query), plain(query))
    for heads, keys in ((8, 1), (8, 4), (4, 2), (3, 3), (5, 2), (16, 4)):
        refused(
            (lambda: rope(of(heads, 16, layout), of(keys, 16, layout)), ValueError, "heads=None takes any number"),
            (lambda: rope.rotate_(of(heads, 16, layout), of(keys, 16, layout)), ValueError, "heads=None takes any number"),
        )  # fmt: skip


@pytest.mark.parametrize(("heads", "keys"), [(8, 2), (4, 1), (2, 1), (1, 1), (4, 4)])
def test_parts_of_the_heads_are_those_of_tensor_parallelism(heads: int, keys: int) -> None:
    """With more parts than key heads, each part has one of them."""
    rope = pe.RotaryEmbedding(16, heads=8, key_heads=2)
    rope(of(heads, 16), of(keys, 16))


def test_llama_of_two_shards() -> None:
    rope = pe.RotaryEmbedding.from_config(LLAMA, layout="bhsd")
    assert (rope.heads, rope.key_heads) == (8, 2)
    for parts in (1, 2):
        rope(of(8 // parts, 64, "bhsd"), of(2 // parts, 64, "bhsd"))
    refused((lambda: rope(of(8, 64), of(2, 64)), ValueError, "key: .* got 2 (layout 'bhsd'; .* looks like 'bshd'"))  # fmt: skip
    pe.RotaryEmbedding.from_config(LLAMA, heads=None)(of(3, 64), of(3, 64))
    assert pe.RotaryEmbedding.from_config(LLAMA, heads=4, key_heads=4).heads == 4


def test_a_layout_of_equal_heads_is_noticed() -> None:
    """Tensors of transformers have [batch, heads, seq, head_dim], and the usual layout is another."""
    config = {**LLAMA, "num_key_value_heads": 8}
    refused((lambda: pe.RotaryEmbedding.from_config(config)(of(8, 64, "bhsd"), of(8, 64, "bhsd")), ValueError, REFUSED))  # fmt: skip


def test_deepseek_has_one_latent_key() -> None:
    rope = pe.RotaryEmbedding.from_config(DEEPSEEK)
    assert (rope.heads, rope.key_heads) == (8, 1)
    for parts in (1, 2, 8):
        rope(of(8 // parts, 16), of(1, 16))
    rope(of(8, 16), of(8, 16))
    refused((lambda: rope(of(8, 16), of(2, 16)), ValueError, REFUSED))


def test_the_tower_of_qwen2_vl_has_its_own_heads() -> None:
    text = pe.RotaryEmbedding.from_config(QWEN2_VL)
    assert (text.heads, text.key_heads) == (8, 2)
    tower = pe.RotaryEmbedding.from_config(QWEN2_VL, part="vision_config", layout="thd")
    assert tower.heads == 4
    positions = torch.zeros(2, 5, dtype=torch.int64)
    tower(of(4, 80, "thd"), of(4, 80, "thd"), positions)
    refused((lambda: tower(of(8, 80, "thd"), of(8, 80, "thd"), positions), ValueError, "query: expected 4 heads"))  # fmt: skip


def test_heads_that_differ_by_layer_are_not_checked() -> None:
    config = {**LLAMA, "num_key_value_heads": [2, 4]}
    assert pe.RotaryEmbedding.from_config({**LLAMA, "num_attention_heads": 8}).heads == 8
    assert reading.sizes_of(config).key_heads is None
    assert reading.sizes_of({**LLAMA, "swa_num_attention_heads": 4}).heads is None


def test_heads_go_with_the_module() -> None:
    rope = pe.RotaryEmbedding(64, scaling=pe.DynamicNtkScaling(2.0, 16), layout="bhsd", heads=8, key_heads=2)
    wrong = of(8, 64)
    for same in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope)), rope.resolve(32)):
        assert (same.heads, same.key_heads) == (8, 2)
        refused((lambda: same(wrong) if same.spec != rope.spec else same(wrong, seq_len=9), ValueError, REFUSED))  # fmt: skip
    program = torch.export.export(rope.resolve(32), (of(8, 64, "bhsd"),))
    assert torch.equal(program.module()(x := of(8, 64, "bhsd")), rope(x, seq_len=32))
    compiled = torch.compile(rope.resolve(32), backend="eager", dynamic=True)
    compiled(of(8, 64, "bhsd"), of(2, 64, "bhsd"))
    refused((lambda: compiled(wrong, wrong), Exception, "8 heads"))
    query = of(8, 64, "bhsd").requires_grad_()
    rope(query, seq_len=9).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("options", [{"heads": 0}, {"heads": 8, "key_heads": -1}, {"key_heads": 2}])
def test_heads_that_are_none_are_refused(options: dict[str, int]) -> None:
    for kind in (pe.RotaryEmbedding, pe.cpp.RotaryEmbedding):
        with pytest.raises(ValueError, match=r"^(key_)?heads: expected"):
            kind(64, **options)
