"""Compares ALiBi of published models with transformers: equal attention weights.

Their biases differ from posembed's distances by constants along a row, which softmax ignores.
"""

import math
from pathlib import Path

import posembed as pe
import pytest
import torch
from support.alibi import paper_slopes
from support.case import assert_close
from support.refusals import refused
from torch import Tensor
from transformers import BloomConfig, FalconConfig, LlamaConfig, MptConfig
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
    ours = pe.ALiBi.from_preset("bloom", heads).softmax(scores)
    assert_close(ours, weights(scores + theirs), 4e-6)


def test_bloom_with_holes_in_the_mask() -> None:
    """Bloom's positions count only visible keys."""
    scores = scores_of(8)
    mask = torch.ones(2, SEQ, dtype=torch.int64)
    mask[0, :5], mask[1, 7:12] = 0, 0
    theirs = bloom_alibi(mask, 8, torch.float32).view(2, 8, 1, SEQ)
    hidden = (mask == 0)[:, None, None]
    ours = pe.ALiBi.from_preset("bloom", 8).softmax(scores, attention_mask=mask)
    expected = weights((scores + theirs).masked_fill(hidden, float("-inf")))
    seen = mask.bool()  # ignore queries that are padding
    for batch in range(2):
        assert_close(ours[batch][:, seen[batch]], expected[batch][:, seen[batch]], 4e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("max_bias", [8, 6])
def test_mpt(heads: int, max_bias: int) -> None:
    """MPT's bias for the last query is slope times distance."""
    theirs = mpt_alibi(heads, SEQ, alibi_bias_max=max_bias)
    ours = pe.ALiBi.from_preset("mpt", heads, max_bias=max_bias)(1, SEQ)
    assert_close(ours, theirs, 1.2e-7)  # their slopes are a float32 power


@pytest.mark.parametrize("heads", HEADS)
def test_falcon(heads: int) -> None:
    """Falcon rounds slopes to bfloat16 and scales the sum of scores and bias by 1 / sqrt(head_dim)."""
    scores, head_dim = scores_of(heads), 64
    theirs = falcon_alibi(torch.ones(2, SEQ), heads, torch.float32).view(2, heads, 1, SEQ)
    alibi = pe.ALiBi.from_preset("falcon", heads, head_dim=head_dim)
    ours = alibi.softmax(scores, scale=1 / math.sqrt(head_dim))
    expected = weights((scores + theirs) / math.sqrt(head_dim))
    # theirs is slope * key in bfloat16, which rounds by up to 2^-9 of the bias
    worst = float(theirs.abs().max()) * 2**-8 / math.sqrt(head_dim)
    assert_close(ours, expected, worst + 1e-6)


def test_presets_of_both_languages_agree() -> None:
    ours = pe.ALiBi.from_preset("falcon", 8, head_dim=64)
    theirs = pe.cpp.ALiBi.from_preset("falcon", 8, head_dim=64)
    assert repr(theirs) == repr(ours)
    assert torch.equal(theirs.forward(5), ours(5))


def distances() -> Tensor:
    place = torch.arange(SEQ)
    return (place[:, None] - place[None]).abs().float()


@pytest.mark.parametrize("heads", HEADS)
def test_baichuan(heads: int) -> None:
    """Baichuan-13B adds slope * key and a causal mask to scaled scores."""
    scores = scores_of(heads)
    slopes = torch.tensor(paper_slopes(heads))
    ours = pe.ALiBi.from_preset("baichuan", heads).softmax(scores, scale=0.125)
    expected = weights(scores * 0.125 + slopes[:, None, None] * torch.arange(SEQ).float())
    assert_close(ours, expected, 4e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("options", "divisor"),
    [({}, 1.0), ({"factor": 2.5}, 2.5), ({"train_length": 8}, SEQ / 8), ({"train_length": 64}, 1.0)],
)
def test_jais(heads: int, options: dict[str, float], divisor: float) -> None:
    """JAIS divides slopes by a factor, or by the ratio of keys to the trained length."""
    slopes = torch.tensor(paper_slopes(heads))
    expected = (slopes / -divisor)[:, None, None] * distances()
    found = pe.ALiBi.from_preset("jais", heads, **options)(SEQ)
    past = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    assert_close(found[:, past], expected[:, past], 2.4e-7)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("preset", ["mosaicbert", "jina"])
def test_encoders(preset: str, heads: int) -> None:
    """As JinaBertEncoder.rebuild_alibi_tensor: the bias falls off on both sides of the query."""
    slopes = torch.tensor(paper_slopes(heads))
    found = pe.ALiBi.from_preset(preset, heads)(SEQ)
    assert_close(found, -slopes[:, None, None] * distances(), 1.2e-7)


@pytest.mark.parametrize("heads", HEADS)
def test_refact(heads: int) -> None:
    """Refact adds slope * (number of keys up to this one) to scaled scores, then hides the future.

    Its get_alibi_biases takes the running sum of the causal mask as the distance.
    """
    scores = scores_of(heads)
    visible = torch.ones(SEQ, SEQ).tril()
    slopes = torch.tensor(paper_slopes(heads))
    theirs = slopes[:, None, None] * visible.cumsum(-1)
    ours = pe.ALiBi.from_preset("refact", heads).softmax(scores)
    hidden = (scores + theirs).masked_fill(visible == 0, -10000.0)
    assert_close(ours, hidden.softmax(-1), 4e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("options", "divisor"), [({}, 1.0), ({"factor": 2.5}, 2.5), ({"train_length": 8}, SEQ / 8)])
def test_btlm(heads: int, options: dict[str, float], divisor: float) -> None:
    """BTLM divides scores by head_dim and adds (slope / -scale) * distance."""
    query, key, value = torch.randn(3, 2, heads, SEQ, 16, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor(paper_slopes(heads))
    scores = query @ key.mT / 16 + (slopes / -divisor)[:, None, None] * distances()
    past = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    expected = scores.masked_fill(~past, float("-inf")).softmax(-1) @ value
    alibi = pe.ALiBi.from_preset("btlm", heads, **options)
    assert_close(alibi.attention(query, key, value, scale=1 / 16), expected, 4e-6)


JINA = {
    "model_type": "bert",
    "_name_or_path": "jinaai/jina-bert-implementation",
    "position_embedding_type": "alibi",
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}


def jais_config(**changed: object) -> dict[str, object]:
    return {"model_type": "jais", "position_embedding_type": "alibi", "n_head": 12, **changed}


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (BloomConfig(n_head=12), pe.ALiBi.from_preset("bloom", 12)),
        (MptConfig(n_heads=12, attn_config={"alibi": True, "alibi_bias_max": 6}), pe.ALiBi.from_preset("mpt", 12, max_bias=6)),
        (FalconConfig(alibi=True, num_attention_heads=12, hidden_size=768), pe.ALiBi.from_preset("falcon", 12, head_dim=64)),
        ({"model_type": "baichuan", "num_attention_heads": 40, "model_max_length": 4096}, pe.ALiBi.from_preset("baichuan", 40)),
        (jais_config(), pe.ALiBi.from_preset("jais", 12)),
        (jais_config(alibi_scaling={"type": "linear", "factor": 2.5}), pe.ALiBi.from_preset("jais", 12, factor=2.5)),
        (jais_config(alibi_scaling={"type": "linear", "train_seq_len": 8}), pe.ALiBi.from_preset("jais", 12, train_length=8)),
        (jais_config(model_type="btlm", mup_scale_qk_dot_by_d=True), pe.ALiBi.from_preset("btlm", 12)),
        (jais_config(model_type="btlm", alibi_scaling={"type": "linear", "factor": 2.0}), pe.ALiBi.from_preset("btlm", 12, factor=2.0)),
        ({"model_type": "gpt_refact", "n_head": 32}, pe.ALiBi.from_preset("refact", 32)),
        (JINA, pe.ALiBi.from_preset("jina", 12)),
        ({"model_type": "bert", "num_attention_heads": 12, "alibi_starting_size": 512}, pe.ALiBi.from_preset("mosaicbert", 12)),
    ],
    ids=str,
)  # fmt: skip
def test_from_config(config: object, same: pe.ALiBi) -> None:
    alibi = pe.ALiBi.from_config(config)
    assert str(alibi) == str(same)
    assert torch.equal(alibi(SEQ), same(SEQ))


