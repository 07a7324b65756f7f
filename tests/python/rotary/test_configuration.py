"""Tests that configurations of other systems are read strictly."""

import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import posembed as pe
import pytest
import torch
from support.refusals import refused

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA31 = pe.RotarySpec(128, base=500000.0, scaling=pe.Llama3Scaling(8, 1, 4, 8192))
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 4096,
    "llama.attention.head_count": 32,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 128,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}

SHARED = json.loads((Path(__file__).parents[2] / "shared/configurations.json").read_text())


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}},
        {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},
        {**LLAMA, "hidden_size": 1, "head_dim": 128, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}},
        {"text_config": {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}},
    ],
)  # fmt: skip
def test_every_form_of_one_model(config: dict[str, Any], tmp_path: Path) -> None:
    assert pe.RotarySpec.from_huggingface(config) == LLAMA31
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert pe.RotarySpec.from_huggingface(tmp_path / "config.json") == LLAMA31
    assert pe.RotaryEmbedding.from_config(config, layout="bhsd").spec == LLAMA31


GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "layer_types": ["sliding_attention", "full_attention", "none"],
    "per_layer_config": {"01": {"head_dim": 512}},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "none": None,
    },
}
# The first name of LongRoPE; the factor is that of two lengths.
PHI3 = {
    **{"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 8, "rope_theta": 1e4},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
# A depth decoder whose sequences are codebooks: a factor of 32 beside a length of 16.
CSM_SCALING = {"factor": 32.0, "low_freq_factor": 0.001953125, "high_freq_factor": 0.0078125}
CSM = {
    **{"model_type": "csm_depth_decoder_model", "hidden_size": 1024, "num_attention_heads": 8, "rope_theta": 5e5},
    "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 16, **CSM_SCALING},
}
# Earlier versions wrote converted folders with this key, in the text model's part.
RECORDED = {"model_type": "llama", "head_dim": 8, "rope_theta": 1e4, "posembed_rotary_pairs": "interleaved"}


@pytest.mark.parametrize(
    ("config", "layer_type", "expected"),
    [
        (LLAMA, None, pe.RotarySpec(128)),  # the base of its class
        (PHI3, None, pe.RotarySpec(8, scaling=pe.LongRopeScaling([1.0] * 4, [2.0] * 4, 4096, factor=32))),
        (CSM, None, pe.RotarySpec(128, base=5e5, scaling=pe.Llama3Scaling(32, 0.001953125, 0.0078125, 16))),
        (GEMMA3, "sliding_attention", pe.RotarySpec(256)),
        (GEMMA3, "full_attention", pe.RotarySpec(256, base=1e6, scaling=pe.LinearScaling(8))),
        (GEMMA4, "sliding_attention", pe.RotarySpec(256)),
        (GEMMA4, "full_attention", pe.RotarySpec(512, base=1e6, scaling=pe.ProportionalScaling(0.25))),
        (RECORDED, None, pe.RotarySpec(8, interleaved=True)),
        ({"model_type": "two", "text_config": RECORDED}, None, pe.RotarySpec(8, interleaved=True)),
    ],
)
def test_specifications_of_files(config: dict[str, Any], layer_type: str | None, expected: pe.RotarySpec) -> None:
    assert pe.RotarySpec.from_huggingface(config, layer_type) == expected


def test_layers_that_do_not_rotate_beside_others() -> None:
    specs = pe.RotarySpec.for_layers({**GEMMA4, "num_hidden_layers": 3})
    assert [spec is None for spec in specs] == [False, False, True]
    refused((lambda: pe.RotarySpec.from_huggingface(GEMMA4, "none"), ValueError, "layer_type: layers of kind 'none' do not rotate"))  # fmt: skip


def test_keys_that_say_nothing_about_positions_are_ignored() -> None:
    """Keys of published files: LFM2.5-VL, EXAONE 4.5, Command R7B, DeepSeek V2."""
    plain = {**LLAMA, "rope_theta": 1e4}
    beside = {
        "block_mlp_init_scale": 1.0, "conv_use_xavier_init": True, "use_pos_enc": True,
        "tokens_per_second": 2, "deepstack_visual_indexes": [], "aux_loss_alpha": 0.001,
        "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "attn_output_gate": True, "logits_scaling": 8.0,
        "new_block": {"width": 3}, "moe_layer_freq": 1, "moe_router_scaling_factor": 2.5, "property": 1,
    }  # fmt: skip
    read = pe.RotarySpec.from_huggingface
    assert read({**plain, **beside}) == read(plain)


def test_yarn_of_telechat() -> None:
    """As vLLM reads it: the attention factor is 0.07 ln(factor) + 1."""
    scaling = {
        "rope_type": "telechat3-yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = {**LLAMA, "rope_theta": 1e6, "rope_scaling": scaling}
    found = pe.RotarySpec.from_huggingface(config)
    assert math.isclose(found.attention_factor, 0.07 * math.log(4.0) + 1.0, rel_tol=1e-15)
    usual = {**config, "rope_scaling": {**scaling, "rope_type": "yarn"}}
    assert torch.equal(found.frequencies(), pe.RotarySpec.from_huggingface(usual).frequencies())


@pytest.mark.parametrize("shared", [{"rope_theta": 1e6}, {"rope_type": "default"}, {"factor": 2.0}])
def test_keys_beside_kinds_of_layers_are_passed_over(shared: dict[str, Any]) -> None:
    kinds = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = {
        "model_type": "gemma4_text", "hidden_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 6,
        "head_dim": 256, "global_head_dim": 512, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }  # fmt: skip
    read = pe.RotarySpec.from_huggingface
    for kind in kinds:
        found = read({**config, "rope_parameters": {**kinds, **shared}}, kind)
        assert found == read({**config, "rope_parameters": kinds}, kind)
    refused((lambda: read({**config, "rope_parameters": {**kinds, "rope_warp": 1}}, "sliding_attention"), ValueError, "unknown keys ['rope_warp']"))  # fmt: skip


WORDS = "alibi freq freqs mscale nope ntk pos posemb rot scaling theta timescale wavelength yarn rope"


@pytest.mark.parametrize("word", [*WORDS.split(), "rotary", "positions", "longrope"])
def test_words_of_keys_about_positions(word: str) -> None:
    for key in (f"my_{word}", f"{word.upper()}-new", word):
        with pytest.raises(ValueError, match=rf"keys that are not understood: \['{key}'\]"):
            pe.RotarySpec.from_huggingface({**LLAMA, "rope_theta": 1e4, key: 3})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "rope_theta": 1e4, "rope_base_factor": 2}, "keys that are not understood: ['rope_base_factor']: pass ignore=['rope_base_factor'] if"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "unknown keys ['beta_fast']; accepted are ['factor'"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "factor: missing in rope_parameters"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "rope_type: the configuration contradicts itself"),
        ({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_theta: the configuration contradicts itself"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "stretch"}}, "rope_type: expected one of"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings: missing"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope_section: the model's code has no sections, got [1, 2]"),
        ({**LLAMA, "model_type": "granite_swa", "layer_rope_theta": [1e4, 1e6, 0], "layer_types": ["full_attention"] * 3}, "layer_rope_theta: layers differ: pass base= of [10000.0, 1000000.0]"),
        ({**LLAMA, "model_type": "qwen2_vl_text", "rope_theta": 1e4, "rope_scaling": {"mrope_interleaved": True}}, "mrope_interleaved: the configuration contradicts itself"),
        ({**LLAMA, "rope_theta": 1e4, "rope_interleave": True}, "interleaved: the configuration contradicts itself"),
        (GEMMA3, "layer_type: expected one of ['full_attention', 'sliding_attention'], got None"),
        ({**GGUF, "general.architecture": "new", "new.rope.freq_base": 1e4}, "general.architecture 'new' is not known"),
        ({**GGUF, "llama.rope.wavelength": 2}, "unknown keys ['wavelength']"),
        ({"dim": 64, "n_heads": 4}, "rope_theta: missing in params.json"),
        ({**LLAMA, "rope_theta": "big"}, "rope_theta: expected a number, got 'big'"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": "two"}}, "factor: expected a number, got 'two'"),
        ({**LLAMA, "rope_theta": 1e4, "hidden_size": "wide"}, "hidden_size: expected a number, got 'wide'"),
        ({**GGUF, "llama.rope.freq_base": "big"}, "freq_base: expected a number, got 'big'"),
        ({"dim": 64, "n_heads": 4, "rope_theta": [1e4]}, "rope_theta: expected a number, got [10000.0]"),
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4, "rope_warp": 2}, "keys that are not understood: ['rope_warp']: pass ignore=['rope_warp'] if"),
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4, "use_scaled_rope": True}, "rope_scaling_factor: missing in params.json, and no Llama 3 has a dim of 64"),
        ({**LLAMA, "rope_theta": 1e4, "attn_config": {"theta": 1e5}}, "keys that are not understood: ['attn_config']"),
        ({**LLAMA, "rope_theta": 1e4, "position_embedding_type": "absolute"}, "keys that are not understood: ['position_embedding_type']"),
        ({**LLAMA, "rope_theta": 1e4, "rotary_config": {"theta": 1e5}}, "keys that are not understood: ['rotary_config']"),
        ({**LLAMA, "rope_theta": 1e4, "sparse_config": {"rope_theta": 3}}, "keys that are not understood: ['sparse_config']"),
        ({"model_type": "gpt_neox", "hidden_size": 400, "num_attention_heads": 8, "rotary_pct": 0.34, "rotary_emb_base": 1e300}, "rope_theta: too large for 17 components"),
        ({**GGUF, "llama.context_length": 8, "llama.rope.freq_base": 1e30, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e308, "rope_freqs.weight": [1.0] * 64}, "factor: too large"),
        ({**LLAMA, "rope_theta": 1e4, "layers": [{"RoPE_base": 1e5}]}, "keys that are not understood: ['layers']"),
        ({**LLAMA, "rope_theta": 1e4, "layer_types": 2}, "layer_types: expected a list, got 2"),
        ({"model_type": "deepseek_v32", "indexer_rope_interleave": True}, "keys that are not understood: ['indexer_rope_interleave']"),
        ({**LLAMA, "rope_theta": None}, "rope_theta: missing in the configuration"),
        ({**RECORDED, "posembed_rotary_pairs": "yes"}, "posembed_rotary_pairs: expected 'interleaved' or"),
    ],
)  # fmt: skip
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the message is compared below)
        pe.RotarySpec.from_huggingface(config)
    assert message in str(raised.value)


