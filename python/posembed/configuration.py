"""RotarySpec out of a model's configuration: Hugging Face's, Meta's params.json, GGUF metadata.

Strict: a key that would be ignored, a missing one or a contradiction raises and is named, because a
wrong rotation is not an error at run time, only a worse model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posembed import conventions
from posembed.conventions import words
from posembed.scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    RotaryScaling,
    YarnScaling,
)
from posembed.specification import RotarySpec, Sections

Fields = dict[str, Any]

# Keys about rotation that this module reads, and keys that have no bearing on the rotation of a
# layer that rotates: which layers do, how scores are scaled, what else is rotated.
READ = words(
    """
rope_theta rope_scaling rope_parameters partial_rotary_factor rotary_pct rotary_emb_base
rotary_embedding_base rotary_dim rope_interleave qk_rope_head_dim rope_local_base_freq
local_rope_theta global_rope_theta compress_rope_theta
"""
)
NO_BEARING = words(
    """
layer_rope_theta no_rope_layer_interval no_rope_layers rope_scaling_layers rotary_value use_mem_rope
memory_attention_rope_dropout memory_attention_rope_feat_sizes memory_attention_rope_k_sizes
"""
)
ROTARY_KEY = re.compile("rope|rotary|theta")

# Accepted in every rope_parameters, whatever the type.
COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section"})
# Other names of the same type.
SAME_TYPE = {"mrope": "default", "su": "longrope"}


def load(config: Any) -> Fields:
    """The configuration as a dict without the keys that are None: its file, or the object's."""
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    elif not isinstance(config, Mapping):
        config = config.to_dict()
    return {key: value for key, value in config.items() if value is not None}


def same(key: str, *values: Any) -> Any:
    """The one value that several places agree on; None where no place has one."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise ValueError(f"{key}: the configuration contradicts itself: {given}")
    return given[0] if given else None


def required(fields: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a key that must be there."""
    if fields.get(key) is None:
        raise ValueError(f"{key}: missing in {where}, which has {sorted(fields)}")
    return fields[key]


def check_keys(fields: Mapping[str, Any], accepted: frozenset[str], where: str) -> None:
    """Refuses keys that nothing reads."""
    unknown = sorted(set(fields) - accepted)
    if unknown:
        raise ValueError(f"{where}: unknown keys {unknown}; accepted are {sorted(accepted)}")


# ----------------------------------------------------------------------------------------- scalings


def linear(rope: Fields, fields: Fields) -> RotaryScaling:
    """Position interpolation."""
    return LinearScaling(required(rope, "factor", "rope_parameters"))


def dynamic(rope: Fields, fields: Fields) -> RotaryScaling:
    """Dynamic NTK; with Hunyuan's alpha a fixed one."""
    if rope.get("alpha"):
        return NtkScaling(rope["alpha"])
    length = required(fields, "max_position_embeddings", "the configuration")
    return DynamicNtkScaling(required(rope, "factor", "rope_parameters"), length)


def original_length(rope: Fields, fields: Fields) -> int:
    """The context of training, in rope_parameters or beside it (Phi-3)."""
    key = "original_max_position_embeddings"
    length = same(key, fields.get(key), rope.get(key))
    return int(length if length is not None else required(rope, key, "rope_parameters"))


def context_factor(rope: Fields, fields: Fields) -> float:
    """How many times longer the context became: given, or the ratio of the two lengths."""
    if rope.get("factor") is not None:
        return float(rope["factor"])
    length = required(fields, "max_position_embeddings", "the configuration")
    return float(length) / original_length(rope, fields)


def yarn(rope: Fields, fields: Fields) -> RotaryScaling:
    """YaRN, DeepSeek's too."""
    same("max_position_embeddings", *(d.get("max_position_embeddings") for d in (rope, fields)))
    return YarnScaling(
        context_factor(rope, fields),
        original_length(rope, fields),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=rope.get("truncate", True),
        attention_factor=rope.get("attention_factor"),
    )


