"""Tests every architecture of llama.cpp: GGUF metadata are read as its program rotates, or refused.

Numbers are compared with published/llama_cpp.py, which computes them in NumPy from the table and not with posembed. So
that a wrong entry of the table shows too, pairings, layers and bases are written out once more, below and in
published/gguf.py.
"""

import dataclasses
from typing import Any

import numpy as np
import posembed as pe
import pytest
from published import gguf
from published.gguf_metadata import file
from published.llama_cpp import ARCHITECTURES, TABLE, File, Rotation
from support.refusals import refused

FULL, SLIDING = "full_attention", "sliding_attention"
ROTATED = sorted(name for name, rules in ARCHITECTURES.items() if "pairing" in rules and "refused" not in rules)
UNROTATED = sorted(name for name, rules in ARCHITECTURES.items() if "instead" in rules)

# Where each layer has a full or a sliding attention and rotates (F, S), or does not rotate (.), if the file has a
# window of 128 and no pattern: load_swa_pattern and use_rope in src/models.
BY_PROGRAM = {
    "afmoe": "SSS.SSS.",
    "cohere2": "SSS.SSS.",
    "cohere2moe": ".SSS.SSS",
    "exaone-moe": "SSS.SSS.",
    "gemma-embedding": "SSSSSFSS",
    "gemma2": "SFSFSFSF",
    "gemma3": "SSSSSFSS",
    "gemma3n": "SSSSFSSS",
    "gpt-oss": "SFSFSFSF",
    "laguna": "FSSSFSSS",
    "llama4": "SSS.SSS.",
    "mellum": "SSSFSSSF",
    "minimax-01": ".......F",
    "modern-bert": "FSSFSSFS",
    "muse-glimmer": "SSS.SSS.",
    "olmo2": "SSSFSSSF",
    "plamo3": "SSSSSSSF",
    "qwen35": "...F...F",
    "qwen35moe": "...F...F",
    "qwen3next": "...F...F",
    "qwen4exp": "...F...F",
    "smallthinker": ".SSS.SSS",
    "smollm3": "FFF.FFF.",
}
# The same with the pattern [True, True, False, True], which the program needs.
BY_LIST = {
    "dots3note": "SSFSSSFS",
    "gemma4": "SSFSSSFS",
    "gemma4-assistant": "SSFSSSFS",
    "granite_swa": "SSFSSSFS",
    "maple": "SS.SSS.S",
    "mimo2": "SSFSSSFS",
    "spark2_5": "SSFSSSFS",
    "step35": "SSFSSSFS",
}
# Bases of sliding layers that no key states are 10000 in these, and freq_base elsewhere.
BASE_IN_PROGRAM = (
    *("gemma-embedding", "gemma3", "gemma3n", "gemma4", "gemma4-assistant"),
    *("mimo2", "modern-bert", "plamo3", "step35"),
)
# All layers have one base, whatever freq_base_swa says.
ONE_BASE = ("cohere2", "cohere2moe", "exaone-moe", "granite_swa", "mellum", "olmo2")
# Layers with a sliding window are not scaled.
UNSCALED = [*BASE_IN_PROGRAM, "laguna", "mellum", "muse-glimmer", "olmo2"]


def refusal(metadata: dict[str, Any], **options: Any) -> str:
    """The message with which both readers refuse the metadata."""
    with pytest.raises(ValueError) as one:  # noqa: PT011  (the message is compared)
        pe.RotarySpec.from_huggingface(metadata, **options)
    with pytest.raises(ValueError) as each:  # noqa: PT011
        pe.RotarySpec.for_layers(metadata, **options)
    assert str(one.value) == str(each.value)
    return str(one.value)