@pytest.mark.parametrize("read", [pe.RotarySpec.from_huggingface, pe.RotarySpec.for_layers])
@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (GGUF, {"part": "text_config"}, "part: expected none: GGUF metadata has no parts"),
        ({"dim": 64, "n_heads": 4}, {"part": "x"}, "part: expected none: params.json has no parts"),
        ({"dim": 64, "n_heads": 4}, {"interleaved": True}, "interleaved: expected none: pairs of params.json are interleaved, got True"),
        ({**LLAMA, "rope_theta": 1e4}, {"part": "x"}, "part: expected none for a configuration"),
        ({**LLAMA, "rope_theta": 1e4}, {"interleaved": True}, "interleaved: the configuration contradicts itself"),
        (RECORDED, {"interleaved": False}, "interleaved: the configuration contradicts itself"),
        (LLAMA, {"base": 5e5}, "rope_theta: the configuration contradicts itself"),
        *(({**LLAMA, "model_type": "my_model", "rope_theta": 1e4}, stated, "model_type 'my_model' is not known: describe its rotation in full with RotarySpec") for stated in ({}, {"interleaved": True}, {"interleaved": False, "base": 1e4})),
    ],
)  # fmt: skip
def test_arguments_beside_a_file(read: Any, config: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    refused((lambda: read(config, **arguments), ValueError, message))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAMA, "rope_theta": 1e4}, "wavelength"),
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4}, "wavelength"),
        (GGUF, "llama.rope.wavelength"),
    ],
)
def test_keys_are_ignored_where_asked(config: dict[str, Any], key: str) -> None:
    refused((lambda: pe.RotarySpec.from_huggingface({**config, key: 2}), ValueError, "wavelength"))
    found = pe.RotarySpec.from_huggingface({**config, key: 2}, ignore=[key])
    assert found == pe.RotarySpec.from_huggingface(config)