def llama3(rope: Fields, fields: Fields) -> RotaryScaling:
    """Llama 3.1."""
    return Llama3Scaling(
        required(rope, "factor", "rope_parameters"),
        required(rope, "low_freq_factor", "rope_parameters"),
        required(rope, "high_freq_factor", "rope_parameters"),
        original_length(rope, fields),
    )


def longrope(rope: Fields, fields: Fields) -> RotaryScaling:
    """LongRoPE; Phi-3.5-MoE gives its two attention factors as short_mscale and long_mscale."""
    return LongRopeScaling(
        required(rope, "short_factor", "rope_parameters"),
        required(rope, "long_factor", "rope_parameters"),
        original_length(rope, fields),
        factor=context_factor(rope, fields),
        attention_factor=same(
            "short_mscale", rope.get("attention_factor"), rope.get("short_mscale")
        ),
        long_attention_factor=rope.get("long_mscale"),
    )


def proportional(rope: Fields, fields: Fields) -> RotaryScaling:
    """Gemma's."""
    return ProportionalScaling(rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0))


def unscaled(rope: Fields, fields: Fields) -> None:
    """Frequencies as they are."""


# For each type the keys beside COMMON. llama_4_scaling_beta scales queries, not the rotation.
YARN_KEYS = words(
    """
factor original_max_position_embeddings max_position_embeddings beta_fast beta_slow mscale
mscale_all_dim truncate attention_factor llama_4_scaling_beta
"""
)
LLAMA3_KEYS = words("factor low_freq_factor high_freq_factor original_max_position_embeddings")
LONGROPE_KEYS = words(
    """
short_factor long_factor original_max_position_embeddings factor attention_factor short_mscale
long_mscale
"""
)
Reader = Callable[[Fields, Fields], RotaryScaling | None]
TYPES: dict[str, tuple[Reader, frozenset[str]]] = {
    "default": (unscaled, frozenset({"mrope_interleaved"})),
    "axial": (unscaled, frozenset()),
    "linear": (linear, frozenset({"factor"})),
    "dynamic": (dynamic, frozenset({"factor", "alpha"})),
    "yarn": (yarn, YARN_KEYS),
    "llama3": (llama3, LLAMA3_KEYS),
    "longrope": (longrope, LONGROPE_KEYS),
    "proportional": (proportional, frozenset({"factor"})),
}


def rope_type(rope: Fields) -> str:
    """The scaling's type, in its new or its legacy key."""
    given = [rope[key] for key in ("rope_type", "type") if key in rope]
    names = [SAME_TYPE.get(name, name) for name in given]
    name = same("rope_type", *names) or "default"
    if name not in TYPES:
        raise ValueError(f"rope_type: expected one of {sorted(TYPES)}, got {name!r}")
    return str(name)


# -------------------------------------------------------------------------------- layers and widths


def select_layer(fields: Fields, rope: Fields, layer_type: str | None) -> Fields | None:
    """The rope_parameters of one kind of layer; None where such layers are not rotated."""
    nested = {key: value for key, value in rope.items() if value is None or isinstance(value, dict)}
    if not any(isinstance(value, dict) for value in nested.values()):
        return rope
    if layer_type is None and len(nested) == 1:
        layer_type = next(iter(nested))
    if layer_type not in nested:
        raise ValueError(f"layer_type: expected one of {sorted(nested)}, got {layer_type!r}")
    check_keys(rope, frozenset(nested), "rope_parameters")
    return nested[layer_type]


def with_layer(fields: Fields, layer_type: str | None) -> Fields:
    """The configuration as layers of that type see it: some have wider heads."""
    layers, own = fields.get("layer_types") or [], fields.get("per_layer_config")
    if layer_type is None or not own or layer_type not in layers:
        if layer_type == "full_attention" and "global_head_dim" in fields:
            return {**fields, "head_dim": fields["global_head_dim"]}
        return fields
    place = layers.index(layer_type)
    overrides = {int(key): value for key, value in own.items()}.get(place, {})
    return {**fields, **overrides}