def refusal_of_layers(metadata: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as each:  # noqa: PT011  (the message is compared)
        pe.RotarySpec.for_layers(metadata)
    return str(each.value)


# ------------------------------------------------------------------------------ against llama.cpp


def assert_same(found: pe.RotarySpec | None, right: Rotation | None) -> None:
    assert (found is None) == (right is None)
    if found is None or right is None:
        return
    assert (found.head_dim, found.rotary_dim) == (right.head_dim, right.rotary_dim)
    assert (found.rotary_start, found.reverse) == (0, False)
    assert found.interleaved == right.interleaved
    assert (found.sections.axis_of_pair if found.sections else (0,) * len(right.axes)) == right.axes
    np.testing.assert_allclose(found.frequencies().numpy(), right.frequencies, rtol=1e-12)
    assert found.attention_factor == pytest.approx(right.amplitude, rel=1e-12)


@pytest.mark.parametrize("own", [False, True], ids=["program", "file"])
@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
@pytest.mark.parametrize("architecture", ROTATED)
def test_layers_are_those_of_llama_cpp(architecture: str, scaling: str, own: bool) -> None:
    rules = ARCHITECTURES[architecture]
    metadata = file(architecture, scaling, own=own)
    if scaling != "none" and ("program_base" in rules or (own and "alpha" in rules)):
        refused = refusal(metadata)
        assert refused.startswith(("scaling.type: ", "scaling.alpha: "))
        return
    reference = File(metadata)
    found = pe.RotarySpec.for_layers(metadata)
    right = [reference.layer(place) for place in range(len(found))]
    assert len(found) == reference.get("block_count")
    for one, other in zip(found, right, strict=True):
        assert_same(one, other)
    if "windows" in rules:
        for kind, slides in ((FULL, False), (SLIDING, True)):
            of_kind = [
                spec
                for spec, slid in zip(found, reference.slides(), strict=True)
                if slid == slides and spec is not None
            ]
            if of_kind:
                assert pe.RotarySpec.from_huggingface(metadata, kind) == of_kind[0]
            else:
                with pytest.raises(ValueError, match=f"layers of kind '{kind}' do not rotate"):
                    pe.RotarySpec.from_huggingface(metadata, kind)


@pytest.mark.parametrize(
    ("kind", "architecture"), [(kind, name) for kind, names in gguf.TYPES.items() for name in names.split()]
)
def test_pairs_are_those_of_llama_cpp(kind: str, architecture: str) -> None:
    if kind == "NONE":
        assert architecture in UNROTATED
        return
    says = {"rope__dimension_sections": [3, 3, 2, 0]} if "MROPE" in kind else {}
    found = [spec for spec in pe.RotarySpec.for_layers(file(architecture, **says)) if spec]
    assert {spec.interleaved for spec in found} == {kind == "NORM"}
    axes = {"MROPE": (0, 0, 0, 1, 1, 1, 2, 2), "IMROPE": (0, 1, 2, 0, 1, 2, 0, 1)}
    for spec in found:
        assert (spec.sections.axis_of_pair if spec.sections else None) == axes.get(kind)


@pytest.mark.parametrize("own", [False, True], ids=["program", "file"])
@pytest.mark.parametrize("architecture", [*BY_PROGRAM, *BY_LIST])
def test_layers_written_out(architecture: str, own: bool) -> None:
    """With the bases of the program, or one of the file's own for sliding layers."""
    kinds = {**BY_PROGRAM, **BY_LIST}[architecture]
    says: dict[str, Any] = {"block_count": 8, "attention__sliding_window": 128}
    if own and "S" in kinds and architecture not in ONE_BASE:
        says["rope__freq_base_swa"] = 3e4
    if architecture in BY_LIST:
        says["attention__sliding_window_pattern"] = [True, True, False, True] * 2
    if "rope_freqs.weight" in (metadata := file(architecture, "linear", **says)):
        metadata["rope_freqs.weight"] = [1.0] * 16
    base = 1e4 if architecture in BASE_IN_PROGRAM else 5e5
    if "rope__freq_base_swa" in says or architecture == "dots3note":  # whose file has to say it
        base = 3e4
    found = pe.RotarySpec.for_layers(metadata)
    assert "".join("." if spec is None else "r" for spec in found) == "".join(
        "." if kind == "." else "r" for kind in kinds
    )
    for spec, kind in zip(found, kinds, strict=True):
        if spec is None:
            continue
        series = (base if kind == "S" else 5e5) ** (-2 / spec.rotary_dim)
        expected = series / (1 if kind == "S" and architecture in UNSCALED else 8)
        assert spec.frequencies()[1].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("architecture", "says", "right"),
    [  # (head_dim, rotary_dim) of full layers, and of sliding ones
        ("step35", {"rope__dimension_count": 32}, ((32, 16), (32, 32))),
        ("step35", {"rope__dimension_count": 32, "rope__dimension_count_swa": 8}, ((32, 16), (32, 8))),
        ("laguna", {"rope__dimension_count_swa": 32}, ((32, 16), (32, 32))),
        ("spark2_5", {"rope__dimension_count_swa": 32}, ((32, 16), (32, 32))),
        ("maple", {"rope__dimension_count_swa": 32}, (None, (32, 32))),
        ("gemma4", {"attention__key_length": 64, "attention__key_length_swa": 48, "rope__dimension_count": 64, "rope__dimension_count_swa": 48}, ((64, 64), (48, 48))),
        ("dots3note", {"attention__key_length_swa": 48}, ((16, 16), (16, 16))),
        *((name, {}, ((16, 16), None)) for name in ("bailingmoe3", "deepseek2", "deepseek32", "glm-dsa", "hy_v4", "minicpm3", "mistral4", "plm")),
        *((name, {}, ((32, 32), None)) for name in ("plamo", "cogvlm", "deepseek2-ocr")),
        ("deepseek2-ocr", {"attention__key_length": 64}, ((64, 64), None)),
        ("openelm", {"attention__head_count": [4, 8, 2]}, ((32, 16), None)),
    ],
)  # fmt: skip
def test_widths_written_out(architecture: str, says: dict[str, Any], right: Any) -> None:
    metadata = file(architecture, **says)
    if "rope_freqs.weight" in metadata:
        metadata["rope_freqs.weight"] = [1.0] * 32
    for kind, widths in zip((FULL, SLIDING), right, strict=True):
        if widths is not None:
            asked = kind if "windows" in ARCHITECTURES[architecture] else None
            spec = pe.RotarySpec.from_huggingface(metadata, asked)
            assert (spec.head_dim, spec.rotary_dim) == widths