@pytest.mark.parametrize("row", SHARED, ids=lambda row: row["name"])
def test_shared_rows(row: dict[str, Any]) -> None:
    names = ("layer_type", "part", "interleaved", "base")
    options = {name: row[name] for name in names if name in row}
    if "error" in row:
        with pytest.raises(ValueError, match=re.escape(row["error"])):
            pe.RotarySpec.from_huggingface(row["config"], **options)
    else:
        expected = pe.RotarySpec.from_json(json.dumps(row["specification"]))
        assert pe.RotarySpec.from_huggingface(row["config"], **options) == expected


def test_infinity_of_a_file_is_no_number(tmp_path: Path) -> None:
    """Python writes it, JSON does not have it."""
    config = {**LLAMA, "rope_theta": 1e4, "time_step_limit": [0.0, math.inf]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (config, tmp_path):
        read = pe.RotarySpec.from_huggingface(given, ignore=["time_step_limit"])
        assert read == pe.RotarySpec(128)
    refused((lambda: pe.RotarySpec.from_huggingface({**LLAMA, "rope_theta": math.inf}), ValueError, "rope_theta: expected a number, got 'Infinity'"))  # fmt: skip


@pytest.mark.parametrize("numbers", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1, 2)])
def test_tensors_among_the_keys_may_be_arrays(numbers: Any) -> None:
    fields = {**GGUF, "llama.context_length": 8192, "llama.rope.dimension_count": 4}
    found = pe.RotarySpec.from_huggingface({**fields, "rope_freqs.weight": numbers})
    assert found.scaling.short_factor == (1.0, 2.0)


