"""Tests published configurations: older layouts, missing keys, models that do not rotate.

If transformers is installed, its reading of the same keys is the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.commands import main
from support.catalogue import having
from support.refusals import refused

SIZES: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16}
LLAMA: dict[str, Any] = {"model_type": "llama", "rope_theta": 1e4, **SIZES}
FALCON: dict[str, Any] = {"model_type": "falcon", "rope_theta": 1e4, **SIZES}
DEEPSEEK: dict[str, Any] = {"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "rope_theta": 10000.0, **SIZES}
# Text keys beside a vision tower's, as transformers 4 wrote them.
QWEN2_VL: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"embed_dim": 1280, "num_heads": 16},
}


def own_config(model_type: str, **fields: Any) -> Any:
    """The configuration object that transformers makes from these keys."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    return transformers.CONFIG_MAPPING[model_type](**fields)


# -------------------------------------------------------------------------------------- layouts


def test_a_nested_text_model_comes_before_keys_beside_it() -> None:
    text = {**QWEN2_VL, "model_type": "qwen2_vl_text", "rope_theta": 5e5}
    both = {**QWEN2_VL, "text_config": text}
    assert pe.RotarySpec.from_huggingface(both).base == 5e5


# ------------------------------------------------------------------------------------- pairings


# ChatGLM is no class of transformers: test_remote_families.py.
@pytest.mark.parametrize("model_type", sorted({*having("pairing", "rope_interleave")} - {"chatglm"}))
def test_rope_interleave_may_be_missing(model_type: str) -> None:
    assert own_config(model_type).rope_interleave is True  # the meaning of a missing key there
    config = {**DEEPSEEK, "model_type": model_type}
    assert pe.RotarySpec.from_huggingface(config).interleaved
    assert pe.RotarySpec.from_huggingface(config, interleaved=True).interleaved
    refused((lambda: pe.RotarySpec.from_huggingface({**config, "rope_interleave": False}, interleaved=True), ValueError, "interleaved: the configuration contradicts itself"))  # fmt: skip


def test_rope_interleave_null_is_no_default() -> None:
    config = {**DEEPSEEK, "rope_interleave": None}
    refused((lambda: pe.RotarySpec.from_huggingface(config), ValueError, "rope_interleave: missing"))  # fmt: skip
    assert pe.RotarySpec.from_huggingface(config, interleaved=True).interleaved


# ------------------------------------------------------------------------------------- scalings


def test_llama4_keeps_and_stretches_without_a_blend() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**LLAMA, "model_type": "llama4_text", "head_dim": 128, "rope_theta": 5e5}
    spec = pe.RotarySpec.from_huggingface({**config, "rope_scaling": scaling})
    plain = pe.RotarySpec(128, base=5e5, interleaved=True).frequencies()
    turns = 8192 * plain / (2 * torch.pi)
    expected = torch.where(turns < 1.0, plain / 16.0, plain)
    assert (turns < 1.0).any()
    torch.testing.assert_close(spec.frequencies(), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("numerics", ["exact", "float32"])
def test_a_wavelength_at_the_one_limit_of_llama3_is_a_number(numerics: str) -> None:
    length = 8192
    limit = length / float(torch.tensor(2 * torch.pi, dtype=torch.float32))  # turns of pair 0
    spec = pe.RotarySpec(2, scaling=pe.Llama3Scaling(8.0, limit, limit, length), numerics=numerics)
    position = torch.ones(1, 1, dtype=torch.int64)
    assert pe.functional.rotary(torch.ones(1, 1, 1, 2), None, position, spec=spec).isfinite().all()


# ------------------------------------------------------------------------- models that do not rotate


@pytest.mark.parametrize(
    ("model_type", "fields", "rotates"),
    [
        ("falcon", {"alibi": True}, False),
        ("falcon", {"alibi": False}, True),
        ("falcon", {}, True),
        ("RefinedWebModel", {"alibi": True}, False),
        ("esm", {"position_embedding_type": "rotary"}, True),
        ("esm", {"position_embedding_type": "absolute"}, False),
        ("esm", {}, False),
        ("granitemoehybrid", {"position_embedding_type": "rope", "layer_types": ["attention"]}, True),
        ("granitemoehybrid", {"position_embedding_type": "nope"}, False),
        ("granitemoehybrid", {"position_embedding_type": None}, False),
        ("zamba2", {"use_mem_rope": True, "attention_head_dim": 64}, True),
        ("zamba2", {"use_mem_rope": False, "attention_head_dim": 64}, False),
        ("wav2vec2-conformer", {"position_embeddings_type": "rotary"}, True),
        ("wav2vec2-conformer", {"position_embeddings_type": "relative"}, False),
        ("wav2vec2-bert", {"position_embeddings_type": "rotary"}, True),
        ("wav2vec2-bert", {"position_embeddings_type": "relative_key"}, False),
        ("seamless_m4t", {"position_embeddings_type": "rotary"}, True),
        ("seamless_m4t", {"position_embeddings_type": "relative"}, False),
        ("gptj", {"rotary": True, "rotary_dim": 32}, True),
        ("gptj", {"rotary": False, "rotary_dim": 32}, False),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, True),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, False),
    ],
)  # fmt: skip
def test_whether_a_family_rotates(model_type: str, fields: dict[str, Any], rotates: bool) -> None:
    base = None if model_type == "gptj" else 1e4
    config = {"model_type": model_type, "rope_theta": base, **SIZES, **fields}
    spec = pe.RotarySpec.from_huggingface(config)
    assert spec.head_dim == 64
    assert (spec.rotary_dim > 0) == rotates
    if not rotates and model_type not in ("RefinedWebModel", "smollm3"):  # whose files say less
        assert pe.RotarySpec.from_huggingface(own_config(model_type, **fields)).rotary_dim == 0