@pytest.mark.parametrize("architecture", ROTATED)
def test_tensors_written_out(architecture: str) -> None:
    """Which architectures read a tensor of divisors: ROPE_FREQS and ROPE_FACTORS in src/models."""
    divided = """
        apertus arcee deci dflash eagle3 exaone exaone-moe exaone4 gemma4 gemma4-assistant granite granite_swa granitehybrid
        granitemoe llama llama-embed llama4 minicpm mistral3 nanbeige step35
    """.split()  # noqa: SIM905
    metadata = {**file(architecture), "rope_freqs.weight": [2.0] * 16}
    if "tensors_of" not in ARCHITECTURES[architecture]:
        metadata["rope_freqs.weight"] = metadata["rope_freqs.weight"][:8]
    if architecture not in divided:
        assert "tensors: unknown keys ['rope_freqs.weight']" in refusal_of_layers(metadata)
        return
    plain = {key: value for key, value in metadata.items() if key != "rope_freqs.weight"}
    if architecture.startswith("gemma4"):
        plain["rope_freqs.weight"] = [1.0] * 16
    ratios = {
        round((one.frequencies()[0] / other.frequencies()[0]).item(), 9)
        for one, other in zip(pe.RotarySpec.for_layers(plain), pe.RotarySpec.for_layers(metadata), strict=True)
        if one is not None and other is not None
    }
    of_full_layers = architecture in ("gemma4", "gemma4-assistant", "step35")
    assert ratios == ({1.0, 2.0} if of_full_layers else {2.0})


@pytest.mark.parametrize("architecture", ROTATED)
def test_long_factors_written_out(architecture: str) -> None:
    long = """
        apertus deci granite granite_swa granitemoe llama llama-embed minicpm minicpm3 mistral3 phi3 phimoe step35
    """.split()  # noqa: SIM905
    metadata = file(architecture, rope__scaling__type="longrope")
    for name, factor in (("short", 2.0), ("long", 3.0)):
        metadata[f"rope_factors_{name}.weight"] = [factor] * 8
    if architecture not in long:
        message = refusal_of_layers(metadata)
        assert message.startswith(f"scaling.type: 'longrope' is not understood for '{architecture}'")
        return
    spec = next(spec for spec in pe.RotarySpec.for_layers(metadata) if spec is not None and spec.scaling is not None)
    assert spec.frequencies(seq_len=8192)[0].item() == 0.5
    assert spec.frequencies(seq_len=8193)[0].item() == pytest.approx(1 / 3)


def test_grok_blends_from_8_turns() -> None:
    """In the program, for files without the key."""
    scaling = pe.RotarySpec.from_huggingface(file("grok", "yarn")).scaling
    assert scaling == pe.YarnScaling(8, 1024, beta_fast=8)


