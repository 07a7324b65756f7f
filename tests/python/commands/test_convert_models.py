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

transformers = pytest.importorskip("transformers")

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
    for name, weight in model.named_parameters():
        if "norm" in name:  # of ones, a norm that was forgotten would not show
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    before = logits(tmp_path, kind)

    source, target = tmp_path / "model.safetensors", tmp_path / "converted.safetensors"
    argv = ["convert", str(source), str(target), "--config", str(tmp_path), "--to", "interleaved"]
    assert main(argv) == 0
    target.replace(source)
    assert (logits(tmp_path, kind) - before).abs().max() > 1e-4  # the model's own rotation

    spec = pe.RotarySpec.from_huggingface(config)
    interleaved = dataclasses.replace(spec, interleaved=True)

    def rotate(query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return pe.functional.rotary(query, key, spec=interleaved, layout="bhsd")

    monkeypatch.setattr(sys.modules[kind.__module__], "apply_rotary_pos_emb", rotate)
    assert_close(logits(tmp_path, kind), before, 1e-6)