def test_names_of_classes_take_no_time() -> None:
    """Each layer sees the configuration, but no copy of its thousands of labels."""
    fields = {**LLAMA, "rope_theta": 1e4, "num_hidden_layers": 126, "layer_types": ["full_attention"] * 126}

    def calls(labels: int) -> int:
        count = itertools.count()
        sys.setprofile(lambda *_: next(count))
        try:
            specs = pe.RotarySpec.for_layers({**fields, "id2label": {number: str(number) for number in range(labels)}})
        finally:
            sys.setprofile(None)
        assert specs == [pe.RotarySpec(128)] * 126
        return next(count)

    calls(0)
    assert calls(500) - calls(0) < 10 * 500


def test_deep_values_are_refused(tmp_path: Path) -> None:
    """By a message, where JSON's own code would raise RecursionError."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    refused((lambda: pe.RotarySpec.from_huggingface({**LLAMA, "rope_scaling": deep}), ValueError, "config: expected JSON of at most 64 levels"))  # fmt: skip
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    refused((lambda: pe.RotarySpec.from_huggingface(tmp_path), ValueError, "config.json: .*expected JSON of fewer levels"))  # fmt: skip
    (tmp_path / "model.safetensors").touch()
    refused((lambda: pe.InputEmbedding.from_huggingface(tmp_path), ValueError, "config.json: .*expected JSON of fewer levels"))  # fmt: skip


# ------------------------------------------------------------------------- keys that files have


def test_words_are_matched_whole() -> None:
    """Among the others of a key; schedules are no frequencies."""
    for key in ("proposition", "frequent_loss", "my_yarns", "possible_freqx", "moe_layer_freq", "save_steps_freq"):
        assert pe.RotarySpec.from_huggingface({**LLAMA, key: 4}) == pe.RotarySpec(128)
    for key in ("high_freq", "base_freq", "rope_freqs"):
        refused((lambda: pe.RotarySpec.from_huggingface({**LLAMA, key: 4}), ValueError, "keys that are not understood"))  # fmt: skip


@pytest.mark.parametrize("key", ["dual_chunk_attention_config", "my_attn_config", "attention_config"])
def test_blocks_about_attention_are_looked_into(key: str) -> None:
    block = {key: {"chunk_size": 8, "original_max_position_embeddings": 16}}
    with pytest.raises(ValueError, match=rf"keys that are not understood: \['{key}'\]"):
        pe.RotarySpec.from_huggingface({**LLAMA, **block})
    assert pe.RotarySpec.from_huggingface({**LLAMA, key: {"chunk_size": 8}}) == pe.RotarySpec(128)


NOMIC = {"model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "rotary_emb_base": 1000}
STABLE = {"model_type": "stablelm", "hidden_size": 2560, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("fields", "key", "value", "other"),
    [
        ({"model_type": "glm_moe_dsa"}, "indexer_rope_interleave", True, False),
        ({"model_type": "mimo", "head_dim": 128, "rope_theta": 1e4}, "use_mrope", False, True),
        ({"model_type": "minimax_m3_vl_vision"}, "rope_mode", "3d", "2d"),
        ({"model_type": "modernbert", "num_hidden_layers": 1}, "position_embedding_type", "absolute", "rope"),
        ({"model_type": "hunyuan_v1_moe"}, "use_rotary_pos_emb", True, False),
        ({"model_type": "hunyuan_v1_moe"}, "position_embedding_xdrope", False, True),
        # What is read, under another name.
        ({"model_type": "lfm2"}, "theta", 1e6, 1e4),
        ({**LLAMA, "rope_parameters": {"rope_theta": 5e5}}, "text_rope_base", 5e5, 1e4),
        ({"model_type": "sam2_video"}, "memory_attention_rope_theta", 10000, 20000),
        (NOMIC, "rotary_emb_fraction", 1.0, 0.5),
        (NOMIC, "rotary_emb_interleaved", False, True),
        (NOMIC, "rotary_scaling_factor", 1, 2),
        (STABLE, "rope_pct", 0.25, 0.5),
        ({**LLAMA, "rope_theta": 1e4}, "rope_type", "default", "yarn"),
        ({**LLAMA, "rope_theta": 1e4}, "attn_config", {"rope_theta": 1e4}, {"rope_theta": 1e6}),
        ({**LLAMA, "rope_theta": 1e4}, "my_config", {"rope_interleaved": False}, {"rope_interleaved": True}),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_scaling", {"type": "linear", "factor": 2.0}, {"type": "linear", "factor": 3.0}),
        ({"dim": 64, "n_heads": 4, "rope_theta": 1e4}, "rope_interleaved", True, False),
    ],
)  # fmt: skip
def test_keys_that_say_what_is_known(fields: dict[str, Any], key: str, value: Any, other: Any) -> None:
    """They are refused where they say something else."""
    read = pe.RotarySpec.from_huggingface
    assert read({**fields, key: value}) == read(fields)
    refused((lambda: read({**fields, key: other}), ValueError, key.removeprefix("attn_config") or "rope_theta"))


def test_a_file_that_rotates_where_its_class_does_not() -> None:
    """jina-embeddings-v3 has code of its own, and XLM-RoBERTa's name."""
    fields = {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    with pytest.raises(ValueError, match="position_embedding_type: got 'rotary', but the class") as raised:
        pe.RotarySpec.from_huggingface(fields)
    assert "does not rotate" not in str(raised.value)


@pytest.mark.parametrize("ignore", [(), ("rope_ratio",)])
def test_ignored_keys_that_are_read_count(ignore: tuple[str, ...]) -> None:
    """ChatGLM3 multiplies its base by rope_ratio, ChatGLM2-6B-32K divides positions by it."""
    fields = {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32}
    fields |= {"kv_channels": 128, "rope_ratio": 500, "original_rope": True}
    refused((lambda: pe.RotarySpec.from_huggingface(fields, ignore=ignore), ValueError, "rope_ratio: .* pass base="))  # fmt: skip
    assert pe.RotarySpec.from_huggingface(fields, ignore=ignore, base=5e6).base == 5e6
    assert pe.RotarySpec.from_huggingface(GGUF, ignore=["llama.rope.freq_base"]).base == 5e5
    for plain in ({**fields, "rope_ratio": 1}, {k: v for k, v in fields.items() if k != "rope_ratio"}):
        assert pe.RotarySpec.from_huggingface(plain).base == 1e4


def test_a_part_has_the_class_that_the_whole_gives_it() -> None:
    """Published files of Qwen3-VL and MiniMax M3 state other types."""
    vision = {"hidden_size": 1152, "num_heads": 16, "depth": 27}
    towers = [
        pe.RotarySpec.from_huggingface(
            {"model_type": "qwen3_vl", "vision_config": {**vision, **stated}}, part="vision_config"
        )
        for stated in ({}, {"model_type": "qwen3_vl"}, {"model_type": ""})
    ]
    assert towers[0] == towers[1] == towers[2]
    assert towers[0].head_dim == 72


@pytest.mark.parametrize("model_type", ["t5gemma", "t5gemma2"])
def test_encoders_and_decoders_that_rotate(model_type: str) -> None:
    fields = {"model_type": model_type}
    refused((lambda: pe.RotarySpec.from_huggingface(fields), ValueError, "made of parts: pass part= of ['decoder', 'encoder']"))  # fmt: skip
    for part in ("encoder", "decoder"):
        spec = pe.RotarySpec.from_huggingface(fields, "sliding_attention", part=part)
        assert spec == pe.RotarySpec(256)


def test_kimi_linear_lists_its_layers_in_a_block() -> None:
    """Counted from 1."""
    block = {"full_attn_layers": [2], "kda_layers": [1, 3]}
    fields = {"model_type": "kimi_linear", "num_hidden_layers": 3, "linear_attn_config": block}
    kinds = [layer["kind"] for layer in pe.describe(fields)["layers"]]
    assert kinds == ["linear_attention", "full_attention", "linear_attention"]
    wrong = {**fields, "linear_attn_config": {"full_attn_layers": [4]}}
    refused((lambda: pe.RotarySpec.for_layers(wrong), ValueError, "full_attn_layers: expected 1 to 3, got 4"))  # fmt: skip


def test_scales_of_dia() -> None:
    """Its code has self.scaling = 1."""
    for model_type in ("dia_encoder", "dia_decoder"):
        scale = pe.RotarySpec.from_huggingface({"model_type": model_type}).score_scale
        assert scale is not None
        assert scale.factor == pytest.approx(128**0.5)


def test_objects_with_keys_that_their_class_does_not_know() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(**LLAMA, wavelength=3)
    refused((lambda: pe.RotarySpec.from_huggingface(config), ValueError, "keys that are not understood: ['wavelength']"))  # fmt: skip
    assert pe.RotarySpec.from_huggingface(config, ignore=["wavelength"]) == pe.RotarySpec(128)
    assert pe.describe(config, ignore=["wavelength"])["rotary"] == 0


def test_errors_name_the_key_that_the_file_has() -> None:
    """Of several names for one value."""
    hunyuan = {"model_type": "hunyuan_vl", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    for key, value in (("xdrope_section", "x"), ("mrope_section", 3)):
        rope = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, key: value}
        refused((lambda rope=rope: pe.RotarySpec.from_huggingface({**hunyuan, "rope_scaling": rope}), ValueError, f"{key}: expected whole numbers"))  # fmt: skip