@pytest.mark.parametrize("model_type", having("rotates"))
def test_full_attention_beside_sliding_windows_does_not_rotate(model_type: str) -> None:
    config = {
        **LLAMA,
        "model_type": model_type,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "sliding_window": 4096,
    }
    spec = pe.RotarySpec.from_huggingface(config, "sliding_attention")
    assert spec.rotary_dim == 64
    assert pe.RotarySpec.from_huggingface(config) == spec
    assert pe.RotarySpec.for_layers(config) == [spec, None]
    refused((lambda: pe.RotarySpec.from_huggingface(config, "full_attention"), ValueError, "layers of kind 'full_attention' do not rotate"))  # fmt: skip


# ---------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("config", [None, 5, [LLAMA], object(), dict])
def test_what_is_no_configuration(config: Any) -> None:
    refused(
        (lambda: pe.RotarySpec.from_huggingface(config), TypeError, "config: expected a dict, a PretrainedConfig or the path"),
        (lambda: pe.ALiBi.from_config(config), TypeError, "config: expected a dict, a PretrainedConfig or the path"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rope_scaling": "linear"}, ValueError, "rope_scaling: expected a dictionary, got 'linear'"),
        ({"rope_parameters": [1]}, ValueError, r"rope_parameters: expected a dictionary, got \[1\]"),
        ({"rope_theta": None, "text_config": 5}, TypeError, "text_config: expected a dict"),
    ],
)  # fmt: skip
def test_keys_that_are_no_dictionaries(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    refused((lambda: pe.RotarySpec.from_huggingface({**LLAMA, **fields}), error, message))


@pytest.mark.parametrize("text", ["5", "null", "[]", '"llama"'])
def test_files_without_an_object(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused((lambda: pe.RotarySpec.from_huggingface(path), ValueError, "the file: expected an object, got"))  # fmt: skip
    assert main(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"posembed explain: {path}: byte 0: the file: expected an object")


def test_a_folder_is_its_configuration(tmp_path: Path) -> None:
    refused((lambda: pe.RotarySpec.from_huggingface(tmp_path), ValueError, "expected a folder with config.json or params.json"))  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**FALCON, "alibi": False}))
    assert pe.RotarySpec.from_huggingface(tmp_path) == pe.RotarySpec(64)
    assert pe.RotarySpec.from_huggingface(str(tmp_path)) == pe.RotarySpec(64)
    (tmp_path / "config.json").write_text(json.dumps({**FALCON, "alibi": True}))
    assert pe.ALiBi.from_config(tmp_path).num_heads == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "layer_type: expected none: there is one kind of layer, got 'sliding_attention'"),
        ({**LLAMA, "layer_types": ["full_attention"]}, r"layer_type: expected one of \['full_attention'\], got 'sliding_attention'"),
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4}, "layer_type: expected none: there is one kind of layer, got 'sliding_attention'"),
        (
            {
                "general.architecture": "llama",
                "llama.attention.key_length": 64,
                "llama.rope.freq_base": 1e4,
            },
            "layer_type: expected none: there is one kind of layer, got 'sliding_attention'",
        ),
    ],
)  # fmt: skip
def test_a_kind_of_layer_that_is_not_there(config: dict[str, Any], message: str) -> None:
    refused((lambda: pe.RotarySpec.from_huggingface(config, "sliding_attention"), ValueError, message))  # fmt: skip


def test_compared_configurations_may_have_one_kind_of_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a plot is written
    layered = {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}
    paths = []
    for name, config in {"layered": layered, "alike": LLAMA}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        paths.append(str(tmp_path / name))
    for command in (["diff"], ["plot", "scores"]):
        assert main([*command, *paths, "--layer-type", "full_attention"]) == 0
    assert main(["explain", paths[1], "--layer-type", "full_attention"]) == 2
    assert "--layer-type: expected none" in capsys.readouterr().err


def test_layers_that_rotate_alike() -> None:
    config = {**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}
    spec = pe.RotarySpec.from_huggingface(config)
    assert pe.RotarySpec.from_huggingface(config, "sliding_attention") == spec
    gguf = {
        "general.architecture": "gpt-oss",
        "gpt-oss.attention.key_length": 64,
        "gpt-oss.attention.sliding_window": 128,
        "gpt-oss.rope.freq_base": 1e4,
    }
    assert pe.RotarySpec.from_huggingface(gguf, "sliding_attention") == pe.RotarySpec(64)
