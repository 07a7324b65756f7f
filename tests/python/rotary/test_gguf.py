"""Tests GGUF metadata beyond test_gguf_architectures.py: tensors, factors, scales of scores, refusals."""

import math
from typing import Any

import posembed as pe
import pytest
import torch

YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 8192}


def metadata(architecture: str, **rope: Any) -> dict[str, Any]:
    """A file's keys; double underscores stand for dots in rope keys."""
    keys = {f"{architecture}.rope.{k.replace('__', '.')}": v for k, v in rope.items()}
    return {
        "general.architecture": architecture,
        f"{architecture}.embedding_length": 2048,
        f"{architecture}.attention.head_count": 32,
        f"{architecture}.context_length": 131072,
        f"{architecture}.rope.freq_base": 500000.0,
        **keys,
    }


def yarn(architecture: str, **more: Any) -> dict[str, Any]:
    return {**metadata(architecture, **more), **{f"{architecture}.rope.{k}": v for k, v in YARN.items()}}


def test_attention_factors_multiply() -> None:
    fields = yarn("qwen3", scaling__attn_factor=0.5)
    found = pe.RotarySpec.from_huggingface(fields).attention_factor
    assert math.isclose(found, 0.5 * (0.1 * math.log(4.0) + 1.0))


def test_llama_3_factors_are_a_tensor_of_the_file() -> None:
    """The converter writes the divisor of each frequency for Llama 3's scaling."""
    llama3 = pe.RotarySpec(64, base=5e5, interleaved=True, scaling=pe.Llama3Scaling(8, 1, 4, 8192))
    plain = pe.RotarySpec(64, base=5e5, interleaved=True)
    factors = (plain.frequencies() / llama3.frequencies()).tolist()
    fields = {**metadata("llama"), "rope_freqs.weight": factors}
    found = pe.RotarySpec.from_huggingface(fields)
    with torch.device("meta"):  # as for large models
        assert pe.RotarySpec.from_huggingface(fields) == found
    assert torch.allclose(found.frequencies(), llama3.frequencies(), rtol=1e-15, atol=0)
    assert found.attention_factor == 1.0
    assert found.interleaved


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (metadata("llama", scaling__type="su"), "scaling.type: expected 'none', 'linear', 'longrope' or 'yarn', got 'su'"),
        (metadata("phi3", scaling__type="longrope"), "rope_factors_short.weight: missing in tensors"),
        (metadata("llama", scaling__type="yarn"), "scaling.factor: missing in llama.rope"),
        (metadata("llama", scaling__factor=2.0, scale_linear=4.0), "scaling.factor: the configuration contradicts itself"),
        (metadata("llama", scaling__attn_factor=2.0), "scaling.attn_factor: expected none beside"),
        (metadata("llama", dimension_sections=[8, 12, 12, 0]), "dimension_sections: 'llama' is not known"),
        (yarn("llama", scaling__yarn_ext_factor=0.5), "scaling.yarn_ext_factor: expected 1"),
        ({**metadata("llama"), "rope_shift.weight": [1.0]}, "tensors: unknown keys ['rope_shift.weight']"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the message is compared below)
        pe.RotarySpec.from_huggingface(fields)
    assert message in str(raised.value)


def test_the_base_of_files_without_one_is_the_programs() -> None:
    """llama-model.cpp sets 10000 before it reads rope.freq_base."""
    fields = {**metadata("qwen2"), "qwen2.rope.freq_base": None}
    assert pe.RotarySpec.from_huggingface(fields).base == 10000.0


@pytest.mark.parametrize(
    ("architecture", "numbers", "scale"),
    [
        ("gemma3n", {}, 1.0),
        ("gemma4", {}, 1.0),
        ("gemma4-assistant", {"nextn_predict_layers": 46}, 1.0),
        ("gemma2", {"embedding_length": 4608}, (4608 / 32) ** -0.5),
        ("gemma2", {"block_count": 42}, None),
        ("gemma3", {"block_count": 62, "embedding_length": 5376}, (5376 / 32) ** -0.5),
        ("gemma3", {"block_count": 48}, None),
        ("gemma2", {"attention.scale": 0.25}, 0.25),
    ],
)
def test_scales_of_scores_that_the_program_sets(
    architecture: str, numbers: dict[str, float], scale: float | None
) -> None:
    """hparams.f_attention_scale of the architecture's program."""
    own = {"block_count": 46, "attention.head_count": 32, "attention.key_length": 128}
    own |= {"embedding_length": 4096, "context_length": 8192, "rope.freq_base": 1e6}
    own |= {"attention.sliding_window": 1024, **numbers}
    if architecture.startswith("gemma4"):
        own["attention.sliding_window_pattern"] = [True, False] * 23
    fields = {f"{architecture}.{key}": value for key, value in own.items()}
    fields |= {"general.architecture": architecture, "rope_freqs.weight": [1.0] * 64}
    if architecture not in ("gemma4", "gemma4-assistant"):
        del fields["rope_freqs.weight"]
    found = pe.RotarySpec.from_huggingface(fields, "sliding_attention").score_scale
    if scale is None:
        assert found is None
    else:
        assert found is not None
        assert found.factor == pytest.approx(scale * 128**0.5)