def legacy_layer(fields: Fields, layer_type: str | None) -> tuple[Fields, Fields]:
    """Bases for each kind of layer before rope_parameters (Gemma 3, ModernBERT)."""
    scaled = fields.get("rope_scaling") or {}
    local = same(
        "rope_local_base_freq", fields.get("rope_local_base_freq"), fields.get("local_rope_theta")
    )
    if local is None:
        return fields, scaled
    known = {
        "full_attention": fields.get("global_rope_theta", fields.get("rope_theta")),
        "sliding_attention": local,
    }
    if layer_type not in known:
        raise ValueError(f"layer_type: expected one of {sorted(known)}, got {layer_type!r}")
    return {**fields, "rope_theta": known[layer_type]}, (
        scaled if layer_type == "full_attention" else {}
    )


def first(fields: Fields, *keys: str) -> Any:
    """The value of the first key that is there."""
    return next((fields[key] for key in keys if fields.get(key)), None)


def head_width(fields: Fields) -> int:
    """Components of one head: given, or the width shared out among the heads."""
    given = first(fields, "head_dim", "attention_head_dim", "kv_channels")
    if given:
        return int(given)
    if "memory_attention_hidden_size" in fields:  # video trackers rotate there
        keys = ("hidden_size", "downsample_rate", "num_attention_heads")
        width, rate, heads = (fields[f"memory_attention_{key}"] for key in keys)
        return int(width) // int(rate * heads)
    # Where a vision tower has embed_dim, hidden_size is the width of the language model.
    width = first(fields, "embed_dim", "hidden_size", "n_embd", "d_model", "dim")
    heads = first(
        fields,
        *("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_num_attention_heads"),
        "speech_encoder_attention_heads",
    )
    if not width or not heads:
        raise ValueError(
            "head_dim: missing in the configuration, and it has not both of hidden_size and "
            f"num_attention_heads; it has {sorted(fields)}"
        )
    return int(width) // int(heads)


def widths(fields: Fields, rope: Fields, model_type: str) -> tuple[int, int]:
    """head_dim and the rotated width, which may be odd."""
    part = same(
        "partial_rotary_factor",
        rope.get("partial_rotary_factor"),
        fields.get("partial_rotary_factor"),
        fields.get("rotary_pct"),
    )
    apart = fields.get("qk_rope_head_dim")
    if apart and model_type not in conventions.TRAILING:  # rotated components are a head of theirs
        return int(apart), int(apart)
    head_dim = head_width(fields)
    if rope_type(rope) == "proportional":
        return head_dim, head_dim
    if part is None and model_type in conventions.WIDTH_BY_PART:
        part = 1.0
    rotary_dim = None if part is None else int(head_dim * part)
    rotary_dim = same("rotary_dim", fields.get("rotary_dim"), rotary_dim)
    return head_dim, head_dim if rotary_dim is None else int(rotary_dim)


# -------------------------------------------------------------------------------------- conventions


def is_interleaved(fields: Fields, model_type: str, stated: bool | None) -> bool:
    """Which components form a pair: known for the model type, or stated."""
    known = None
    if model_type in conventions.BY_KEY:
        known = bool(required(fields, "rope_interleave", "the configuration"))
    elif model_type in conventions.INTERLEAVED | conventions.INTERLEAVED_AXIAL:
        known = True
    elif model_type in conventions.HALF_SPLIT | conventions.AXIAL:
        known = False
    pairing = same("interleaved", stated, known)
    if pairing is None:
        raise ValueError(
            f"model_type {model_type!r} is not known: pass interleaved=True (pairs 2i, 2i + 1) or "
            "interleaved=False (pairs i, i + rotary_dim / 2), as its code has it"
        )
    return bool(pairing)


def ernie_fields(rope: Fields, head_dim: int) -> Fields:
    """ERNIE-4.5-VL: height and width share the faster pairs in turns, time has the slowest.

    Its configuration gives the sections as (height, width, time).
    """
    height, width, time = rope.get("mrope_section", (22, 22, 20))
    if height != width or height + width + time != head_dim // 2:
        raise ValueError(f"mrope_section: expected (n, n, t) of {head_dim // 2} pairs")
    return {"sections": Sections(axis_of_pair=(1, 2) * height + (0,) * time)}