def test_from_the_file_of_a_configuration(tmp_path: Path) -> None:
    BloomConfig(n_head=12).save_pretrained(tmp_path)
    alibi = pe.ALiBi.from_config(tmp_path / "config.json", num_heads=4, head_start=8)
    assert torch.equal(alibi.slopes, pe.ALiBi(12).slopes[8:])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LlamaConfig(), "model_type: expected one of 'bloom', .* got 'llama'"),
        ({}, "model_type: expected one of 'bloom', .* got None"),
        ({"model_type": "bloom"}, "num_attention_heads: missing"),
        ({"model_type": "bloom", "n_head": "8"}, "n_head: expected a whole number, got '8'"),
        ({"model_type": "bloom", "n_head": 8, "alibi_scaling": {}}, "unknown keys"),
        (FalconConfig(alibi=False), "alibi: the model does not use ALiBi, got False"),
        ({"model_type": "falcon", "n_head": 8}, "alibi: the model does not use ALiBi, got None"),
        (MptConfig(attn_config={"alibi": False}), r"attn_config\['alibi'\]: .* does not use ALiBi"),
        ({"model_type": "baichuan", "num_attention_heads": 32, "max_position_embeddings": 4096}, "max_position_embeddings: Baichuan-7B"),
        (jais_config(position_embedding_type="learned"), "expected 'alibi', got 'learned'"),
        ({**JINA, "position_embedding_type": "absolute"}, "expected 'alibi', got 'absolute'"),
        ({"model_type": "bert", "num_attention_heads": 8}, "position_embedding_type: expected .alibi., got None"),
        (jais_config(alibi_scaling={"type": "dynamic"}), "expected type 'linear', got 'dynamic'"),
        (jais_config(alibi_scaling={"power": 2}), r"unknown keys \['power'\]"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_understood(config: object, text: str) -> None:
    refused((lambda: pe.ALiBi.from_config(config), ValueError, text))
