"""``read_module=True``: rotations read off what the attention of transformers' models gets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.models import module, reading
from torch.testing import assert_close

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "max_position_embeddings": 4096}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_local_experts": 4}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "qwen3": {"rope_scaling": YARN, "rope_theta": 1e6},
    "glm4": {"partial_rotary_factor": 0.5, "rope_theta": 1e4},  # interleaved
    "gemma3_text": {"num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    "gemma2": {"query_pre_attn_scalar": 7},  # multiplies scores after the product, and caps them
    "esm": {"position_embedding_type": "rotary", "vocab_size": 96},  # multiplies queries
    "cohere2": {"num_hidden_layers": 4},
    "deepseek_v3": {**LATENT, "head_dim": 8},
    "qwen2_vl_text": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "gpt_oss": {"rope_scaling": {**YARN, "truncate": False}, "num_local_experts": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "hy_v4_vl_text": {
        **LATENT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "index_head_dim": 16,
    },
    "lara_mini": {"num_hidden_layers": 5},
    "apertus1p5_text": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
LLAMA = {"model_type": "llama", **SIZES, "rope_theta": 5e5}


def numbers(layer: reading.LayerPositions) -> Any:
    """What a layer does, whether by a formula or by numbers."""
    spec, scale = layer.rotary, layer.score_scale
    factor = 1.0 if scale is None else scale.factor
    if spec is None:
        return None
    axes = spec.sections and spec.sections.axis_of_pair
    window = (spec.head_dim, spec.rotary_dim, spec.rotary_start, spec.interleaved, axes)
    return window, spec.frequencies(), spec.attention_factor, factor


@pytest.mark.parametrize("model_type", CASES)
def test_modules_compute_what_rules_say(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("a newer transformers has it")
    config = {"model_type": model_type, **SIZES, **CASES[model_type]}
    found = module.read(config, config, None, False)
    expected = reading.layers(config)
    assert [layer.kind for layer in found] == [layer.kind for layer in expected]
    for read, right in zip(map(numbers, found), map(numbers, expected), strict=True):
        assert (read is None) == (right is None)
        if right is not None:
            assert read[0] == right[0]
            assert_close(read[1:], right[1:], rtol=2e-6, atol=1e-9)


def test_only_where_no_rule_is_known_and_only_if_asked() -> None:
    unknown = {**LLAMA, "rope_phase": 3}
    for read in (pe.RotarySpec.from_huggingface, pe.RotarySpec.for_layers, pe.describe):
        with pytest.raises(ValueError, match=r"rope_phase.*read_module=True"):
            read(unknown)
        with pytest.raises(ValueError, match=r"'mine' is not known.*read_module=True"):
            read({"model_type": "mine"})
    right = pe.RotarySpec(16, base=5e5)
    found = pe.RotarySpec.from_huggingface(unknown, read_module=True)
    assert (found, found.source) == (right, "read from the module")
    assert found.explain().endswith("read from the module")
    assert pe.RotarySpec.from_huggingface(LLAMA, read_module=True).source == ""
    assert pe.RotarySpec.for_layers(unknown, read_module=True) == [right, right]
    assert pe.ScoreScale.for_layers(unknown, read_module=True) == [None, None]
    described = pe.describe(unknown, read_module=True)["rotations"]
    assert [each["source"] for each in described] == ["read from the module"]
    assert "source" not in pe.describe(LLAMA)["rotations"][0]
    rope = pe.RotaryEmbedding.from_config(unknown, layout="bhsd", read_module=True)
    assert (rope.spec, rope.heads) == (right, 4)
    assert pe.diagnose(lambda x, at: rope(x, positions=at), unknown, read_module=True, max_position=99).right
    golden = pe.diagnosis.golden(unknown, read_module=True, max_position=99)
    assert "read from the module" in golden.metadata["entries"]


def test_refusals() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    for changed, message in (
        ({"rope_scaling": dynamic}, "frequencies depend on the length"),
        ({"hidden_act": "no such"}, "it cannot be built: KeyError"),
        ({"model_type": "mine"}, "has no model_type 'mine'"),
        ({"model_type": "pixtral"}, "it takes no tokens: towers of pictures and sound"),
        ({"model_type": "qwen2_vl_vision"}, "it cannot be built: StrictDataclass"),
    ):
        config = {**LLAMA, "rope_phase": 3, **changed}
        with pytest.raises(ValueError, match=f"read_module: .*{message}"):
            pe.RotarySpec.from_huggingface(config, read_module=True)
    unknown = {**LLAMA, "rope_phase": 3}
    for options, message in (
        ({"interleaved": True}, "interleaved"),
        ({"base": 5e5}, "base: expected none"),
        ({"layer_type": "chunked_attention"}, "layer_type"),
        ({"read_module": False, "trust_remote_code": True}, "trust_remote_code: expected False"),
    ):
        with pytest.raises(ValueError, match=message):
            pe.RotarySpec.from_huggingface(unknown, **{"read_module": True, **options})
    kinds = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 6, "rope_phase": 3}
    with pytest.raises(ValueError, match=r"layer_type: expected one of \['full_attention', 'sl"):
        pe.RotarySpec.from_huggingface(kinds, read_module=True)
    local = pe.RotarySpec.from_huggingface(kinds, "sliding_attention", read_module=True)
    assert local.base == 10000


OWN = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

open(TOLD, "w").close()


class Config(PretrainedConfig):
    model_type = "mine"

    def __init__(self, hidden_size=64, num_hidden_layers=2, **kwargs):
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        super().__init__(**kwargs)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, hidden, position_ids):
        batch, tokens, size = hidden.shape
        q, k, v = self.qkv(hidden).view(batch, tokens, 4, 3, 16).unbind(3)
        turns = 3.0 ** -torch.arange(4.0) / 7
        angles = -position_ids[:, :, None, None] * turns  # backwards

        def rotate(x):  # pairs (2i, 2i + 1) of the last 8 components
            even, odd = x[..., 8::2], x[..., 9::2]
            cos, sin = angles.cos(), angles.sin()
            pair = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
            return torch.cat((x[..., :8], pair.flatten(-2)), -1)

        q, k, v = (x.transpose(1, 2) for x in (rotate(q), rotate(k), v))
        scores = (q * 0.5) @ k.transpose(-1, -2)
        return (hidden + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2),)


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(64, config.hidden_size)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids, position_ids=None, use_cache=None):
        hidden = self.embed_tokens(input_ids)
        for block in self.blocks:
            hidden = block(hidden, position_ids)[0]
        return hidden
"""