def sections_in_turns(sizes: Sequence[int], pairs: int) -> Sections:
    """Qwen3-VL's: pairs that no later axis takes are the first axis's, however many there are."""
    first_size = max(sizes[0], pairs - sum(sizes[1:]))
    axes = Sections((first_size, *sizes[1:]), interleaved=True).axis_of_pair
    return Sections(axis_of_pair=axes[:pairs])


def text_sections(rope: Fields, model_type: str, pairs: int) -> Sections | None:
    """M-RoPE: in turns or one axis after the other, as the model has it."""
    sizes = rope.get("mrope_section")
    if model_type in conventions.INTERLEAVED_SECTIONS:
        return sections_in_turns(sizes or conventions.INTERLEAVED_SECTIONS[model_type], pairs)
    if model_type in conventions.ALTERNATING_AXES:
        return Sections(axis_of_pair=[pair % 2 for pair in range(pairs)])
    if model_type in conventions.CONTIGUOUS_SECTIONS:
        return Sections(sizes or conventions.CONTIGUOUS_SECTIONS[model_type])
    if sizes is None:
        return None
    if model_type in conventions.OPTIONAL_SECTIONS:
        in_turns = conventions.OPTIONAL_SECTIONS[model_type]
        return sections_in_turns(sizes, pairs) if in_turns else Sections(sizes)
    raise ValueError(f"mrope_section: {model_type!r} is not known to have sections")


def axial(model_type: str, head_dim: int, base: float) -> Fields:
    """Fields of a vision tower's specification."""
    n = head_dim // 4
    if model_type in conventions.SHARED_SERIES:
        whole = RotarySpec(head_dim, base=base).frequencies().tolist()
        return {"sections": Sections((n, n)), "custom_frequencies": whole[::2] + whole[1::2]}
    if model_type in conventions.TIME_HEIGHT_WIDTH:
        n = head_dim // 6
        return {"rotary_dim": 6 * n, "sections": Sections((n, n, n), restart=True)}
    axes = (0,) * n + (1,) * n
    if model_type in conventions.WIDTH_THEN_HEIGHT:
        axes = (1,) * n + (0,) * n
    elif model_type in conventions.WIDTH_AND_HEIGHT_IN_TURNS:
        axes = (1, 0) * n
    return {"sections": Sections(axis_of_pair=axes, restart=True)}


# ------------------------------------------------------------------------------------------ readers


