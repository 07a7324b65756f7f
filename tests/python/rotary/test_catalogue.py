"""Tests the catalogue of model types: what it adds to files, what it refuses, parts of layers."""

import contextlib
import functools
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.models.data import table
from support.catalogue import TYPES, having
from support.refusals import refused

LING: dict[str, Any] = {
    "model_type": "bailing_hybrid", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 8,
    "head_dim": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512,
    "partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_interleave": True, "layer_group_size": 8,
    "group_norm_size": 8, "max_position_embeddings": 131072,
}  # fmt: skip


# ------------------------------------------------------------------ the catalogue and transformers


def test_it_is_that_of_the_installed_transformers() -> None:
    """test_completion.py compares what it adds, and test_transformers.py the rotations."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    if transformers.__version__ != table("catalogue")["source"]["version"]:
        pytest.skip("another transformers than that of the catalogue")
    without_default = {"gemma4_assistant", "nougat"}
    missing = {*transformers.CONFIG_MAPPING} - without_default - {*TYPES}
    command = "python scripts/catalogue.py > python/posembed/models/catalogue.json"
    assert missing == set(), f"run {command}"


KEPT = {name: own for name, own in TYPES.items() if "source" in own}
# What a line says that is named as the source of a key.
CLAIMS = {
    "axes": r"mrope_section|class NeoMMERotaryEmbedding",
    "base": r"10000",
    "compressed": r"compress",
    "filled": r"layer_params\.setdefault",
    "grid": r"class \w*(Rotary|RopePosition)Embedding",
    "layer_parts": r"class \w*Indexer",
    "learned_scale": r"self\.alpha",
    "needs": r"num_hidden_layers",
    "pairing": r"[Rr]ota|LlamaModel",
    "refused": r"[Rr]otary|global_config|timestamps|projector",
    "reversed": r"def rotate_half",
    "rotates": r"sliding|local",
    "scaled": r"update\(rope_scaling\)",
    "score_factor": r"self\.scaling = ",
    "score_scale": r"self\.scaling = 1(\.0)?$",
    "temperature": r"floor_scale",
    "text": r"text_config|text_params",
    "trailing": r"def apply_rotary_pos_emb",
    "unrotated": r"class \w*Attention",
    "width": r"partial_rotary_factor|projection_dim",
    "with_yarn": r"attention_factor",
    "without_mscale": r"self\.scaling = self\.\w*head_dim",
}
FORMS = (
    r"models/[\w/]+\.py:\d+",  # in transformers
    r"(vLLM|transformers) \d+\.\d+\.\d+, [\w/]+\.py:\d+",
    r"[\w-]+/[\w.-]+, \w+\.(py|json): .+",  # in a model's own repository
)


def test_entries_by_hand_name_their_sources() -> None:
    assert len(KEPT) > 120
    lines = [line for own in KEPT.values() for line in own["source"]]
    assert [line for line in lines if not any(re.fullmatch(form, line) for form in FORMS)] == []


def test_sources_say_what_entries_claim() -> None:
    """The lines of the installed transformers."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    if transformers.__version__ != table("catalogue")["source"]["version"]:
        pytest.skip("another transformers than that of the catalogue")
    folder = Path(transformers.__file__).parent
    kept = Path(__file__).parents[3] / "python/posembed/models/models.json"
    described, generated = (json.loads(kept.read_text("utf-8"))[key] for key in ("fields", "types"))
    unsaid = []
    for name, own in generated.items():
        if not all(source.startswith("models/") for source in own["source"]):
            continue
        said = []
        for source in own["source"]:
            file, number = source.rsplit(":", 1)
            said.append(text_of(folder / file)[int(number) - 1])
        claims = {key: CLAIMS[key] for key in own if key in CLAIMS}
        claims |= {key: key for key in own.get("defaults", {})}
        if "sizes" in own.get("axes", {}):
            claims["axes"] = re.escape(f'"mrope_section", {own["axes"]["sizes"]}')
        if "switch" in own:
            claims["switch"] = own["switch"]["key"]
        unsaid += [(name, key) for key, claim in claims.items() if not re.search(claim, "\n".join(said), re.MULTILINE)]
        assert set(own) <= {*CLAIMS, *described, "parts", "known", "kinds"}, name
    assert unsaid == []


@functools.cache
def text_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