def own_model(folder: Path, code: str) -> dict[str, Any]:
    """Writes a model of its own code, which leaves the file "it ran"; its configuration."""
    code = code.replace("TOLD", repr(str(folder / "it ran")))
    (folder / "modeling_mine.py").write_text(code)
    names = {"AutoConfig": "modeling_mine.Config", "AutoModel": "modeling_mine.Model"}
    fields = {"model_type": "mine", "auto_map": names, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(fields))
    return fields


def test_scores_that_are_no_multiple_of_the_product_are_refused(tmp_path: Path) -> None:
    own_model(tmp_path, OWN.replace("scores.softmax", "(scores + scores**3).softmax"))
    with pytest.raises(ValueError, match="scores are more than a multiple of query times key"):
        pe.ScoreScale.for_layers(tmp_path, read_module=True, trust_remote_code=True)


def test_own_code_runs_only_if_trusted(tmp_path: Path) -> None:
    told, fields = tmp_path / "it ran", own_model(tmp_path, OWN)
    for config in (tmp_path, tmp_path / "config.json", fields):
        for options in ({}, {"read_module": True}):
            with pytest.raises(ValueError, match="read_module" if not options else "trust_remote"):
                pe.RotarySpec.from_huggingface(config, **options)
    with pytest.raises(ValueError, match="only from its folder"):
        pe.RotarySpec.from_huggingface(fields, read_module=True, trust_remote_code=True)
    assert not told.exists()
    command = [sys.executable, "-m", "posembed", "describe", str(tmp_path), "--read-module"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "with --trust-remote-code" in run.stderr
    assert not told.exists()
    found = pe.describe(tmp_path, read_module=True, trust_remote_code=True)
    assert told.exists()
    assert [layer["rotary"] for layer in found["layers"]] == [0, 0]
    spec = pe.RotarySpec.from_json(json.dumps(found["rotations"][0]["specification"]))
    assert (spec.head_dim, spec.rotary_dim, spec.rotary_start) == (16, 8, 8)
    assert spec.interleaved
    assert spec.reverse
    assert_close(spec.frequencies(), 3.0 ** -torch.arange(4, dtype=torch.float64) / 7, rtol=1e-6, atol=0)
