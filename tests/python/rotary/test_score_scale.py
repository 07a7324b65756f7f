"""Scales of scores that configurations state, against the models' own code in transformers."""

import importlib
import math
from typing import Any

import posembed as pe
import pytest
import torch
from support.catalogue import having
from support.refusals import refused
from torch import Tensor

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT = {
    "rope_parameters": YARN,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "num_key_value_heads": 4,
}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 8}
# Types, and keys of their configurations; the factor of the first is written out.
STATED: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "youtu": LATENT,
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 144},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 168},
    "vaultgemma": {"head_dim": 16, "query_pre_attn_scalar": 100},
    "gemma3n_text": {"head_dim": 16, "num_kv_shared_layers": 0},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32},
    "gemma4_unified_text": {"head_dim": 16, "global_head_dim": 32},
    "gemma4_vision": {"head_dim": 16},
    "diffusion_gemma_text": {
        **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
        **{"moe_intermediate_size": 32, "num_experts": 2},
    },
    "embedding_gemma2_text": {"head_dim": 16, "global_head_dim": 32},
    "granite": {"attention_multiplier": 0.0078125},
    "granitemoe": {"attention_multiplier": 0.015625},
    "hyperclovax": {"attention_multiplier": 0.1},
    "llama": {},
    "qwen3": {"head_dim": 16},
}


def scales_of_code(config: Any) -> list[float]:
    """What the model's attention multiplies scores by, times the root of the query's width."""
    transformers = pytest.importorskip("transformers")
    make = transformers.AutoModel.from_config
    if config.model_type == "diffusion_gemma_text":  # part of a model, which AutoModel does not make
        name = "transformers.models.diffusion_gemma.modeling_diffusion_gemma"
        make = importlib.import_module(name).DiffusionGemmaEncoderTextModel
    with torch.device("meta"):
        model = make(config)
    found = []
    for module in model.modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, float) and type(module).__name__.endswith("Attention"):
            width = getattr(module, "qk_head_dim", None) or module.head_dim
            found.append(scaling * math.sqrt(width))
    return found


@pytest.mark.parametrize("kind", STATED)
def test_factors_of_models(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.CONFIG_MAPPING[kind](**{**SMALL, **STATED[kind]})
    found = pe.ScoreScale.for_layers(config)
    expected = scales_of_code(config)
    assert len(found) == SMALL["num_hidden_layers"]
    assert set(expected), kind
    for scale, number in zip(found, expected, strict=False):
        assert (1.0 if scale is None else scale.factor) == pytest.approx(number, rel=1e-12)
        assert scale is None or scale.is_constant


def test_every_entry_about_scores_is_tested() -> None:
    dia = {"dia_decoder", "dia_encoder"}  # test_configuration.py
    assert {*having("score_scale")} - dia <= {*STATED}
    assert having("score_factor") == ["zamba2"]
    assert having("without_mscale") == ["deepseek_v4", "dots3_note_text"]


@pytest.mark.parametrize("rotates", [True, False])
def test_zamba2_divides_by_the_root_of_half_the_width(rotates: bool) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.CONFIG_MAPPING["zamba2"](use_mem_rope=rotates)
    scales = pe.ScoreScale.for_layers(config)
    expected = set(scales_of_code(config))
    attends = [kind != "linear_attention" for kind in config.layers_block_type]
    assert [scale is not None for scale in scales] == attends
    found = {scale.factor for scale in scales if scale is not None}
    assert [*found] == pytest.approx([*expected], rel=1e-12)


def test_layers_without_rotation_have_a_scale() -> None:
    """Granite 4's hybrids: attention_multiplier, with and without rotation."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kinds = ["linear_attention", "full_attention"]
    for positions in ("nope", "rope"):
        config = transformers.CONFIG_MAPPING["granitemoehybrid"](
            hidden_size=64, num_attention_heads=4, num_hidden_layers=2, layer_types=kinds,
            attention_multiplier=0.125, position_embedding_type=positions,
        )  # fmt: skip
        mamba, attention = pe.ScoreScale.for_layers(config)
        assert mamba is None
        assert attention is not None
        assert attention.factor == pytest.approx(0.125 * math.sqrt(16), rel=1e-12)


def test_latent_attention_without_the_factor() -> None:
    """DeepSeek V4's attention multiplies by 1 / sqrt(head_dim) whatever the configuration says."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.CONFIG_MAPPING["deepseek_v4"]()
    config.rope_parameters = {"main": YARN, "compress": {**YARN, "rope_theta": 160000.0}}
    specs = pe.RotarySpec.for_layers(config)
    assert all(spec is not None and spec.scaling is not None for spec in specs)
    assert set(pe.ScoreScale.for_layers(config)) == {None}


def test_the_factor_of_deepseek_v3() -> None:
    fields = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128}
    fields |= {"max_position_embeddings": 163840, "qk_rope_head_dim": 64, "rope_theta": 10000}
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    fields["rope_scaling"] = {**scaling, "original_max_position_embeddings": 4096}
    spec = pe.RotarySpec.from_huggingface(fields)
    assert spec.score_scale is not None
    assert spec.score_scale.factor == pytest.approx((0.1 * math.log(40) + 1) ** 2, rel=1e-15)
    assert spec.attention_factor == 1.0
    assert "\nscore scale: 1.87385 (mscale_all_dim)\n" in spec.explain()