def from_huggingface(
    config: Any,
    layer_type: str | None = None,
    *,
    interleaved: bool | None = None,
    base: float | None = None,
) -> RotarySpec:
    """See :meth:`RotarySpec.from_huggingface`."""
    fields = load(config)
    if "general.architecture" in fields:
        return from_gguf(fields, interleaved)
    if "n_heads" in fields and "model_type" not in fields:
        return from_meta(fields, base)
    if "text_config" in fields and not any(ROTARY_KEY.search(key) for key in fields):
        fields = load(fields["text_config"])
    model_type = str(fields.get("model_type", ""))
    if model_type in conventions.UNSUPPORTED:
        raise ValueError(f"model_type {model_type!r}: {conventions.UNSUPPORTED[model_type]}")
    rotary_keys = {key: value for key, value in fields.items() if ROTARY_KEY.search(key)}
    check_keys(rotary_keys, READ | NO_BEARING, "the configuration")

    fields, legacy = legacy_layer(with_layer(fields, layer_type), layer_type)
    rope = same("rope_scaling", fields.get("rope_parameters"), legacy or None) or {}
    selected = select_layer(fields, rope, layer_type)
    if selected is None:
        return RotarySpec(head_width(fields), rotary_dim=0)
    nested = selected is not rope
    rope = {key: value for key, value in selected.items() if value is not None}
    read, keys = TYPES[rope_type(rope)]
    check_keys(rope, COMMON | keys, f"rope_parameters of type {rope_type(rope)!r}")

    top = None if nested else fields.get("rope_theta", fields.get("rotary_emb_base"))
    theta = same("rope_theta", rope.get("rope_theta"), top, fields.get("rotary_embedding_base"))
    if theta is None and model_type in conventions.FIXED_BASE:
        theta = conventions.FIXED_BASE[model_type]
    theta = same("rope_theta", theta, base)
    if theta is None:
        raise ValueError("rope_theta: missing in the configuration: pass base=")
    head_dim, rotary_dim = widths(fields, rope, model_type)
    if rotary_dim % 2 and rotary_dim < head_dim:  # exponents go over the odd width
        if rope_type(rope) != "default":
            raise ValueError(f"partial_rotary_factor: expected an even width, got {rotary_dim}")
        theta, rotary_dim = theta ** ((rotary_dim + 1) / rotary_dim), rotary_dim + 1
    options: Fields = {"base": theta, "rotary_dim": rotary_dim, "scaling": read(rope, fields)}
    if model_type in conventions.AXIAL:
        options.update(axial(model_type, head_dim, theta))
    elif model_type == "ernie4_5_vl_moe_text":
        options.update(ernie_fields(rope, head_dim))
    else:
        options["sections"] = text_sections(rope, model_type, rotary_dim // 2)
    if model_type in conventions.TRAILING:
        options["rotary_start"] = head_dim - rotary_dim
    return RotarySpec(
        head_dim,
        interleaved=is_interleaved(fields, model_type, interleaved),
        reverse=model_type in conventions.REVERSED,
        **options,
    )


def from_meta(fields: Fields, base: float | None) -> RotarySpec:
    """Meta's params.json: interleaved pairs."""
    accepted = frozenset({"rope_theta", "use_scaled_rope", "rope_scaling_factor"})
    rotary_keys = {key: value for key, value in fields.items() if ROTARY_KEY.search(key)}
    check_keys(rotary_keys, accepted | {"rope_high_freq_factor"}, "params.json")
    theta = same("rope_theta", fields.get("rope_theta"), base)
    if theta is None:
        raise ValueError("rope_theta: missing in params.json: pass base= (Llama 1 and 2: 10000)")
    scaling = None
    if fields.get("use_scaled_rope") or fields.get("use_scaled"):
        scaling = Llama3Scaling(
            fields.get("rope_scaling_factor", 8.0),
            1.0,
            fields.get("rope_high_freq_factor", 4.0),
            8192,
        )
    return RotarySpec(head_width(fields), base=theta, interleaved=True, scaling=scaling)


def from_gguf(fields: Fields, interleaved: bool | None) -> RotarySpec:
    """GGUF metadata: keys begin with the architecture, which tells the pairing."""
    architecture = str(fields["general.architecture"])
    start = f"{architecture}."
    given = {key[len(start) :]: value for key, value in fields.items() if key.startswith(start)}
    rope = {key[5:]: value for key, value in given.items() if key.startswith("rope.")}
    check_keys(rope, conventions.GGUF_ROPE_KEYS, f"{start}rope")
    known = conventions.GGUF_INTERLEAVED.get(architecture)
    pairing = same("interleaved", interleaved, known)
    if pairing is None:
        raise ValueError(f"general.architecture {architecture!r} is not known: pass interleaved=")
    head_dim = given.get("attention.key_length") or int(
        required(given, "embedding_length", "the metadata")
    ) // int(required(given, "attention.head_count", "the metadata"))
    return RotarySpec(
        int(head_dim),
        base=required(rope, "freq_base", f"{start}rope"),
        rotary_dim=int(rope.get("dimension_count", head_dim)),
        interleaved=bool(pairing),
        scaling=gguf_scaling(rope, given),
    )


def gguf_scaling(rope: Fields, given: Fields) -> RotaryScaling | None:
    """Linear and YaRN; Llama-3 factors are a tensor of the file, not metadata."""
    kind = rope.get("scaling.type", "linear" if "scale_linear" in rope else "none")
    if kind == "none":
        return None
    factor = same("rope.scaling.factor", rope.get("scaling.factor"), rope.get("scale_linear"))
    if factor is None:
        raise ValueError(f"rope.scaling.factor: missing beside rope.scaling.type {kind!r}")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        length = required(rope, "scaling.original_context_length", "the metadata")
        return YarnScaling(factor, int(length), attention_factor=rope.get("scaling.attn_factor"))
    raise ValueError(f"rope.scaling.type: expected 'none', 'linear' or 'yarn', got {kind!r}")
