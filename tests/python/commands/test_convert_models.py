"""Tests whole transformers models: converted weights with interleaved pairs give equal logits."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import posembed as pe
import pytest
import torch
from posembed.commands import main
from support.case import assert_close
from torch import Tensor

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
MODELS = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "GPTNeoX": {"rotary_pct": 0.5},
    "HunYuanDenseV1": {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    "MiMoV2Flash": {  # its file has other names than the model
        "num_key_value_heads": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
    },
    "MiniMax": {  # packed tensors of linear attention, which does not rotate
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 2,
        "initializer_range": 0.2,
        "num_experts_per_tok": 1,
    },
    "OlmoHybrid": {  # linear attention has q_proj and k_proj too
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 0,
    },
    "Qwen3Next": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@torch.no_grad()
def logits(folder: Path, kind: type) -> Tensor:
    return kind.from_pretrained(folder).eval()(torch.arange(12)[None]).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    torch.manual_seed(0)
    model = kind(config)
    for parameter, weight in model.named_parameters():
        if "norm" in parameter:  # of ones, a norm that was forgotten would not show
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    before = logits(tmp_path, kind)

    source, target = tmp_path / "model.safetensors", tmp_path / "converted.safetensors"
    argv = ["convert", str(source), str(target), "--config", str(tmp_path), "--to", "interleaved"]
    assert main(argv) == 0
    target.replace(source)
    assert (logits(tmp_path, kind) - before).abs().max() > 1e-4  # the model's own rotation

    kind_of_layer = "sliding_attention" if name == "MiMoV2Flash" else None
    spec = pe.RotarySpec.from_huggingface(config, kind_of_layer)
    interleaved = dataclasses.replace(spec, interleaved=True)

    def rotate(query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return pe.functional.rotary(query, key, spec=interleaved, layout="bhsd")

    monkeypatch.setattr(sys.modules[kind.__module__], "apply_rotary_pos_emb", rotate)
    assert_close(logits(tmp_path, kind), before, 1e-6)


def changed(source: Path, target: Path) -> set[str]:
    before, after = (safetensors.load_file(path / "model.safetensors") for path in (source, target))
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_latent_attention(tmp_path: Path) -> None:
    """DeepSeek V3's own configuration names the pairing, so the file's logits are the oracle."""
    config = transformers.DeepseekV3Config(
        **{**SIZES, "first_k_dense_replace": 2},
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        rope_interleave=True,
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config)
    model.save_pretrained(tmp_path / "a")
    before = logits(tmp_path / "a", type(model))
    assert main(["convert", *map(str, (tmp_path / "a", tmp_path / "b")), "--to", "half_split"]) == 0
    names = {name.split(".")[-2] for name in changed(tmp_path / "a", tmp_path / "b")}
    assert names == {"q_b_proj", "kv_a_proj_with_mqa"}
    path = tmp_path / "b" / "config.json"
    path.write_text(path.read_text().replace('"rope_interleave": true', '"rope_interleave": false'))
    assert_close(logits(tmp_path / "b", type(model)), before, 1e-6)


def test_a_projector_beside_the_language_model_stays(tmp_path: Path) -> None:
    text = {"model_type": "granite", **SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
    former = {"model_type": "blip_2_qformer", **SIZES, "encoder_hidden_size": 16}
    encoder = {"hidden_dim": 16, "num_heads": 2, "dim_head": 8, "num_layers": 1, "input_dim": 8}
    config = transformers.GraniteSpeechConfig(
        text_config=text,
        projector_config=former,
        encoder_config={"model_type": "granite_speech_encoder", **encoder, "output_dim": 8},
        audio_token_index=5,
    )
    torch.manual_seed(0)
    model = transformers.GraniteSpeechForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "a")
    argv = ["convert", *map(str, (tmp_path / "a", tmp_path / "b")), "--to", "interleaved"]
    assert main(argv) == 0
    assert changed(tmp_path / "a", tmp_path / "b") == {
        f"language_model.model.layers.{layer}.self_attn.{x}_proj.weight"
        for layer in range(2)
        for x in "qk"
    }


def test_what_transformers_splits_on_loading_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.HrmTextConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)
    transformers.HrmTextForCausalLM(config).save_pretrained(tmp_path / "a")
    argv = ["convert", *map(str, (tmp_path / "a", tmp_path / "b")), "--to", "interleaved"]
    assert main(argv) == 2
    assert "gqkv_proj.weight: transformers splits or joins it" in capsys.readouterr().err