def test_every_architecture_is_listed_twice() -> None:
    """The table, and the lists by which its entries are checked."""
    listed = {name for names in gguf.TYPES.values() for name in names.split()}
    assert listed | {"deepseek4"} == set(ARCHITECTURES)
    windowed = {name for name, rules in ARCHITECTURES.items() if "windows" in rules}
    assert windowed - {"exaone4", "dflash"} <= {*BY_PROGRAM, *BY_LIST}


def test_every_entry_names_its_lines() -> None:
    assert len(TABLE["source"]["commit"]) == 40
    for name, rules in ARCHITECTURES.items():
        assert rules["source"], name
        assert rules["source"][0].startswith("llama-model.cpp:"), name


# ------------------------------------------------------------------------------ rules of single ones


def test_laguna_scales_full_attention_alone() -> None:
    """YaRN, and the factor of its cosines, in one layer of four."""
    metadata = file("laguna", "yarn", rope__freq_base_swa=1e4)
    sliding = pe.RotarySpec.from_huggingface(metadata, SLIDING)
    assert sliding == pe.RotarySpec(32, rotary_dim=16)
    assert pe.RotarySpec.from_huggingface(metadata, FULL).attention_factor > 1.2
    refused((lambda: pe.RotarySpec.from_huggingface(metadata), ValueError, "layer_type: expected one of"))  # fmt: skip


def test_smallthinker_leaves_out_the_first_of_four() -> None:
    windows = {"attention__sliding_window": 4096, "attention__sliding_window_pattern": [False, True, True, True] * 2}
    for says, right in ((windows, [False, True, True, True] * 2), ({}, [True] * 8)):
        metadata = file("smallthinker", block_count=8, **{"attention__sliding_window": 0, **says})
        rotates = [spec is not None for spec in pe.RotarySpec.for_layers(metadata)]
        assert rotates == right


@pytest.mark.parametrize("period", [0, 1])
def test_periods_at_their_ends(period: int) -> None:
    """As llama.cpp's set_swa_pattern: all layers slide for 0, none for 1; cohere2 rotates those."""
    metadata = file("cohere2", attention__sliding_window_pattern=period)
    layers = pe.RotarySpec.for_layers(metadata)
    assert [layer is not None for layer in layers] == [period == 0] * len(layers)


@pytest.mark.parametrize("architecture", ["granite", "granitehybrid", "graniteswitch"])
def test_granite_may_be_without_rotation(architecture: str) -> None:
    metadata = file(architecture, rope__scaling__finetuned=False)
    assert pe.RotarySpec.from_huggingface(metadata).rotary_dim == 0
    assert pe.RotarySpec.for_layers(metadata) == [None] * 24


def test_the_kind_of_a_layer_that_no_key_lists() -> None:
    """Windows of EXAONE 4 depend on the number of layers: 64 in the model that has them."""
    assert all(pe.RotarySpec.for_layers(file("exaone4", block_count=30)))
    assert pe.RotarySpec.for_layers(file("exaone4")).count(None) == 16


def test_baichuan_rotates_with_32_layers() -> None:
    assert refusal(file("baichuan", block_count=40)).endswith("with 40 layers: it has ALiBi")
    assert refusal(file("baichuan", block_count=20)).startswith("block_count: expected one of [32]")


def test_long_factors_without_a_type() -> None:
    """Older files of Phi-3 state no scaling type."""
    tensors = {f"rope_factors_{name}.weight": [float(n)] * 8 for n, name in ((1, "short"), (2, "long"))}
    metadata = {**file("phi3", rope__scaling__attn_factor=1.2), **tensors}
    spec = pe.RotarySpec.from_huggingface(metadata)
    assert spec.scaling == pe.LongRopeScaling([1.0] * 8, [2.0] * 8, 8192, attention_factor=1.2)


def test_mistral_4_has_no_factor() -> None:
    """Its converter writes a tenth of mscale_all_dim, as those of DeepSeek do."""
    metadata = file("mistral4", "yarn", rope__scaling__yarn_log_multiplier=0.1)
    assert pe.RotarySpec.from_huggingface(metadata).attention_factor == pytest.approx(1, abs=1e-12)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("architecture", UNROTATED)