# ------------------------------------------------------------------------------- kinds of layers


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "cohere2", "num_hidden_layers": 5, "sliding_window_pattern": 2}, "rnrnr"),
        ({"model_type": "cohere2", "num_hidden_layers": 5}, "rrrnr"),
        ({"model_type": "flint", "num_hidden_layers": 6}, "nnrrrn"),
        ({"model_type": "muse_spark_text", "num_hidden_layers": 6}, "rnrrrn"),
        ({"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1, 3]}, "nrnr"),
        ({"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [2]}, "nnrn"),
        ({"model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layer_interval": 3}, "rrnr"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2}, "nrnr"),
    ],
)  # fmt: skip
def test_which_layers_rotate(fields: dict[str, Any], expected: str) -> None:
    specs = pe.RotarySpec.for_layers(fields)
    assert "".join("n" if spec is None else "r" for spec in specs) == expected


def test_layers_from_a_list_of_numbers() -> None:
    """DeepSeek V4's published files have compress_ratios; its class makes kinds of them."""
    fields = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 0]}
    bases = [spec and spec.base for spec in pe.RotarySpec.for_layers(fields)]
    assert bases == [1e4, 1.6e5, 1.6e5, 1e4]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ({}, (512, 64)),
        ({"qk_rope_head_dim": 128}, (512, 128)),
        ({"head_dim": 256}, (256, 32)),
        ({"head_dim": 256, "qk_rope_head_dim": 64}, (256, 64)),
        ({"partial_rotary_factor": 0.25}, (512, 128)),
    ],
)
def test_widths_of_deepseek_v4(widths: dict[str, Any], expected: tuple[int, int]) -> None:
    """The default of its blocks is a part of the head, unless the file has a width."""
    fields = {"model_type": "deepseek_v4", "num_hidden_layers": 2, **widths}
    for spec in pe.RotarySpec.for_layers(fields):
        assert spec is not None
        assert (spec.head_dim, spec.rotary_dim) == expected


def test_a_block_that_lacks_a_kind() -> None:
    """Gemma 3's class fills it in, which the catalogue does not know of every class."""
    blocks = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    fields = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": blocks}
    refused((lambda: pe.RotarySpec.for_layers(fields), ValueError, "rope_parameters: expected an entry for 'sliding_att"))  # fmt: skip