@pytest.mark.parametrize("apply_scale", [True, False])
def test_latent_attention_of_params_json(apply_scale: bool) -> None:
    """As vLLM's configs/mistral.py and deepseek_v2.py: DeepSeek's, with mscale_all_dim = 1."""
    yarn = {"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": apply_scale}
    fields = {"dim": 7168, "n_heads": 128, "n_layers": 2, "rope_theta": 1e4, "yarn": yarn}
    fields |= {"head_dim": 192, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    spec = pe.RotarySpec.from_huggingface(fields)
    assert (spec.head_dim, spec.rotary_dim, spec.interleaved) == (64, 64, True)
    assert spec.attention_factor == 1.0
    ramp = ((torch.arange(32.0, dtype=torch.float64) - 12) / (25 - 12)).clamp(0, 1)
    plain = 1e4 ** -(torch.arange(32.0, dtype=torch.float64) / 32)
    assert torch.allclose(spec.frequencies(), plain * (1 - ramp + ramp / 36), rtol=1e-14)
    factors = [scale and scale.factor for scale in pe.ScoreScale.for_layers(fields)]
    expected = pytest.approx((0.1 * math.log(36) + 1) ** 2, rel=1e-15) if apply_scale else None
    assert factors == [expected] * 2
    del fields["qk_rope_head_dim"]
    refused((lambda: pe.RotarySpec.from_huggingface(fields), ValueError, "qk_rope_head_dim: missing in params.json"))  # fmt: skip


@pytest.mark.parametrize("kind", ["ministral3", "mistral4"])
def test_queries_that_grow(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    rope = {**YARN, "llama_4_scaling_beta": 0.1, "mscale_all_dim": 0.0}
    extra = LATENT if kind == "mistral4" else {"head_dim": 16}
    config = transformers.CONFIG_MAPPING[kind](**{**SMALL, **extra, "rope_parameters": rope})
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    positions = torch.tensor([[0, 4095, 4096, 100000, 1 << 20]])
    expected = module.get_llama_4_attn_scale(positions, 0.1, 4096)[0, 0, :, 0]
    scale = pe.RotarySpec.from_huggingface(config).score_scale
    assert scale is not None
    assert torch.allclose(scale.at(positions[0]).float(), expected, rtol=1e-6)
    assert not scale.is_constant
    assert scale.at(torch.tensor([-1])).item() == 1.0  # padding


def test_llama_4_grows_where_it_does_not_rotate() -> None:
    """As Llama4TextAttention.forward computes it, in positions from 1."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    options = {**SMALL, "num_hidden_layers": 4, "floor_scale": 64, "attn_scale": 0.3}
    config = transformers.Llama4TextConfig(**options)
    scales = pe.ScoreScale.for_layers(config)
    assert [scale is None for scale in scales] == [True, True, True, False]
    positions = torch.tensor([0, 62, 63, 1000])
    expected = torch.log1p(torch.floor((positions.double() + 1.0) / 64)) * 0.3 + 1.0
    assert scales[3] is not None
    assert torch.equal(scales[3].at(positions), expected)
    config.attn_temperature_tuning = False
    assert pe.ScoreScale.for_layers(config) == [None] * 4
    # Without keys, the class's values.
    config = transformers.Llama4TextConfig(**{**SMALL, "num_hidden_layers": 4})
    fields = {"model_type": "llama4_text", **SMALL, "num_hidden_layers": 4}
    alone = pe.ScoreScale.for_layers(fields)[3]
    assert alone == pe.ScoreScale.for_layers(config)[3]
    positions = torch.tensor([1, 10_000, 1 << 20])
    grown = torch.log1p(torch.floor((positions.double() + 1.0) / config.floor_scale))
    assert alone is not None
    assert torch.equal(alone.at(positions), grown * config.attn_scale + 1.0)


def test_logn() -> None:
    """The list of Qwen 1's modeling_qwen.py: log(i) to the base seq_length, i from 1."""
    fields = {"model_type": "qwen", "hidden_size": 128, "num_attention_heads": 1, "kv_channels": 128}
    fields |= {"rotary_emb_base": 10000, "seq_length": 2048, "use_logn_attn": True}
    fields |= {"rotary_pct": 1.0}
    scale = pe.RotarySpec.from_huggingface(fields).score_scale
    expected = [math.log(i, 2048) if i > 2048 else 1.0 for i in range(1, 4001)]
    assert scale is not None
    assert scale.source == "use_logn_attn"
    assert torch.allclose(scale.at(torch.arange(4000)), torch.tensor(expected).double(), rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "keys", "at", "expected"),
    [
        ("granite", {"attention.scale": 0.0078125}, 7, 0.0078125 * 8),
        ("mistral3", {"attention.temperature_scale": 0.1}, 2000, 1 + 0.1 * math.log(1 + 2)),
        (
            "deepseek2",
            {
                "attention.kv_lora_rank": 512,
                "rope.dimension_count": 64,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 40.0,
                "rope.scaling.original_context_length": 4096,
                "rope.scaling.yarn_log_multiplier": 0.1,
            },
            0,
            (0.1 * math.log(40) + 1) ** 2,
        ),
    ],
)
def test_metadata(architecture: str, keys: dict[str, Any], at: int, expected: float) -> None:
    model = {"embedding_length": 256, "attention.head_count": 4, "context_length": 1000}
    model |= {"rope.freq_base": 10000.0, **keys}
    metadata = {f"{architecture}.{key}": value for key, value in model.items()}
    spec = pe.RotarySpec.from_huggingface({"general.architecture": architecture, **metadata})
    assert spec.score_scale is not None
    assert spec.score_scale.at(torch.tensor(at)).item() == pytest.approx(expected, rel=1e-12)


def test_specifications_with_a_scale() -> None:
    scale = pe.ScoreScale(2.0, 0.1, 16, 1, source="key")
    spec = pe.RotarySpec(8, score_scale=scale)
    assert pe.RotarySpec.from_json(spec.to_json()) == spec
    assert hash(spec) == hash(pe.RotarySpec(8, score_scale=pe.ScoreScale(2.0, 0.1, 16, 1, False, "key")))
    assert spec == pe.RotarySpec(8)  # it rotates alike
    assert spec.to_json() != pe.RotarySpec(8).to_json()
    assert pe.RotarySpec.from_json(spec.to_json()).score_scale == scale
    assert "score_scale" not in pe.RotarySpec(8).to_json()
    assert pe.RotarySpec(8).diff(spec).startswith("score_scale: null against {")
    query: Tensor = torch.randn(1, 3, 2, 8)
    assert torch.equal(pe.functional.rotary(query, spec=spec), pe.functional.rotary(query, spec=pe.RotarySpec(8)))
    text = "score scale: 2 times 1 + 0.1 log(1 + floor((position + 1) / 16)) (key)"
    assert text in spec.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0.0}, "score_scale: expected a positive factor, got 0"),
        ({"length": 0.0}, "score_scale: expected a positive length, with logn above 1, got 0"),
        ({"logn": True}, "score_scale: expected a positive length, with logn above 1, got 1"),
        ({"offset": -1}, "score_scale: expected an offset of 0 or more, got -1"),
        ({"growth": float("inf")}, "growth: expected a finite number, got inf"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], message: str) -> None:
    refused((lambda: pe.RotarySpec(8, score_scale=pe.ScoreScale(**options)), ValueError, message))
    refused((lambda: pe.ScoreScale().at(torch.rand(2)), TypeError, "positions: expected integers, got float32"))  # fmt: skip