def test_architectures_that_do_not_rotate(architecture: str) -> None:
    message = refusal({"general.architecture": architecture, f"{architecture}.block_count": 2})
    instead = ARCHITECTURES[architecture]["instead"]
    assert message == f"general.architecture '{architecture}' does not rotate: it has {instead}"


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"base": 1e4}])
def test_unknown_architectures(options: dict[str, Any]) -> None:
    """Half a specification by the caller makes no whole one."""
    says = {f"new.{key[7:]}": value for key, value in file("qwen2").items() if key[:6] == "qwen2."}
    message = refusal({"general.architecture": "new", **says}, **options)
    assert message.startswith("general.architecture 'new' is not known: describe its rotation")
    assert "pass " not in message
    for field in ("head_dim", "base", "rotary_dim", "interleaved", "scaling", "sections"):
        assert field in {field.name for field in dataclasses.fields(pe.RotarySpec)}
        assert field in message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (file("deepseek4"), "general.architecture 'deepseek4' has no single specification: layers"),
        (file("dflash", hyper_connection__count=4), "hyper_connection.count: 4 is not understood"),
        (file("llama4", attention__sliding_window=0), "attention.sliding_window: 0 is not under"),
        (file("qwen2vl", rope__dimension_sections=None), "dimension_sections: missing"),
        (file("gemma3", attention__key_length_swa=64), "attention.key_length_swa: not understood"),
        (file("gemma3", rope__dimension_count_swa=8), "dimension_count_swa: not understood for"),
        (file("cohere2", rope__freq_base_swa=1e4), "freq_base_swa: expected 500000.0, the base that"),
        (file("llama", rope__freq_base_swa=1e4), "freq_base_swa: not understood for 'llama'"),
        (file("dots3note", rope__freq_base_swa=None), "freq_base_swa: missing in dots3note.rope"),
        (file("gemma3", rope__scaling__attn_factor=2.0, rope__scaling__type="yarn", rope__scaling__factor=2.0), "scaling.attn_factor: expected 1 where some layers"),
        (file("gemma2", rope__scaling__type="none", rope__scaling__factor=2.0), "scaling.factor: expected none beside scaling.type 'none'"),
        (file("qwen3", rope__scaling__type="longrope"), "scaling.type: 'longrope' is not understood for 'qwen3'"),
        (file("qwen3", "yarn", rope__scaling__yarn_attn_factor=1.0), "scaling.yarn_attn_factor: expected 1.2"),
        (file("qwen3", "yarn", rope__scaling__yarn_log_multiplier=0.1), "scaling.yarn_log_multiplier: not understood for 'qwen3'"),
        ({**file("qwen2"), "rope_freqs.weight": [1.0] * 8}, "tensors: unknown keys ['rope_freqs.weight']"),
        (file("qwen2", rope__scaling__alpha=50.0), "unknown keys ['scaling.alpha']"),
        (file("plamo", rope__dimension_count=16), "dimension_count: expected the whole head, 32, got 16"),
        (file("cogvlm", rope__freq_base=5e5), "rope.freq_base: the configuration contradicts itself"),
        ({key: value for key, value in file("gemma4").items() if key != "rope_freqs.weight"}, "rope_freqs.weight: missing in tensors"),
    ],
)  # fmt: skip
def test_what_is_not_understood(metadata: dict[str, Any], message: str) -> None:
    windowed = "windows" in ARCHITECTURES[metadata["general.architecture"]]
    messages = []
    for kind in (FULL, SLIDING) if windowed else (None,):
        try:
            pe.RotarySpec.from_huggingface(metadata, kind)
        except ValueError as error:
            messages.append(str(error))
    assert any(message in each for each in messages)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({}, "attention.sliding_window_pattern: missing in the metadata"),
        ({"attention__sliding_window_pattern": 4}, "attention.sliding_window_pattern: expected a list"),
        ({"attention__sliding_window_pattern": [2] * 24}, "attention.sliding_window_pattern: expected True or False, got 2"),
    ],
)  # fmt: skip
def test_patterns_that_the_program_needs(says: dict[str, Any], message: str) -> None:
    metadata = file("mimo2", **{"attention__sliding_window_pattern": None, **says})
    assert message in refusal(metadata)


def test_layers_that_llama_cpp_does_not_run() -> None:
    assert "nextn_predict_layers: not" in refusal(file("exaone-moe", nextn_predict_layers=1))
    assert all(pe.RotarySpec.for_layers(file("glm4moe", nextn_predict_layers=1)))