def test_bases_of_kinds() -> None:
    fields = {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_theta": 5e5}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    specs = pe.RotarySpec.for_layers({**fields, **scaling})
    local, whole = pe.RotarySpec(256), pe.RotarySpec(256, base=5e5, scaling=pe.LinearScaling(8))
    assert specs == [local] * 5 + [whole]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma4_text", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "expected an entry for each of ['full_attention', 'sliding_attention']"),
        ({"model_type": "gpt_neox", "rope_theta": 5e5}, "the configuration contradicts itself"),
        ({"model_type": "cohere2_moe", "first_k_dense_replace": 2}, "layer_types: missing in the configuration, and its class derives it from ['first_k_dense_replace']"),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 5]}, "compress_ratios: expected one of ['0', '128', '4'] for each layer"),
        ({"model_type": "deepseek_v3", "partial_rotary_factor": 0.5}, "partial_rotary_factor: the configuration contradicts itself"),
        ({"model_type": "gptj", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: the code of model_type 'gptj' has none, got LinearScaling(factor=2.0)"),
        ({"model_type": "hrm_text", "num_hidden_layers": 4}, "num_layers_per_stack: missing"),
    ],
)  # fmt: skip
def test_what_files_may_not_say(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the message is compared below)
        pe.RotarySpec.for_layers(fields)
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model_type", "instead"),
    [("bert", "learned positions"), ("gpt2", "learned positions"), ("t5", "relative positions"), ("bloom", "ALiBi")],
)
def test_models_that_do_not_rotate(model_type: str, instead: str) -> None:
    message = f"model_type '{model_type}' does not rotate: it has {instead}"
    for read in (pe.RotarySpec.from_huggingface, pe.RotarySpec.for_layers):
        refused((lambda: read({"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4}), ValueError, message))  # fmt: skip
    refused((lambda: pe.RotaryEmbedding.from_config({"model_type": model_type}), ValueError, message))  # fmt: skip


ROTATES = re.compile(r"Rotary|Ro[Pp][Ee][A-Z]|apply_rotary|freqs_cis")


def rotary_modules(model_type: str) -> set[str]:
    """Classes of rotary modules in the models of a configuration class of transformers."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind = transformers.CONFIG_MAPPING[model_type]
    found: set[str] = set()
    for file in Path(inspect.getfile(kind)).parent.glob("modeling_*.py"):
        if not ROTATES.search(file.read_text(encoding="utf-8")):
            continue
        code = importlib.import_module(f"{kind.__module__.rpartition('.')[0]}.{file.stem}")
        for model in vars(code).values():
            if inspect.isclass(model) and getattr(model, "config_class", None) is kind:
                with contextlib.suppress(Exception), torch.device("meta"):  # a base, or no default
                    names = [type(each).__name__ for each in model(kind()).modules()]
                    found |= {name for name in names if ROTATES.search(name)}
    return found


def test_models_said_not_to_rotate_have_no_rotary_module() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    without = [name for name, own in TYPES.items() if own.get("instead")]
    known = [name for name in without if name in transformers.CONFIG_MAPPING]
    rotating = {name: rotary_modules(name) for name in known}
    assert {name: found for name, found in rotating.items() if found} == {}
    assert rotary_modules("t5gemma")  # of parts that rotate


def test_no_message_advises_half_a_description() -> None:
    for fields in ({}, {"model_type": None}, {"model_type": "mine"}, {"model_type": "resnet"}):
        with pytest.raises(ValueError, match="model_type") as raised:
            pe.RotarySpec.from_huggingface(fields)
        assert "pass interleaved" not in str(raised.value)
        assert "pass base" not in str(raised.value)


# -------------------------------------------------------------------------------- parts of layers


def test_linear_layers_of_ling() -> None:
    """Files of 2.x: beside latent attention, linear layers rotate half of their head."""
    specs = pe.RotarySpec.for_layers(LING)
    linear = pe.RotarySpec(128, rotary_dim=64, base=6e6)
    latent = pe.RotarySpec(64, base=6e6, interleaved=True)
    assert specs == [linear] * 7 + [latent]
    assert pe.RotarySpec.from_huggingface(LING, part="linear_attention") == linear
    assert pe.RotarySpec.from_huggingface(LING, "full_attention") == latent
    third = {key: value for key, value in LING.items() if key not in ("group_norm_size", "partial_rotary_factor")}  # fmt: skip
    assert pe.RotarySpec.for_layers(third) == [None] * 7 + [latent]


@pytest.mark.parametrize("model_type", [t for t in having("layer_parts") if t != "bailing_hybrid"])
def test_indexers(model_type: str) -> None:
    """Against the function that the indexer of transformers calls, on the window that it takes."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("a newer transformers has it")
    config = transformers.CONFIG_MAPPING[model_type]()
    fields: dict[str, Any] = {"model_type": model_type}
    kinds = TYPES[model_type]["layer_parts"]["indexer"].get("kinds", [None])
    if model_type == "mistral_large4_text":
        fields["rotary_emb.alpha"] = [0.0] * (config.qk_rope_head_dim // 2)
    if model_type == "qwen4_exp_text":
        sizes = {"n_heads": 4, "kv_heads": 1, "head_dim": 128, "budget": 64, "compress_ratio": 4}
        fields |= {f"indexer_{name}": size for name, size in sizes.items()}
        fields["partial_rotary_factor"] = 0.25
    spec = pe.RotarySpec.from_huggingface(fields, kinds[0], part="indexer")
    package = {"dots3_note_text": "dots3_note", "mistral_large4_text": "mistral_large4", "qwen4_exp_text": "qwen4_exp"}  # fmt: skip
    name = package.get(model_type, model_type)
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    query = torch.randn(1, 7, 2, spec.head_dim)
    angles = torch.arange(7)[:, None] * spec.frequencies()[None]
    halves = "interleave" not in str(theirs(code, model_type)) and model_type != "deepseek_v4"
    table = torch.cat([angles, angles], -1) if halves or model_type != "deepseek_v4" else angles
    cosine, sine = table.cos().float()[None], table.sin().float()[None]
    start = spec.rotary_start
    window = query[..., start : start + spec.rotary_dim]
    found = pe.functional.rotary(query, spec=spec)
    assert torch.equal(found[..., :start], query[..., :start])
    assert torch.equal(found[..., start + spec.rotary_dim :], query[..., start + spec.rotary_dim :])
    rotated = found[..., start : start + spec.rotary_dim]
    if model_type == "deepseek_v4":
        expected = code.apply_rotary_pos_emb(window, cosine, sine, unsqueeze_dim=2)
    else:
        expected = theirs(code, model_type)(window, window, cosine, sine, unsqueeze_dim=2)[0]
    regrouped = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), -1)
    candidates = [rotated, regrouped] if spec.interleaved else [rotated]
    scale = max(spec.attention_factor, 1.0)
    assert any(torch.allclose(each / scale, expected, atol=2e-5) for each in candidates)


def theirs(code: Any, model_type: str) -> Any:
    """The function by which a model's indexer rotates, as its code names it."""
    interleaved = TYPES[model_type]["layer_parts"]["indexer"]["pairing"] == "interleaved"
    name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
    return getattr(code, name) if hasattr(code, name) else code.apply_rotary_pos_emb


def test_a_part_that_a_layer_does_not_have() -> None:
    refused((lambda: pe.RotarySpec.from_huggingface({"model_type": "llama"}, part="indexer"), ValueError, "part: expected one of ['attention'], got 'indexer'"))  # fmt: skip
