"""GGUF metadata: keys that begin with the architecture, which tells the pairing.

Rotations as llama.cpp makes them of the file. Tensors that belong to the rotation are given among
the keys: "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from posembed.configuration import axes, scalings
from posembed.configuration.keys import Fields, Keys, same, words
from posembed.configuration.layers import check_type
from posembed.scaling import LinearScaling, LongRopeScaling, RotaryScaling, YarnScaling
from posembed.specification import RotarySpec, Sections

# Pairs (2i, 2i + 1): converters permute weights for them where the model has halves.
INTERLEAVED = words(
    """
arcee arctic baichuan bailingmoe chameleon chatglm cohere2 cohere2moe command-r deci deepseek
deepseek2 deepseek32 ernie4_5 ernie4_5-moe glm-dsa glm4 granite granitehybrid granitemoe internlm2
llada llama llama-embed llama4 maincoder minicpm mistral3 mistral4 neo-bert olmo plm smollm3
starcoder xverse
"""
)
# Pairs (i, i + dimension_count / 2).
HALF_SPLIT = words(
    """
afmoe apertus bailingmoe2 bert bitnet codeshell cogvlm dbrx dots1 dream eurobert exaone exaone-moe
exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n glm4moe gpt-oss gptneox grok
grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 jais2 jina-bert-v3 laguna lfm2 lfm2moe
llada-moe mellum mimo2 minicpm3 minimax-m2 modern-bert nemotron nomic-bert nomic-bert-moe olmo2
olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 qwen qwen2
qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe rnd1 seed_oss
smallthinker stablelm starcoder2 step35 talkie
"""
)
# Position axes, where the metadata has sections: one after the other, or in turns.
CONTIGUOUS_SECTIONS = words("glm4 glm4moe hunyuan_vl paddleocr qwen2vl")
INTERLEAVED_SECTIONS = words("qwen35 qwen35moe qwen3vl qwen3vlmoe")
# Latent attention: the rotated components are a head of theirs.
APART = words("deepseek2 deepseek32 glm-dsa minicpm3 mistral4 plm")
# Bases of sliding layers that older files do not have; those layers are not scaled.
SLIDING_BASE = {"gemma3": 10000.0, "gemma3n": 10000.0}
# Architectures that scale frequencies in layers of full attention alone: OLMo 3 is an olmo2.
SCALED_IF_FULL = words("olmo2") | frozenset(SLIDING_BASE)
# Architectures whose layers of full attention do not rotate beside sliding windows.
ROTATED_IF_SLIDING = words("cohere2 cohere2moe exaone-moe exaone4")
# Architectures whose every fourth layer does not rotate, which no key says.
EVERY_FOURTH_UNROTATED = words("afmoe llama4 smallthinker smollm3")
# Every so many layers one has full attention, where the file does not say.
PERIODS = {
    **dict.fromkeys(words("afmoe cohere2 exaone-moe exaone4 olmo2"), 4),
    **{"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2},
}
FULL, SLIDING = "full_attention", "sliding_attention"
# The multiplier is written as a tenth of mscale_all_dim, which mscale equals.
TENTH_OF_MSCALE = words("deepseek2 deepseek32")


def read(
    fields: Fields,
    layer_type: str | None,
    interleaved: bool | None,
    base: float | None,
    ignore: Iterable[str] = (),
) -> RotarySpec:
    """The specification of a file's metadata."""
    architecture = str(fields["general.architecture"])
    model, rope, _ = sections_of(fields, f"{architecture}.", ignore)
    kinds = kinds_of_layers(model, rope, architecture)
    if layer_type is not None:
        check_type(kinds, layer_type)
    elif kinds and differ(rope, architecture):
        raise ValueError(f"layer_type: expected one of {kinds}, got {layer_type!r}")
    if layer_type == FULL and architecture in ROTATED_IF_SLIDING:
        raise ValueError(f"layer_type: layers of kind {layer_type!r} do not rotate")
    return specification(fields, layer_type == SLIDING, interleaved, base, ignore)


def read_layers(
    fields: Fields, interleaved: bool | None, base: float | None, ignore: Iterable[str] = ()
) -> list[RotarySpec | None]:
    """The specification of each layer; None where it does not rotate."""
    architecture = str(fields["general.architecture"])
    model, rope, _ = sections_of(fields, f"{architecture}.", ignore)
    length = int(model.need("block_count"))
    sliding = [False] * length
    if kinds_of_layers(model, rope, architecture):
        sliding = sliding_layers(model, architecture, length)
    specs = {
        local: specification(fields, local, interleaved, base, ignore) for local in set(sliding)
    }
    unrotated = set()
    if architecture in ROTATED_IF_SLIDING and any(sliding):
        unrotated = {place for place in range(length) if not sliding[place]}
    # A Llama 4 whose window is given as 0 rotates everywhere.
    if architecture in EVERY_FOURTH_UNROTATED and model.take("attention.sliding_window") != 0:
        unrotated = set(range(3, length, 4))
    return [None if place in unrotated else specs[sliding[place]] for place in range(length)]


def sliding_layers(model: Keys, architecture: str, length: int) -> list[bool]:
    """Whether each layer has a sliding window: listed, or all but the last of a period."""
    pattern = model.take("attention.sliding_window_pattern", PERIODS.get(architecture))
    if pattern is None:
        raise ValueError("attention.sliding_window_pattern: missing in the metadata")
    if isinstance(pattern, (list, tuple)):
        return [bool(pattern[place % len(pattern)]) for place in range(length)]
    period = int(pattern)
    return [period == 0 or place % period < period - 1 for place in range(length)]


def specification(
    fields: Fields,
    local: bool,
    interleaved: bool | None,
    base: float | None,
    ignore: Iterable[str],
) -> RotarySpec:
    """The specification of layers with or without a sliding window."""
    architecture = str(fields["general.architecture"])
    model, rope, tensors = sections_of(fields, f"{architecture}.", ignore)
    sizes, pairing = pairing_of(rope, architecture, interleaved)
    head_dim, rotary_dim = widths(model, rope, architecture, local)
    spec = RotarySpec(
        head_dim,
        base=base_of(rope, architecture, base, local),
        rotary_dim=rotary_dim,
        interleaved=pairing,
        sections=sections_with(sizes, architecture, rotary_dim // 2),
    )
    whole = with_scaling(spec, architecture, model, rope, tensors)
    rope.ignore("freq_base_swa")
    rope.done()
    tensors.done()
    return spec if local and architecture in SCALED_IF_FULL else whole


def sections_of(fields: Fields, start: str, ignore: Iterable[str] = ()) -> tuple[Keys, Keys, Keys]:
    """The model's keys, those about rotation, and the tensors that belong to it."""
    fields = {key: value for key, value in fields.items() if key not in set(ignore)}
    own = {key[len(start) :]: value for key, value in fields.items() if key.startswith(start)}
    rope = {key[5:]: value for key, value in own.items() if key.startswith("rope.")}
    tensors = {key: value for key, value in fields.items() if key.startswith("rope_")}
    return Keys(own, "the metadata"), Keys(rope, f"{start}rope"), Keys(tensors, "tensors")


def kinds_of_layers(model: Keys, rope: Keys, architecture: str) -> list[str]:
    """The kinds of layers, where some have a sliding window; none where all are alike."""
    sliding = model.take("attention.sliding_window") or rope.take("freq_base_swa") is not None
    return [FULL, SLIDING] if sliding or architecture in SLIDING_BASE else []


def differ(rope: Keys, architecture: str) -> bool:
    """Whether layers with and without a sliding window rotate, and differently."""
    own_base = rope.take("freq_base_swa") not in (None, rope.take("freq_base"))
    scaled = rope.take("scaling.type", "none") != "none" or rope.take("scaling.factor") is not None
    return own_base or architecture in SLIDING_BASE or (architecture in SCALED_IF_FULL and scaled)


def widths(model: Keys, rope: Keys, architecture: str, local: bool) -> tuple[int, int]:
    """head_dim and the rotated width."""
    if architecture in APART:
        rotary_dim = int(rope.need("dimension_count"))
        return rotary_dim, rotary_dim
    suffixes = ("_swa", "") if local else ("",)
    rope.ignore("dimension_count_swa")
    head_dim = model.first(*(f"attention.key_length{suffix}" for suffix in suffixes))
    rotary_dim = rope.first(*(f"dimension_count{suffix}" for suffix in suffixes))
    if head_dim is None:
        width, heads = model.need("embedding_length"), model.need("attention.head_count")
        head_dim = int(width) // int(heads)
    return int(head_dim), int(rotary_dim or head_dim)


def base_of(rope: Keys, architecture: str, stated: float | None, local: bool) -> float:
    """freq_base, of sliding layers their own."""
    theta = rope.take("freq_base")
    if local:
        theta = rope.take("freq_base_swa", SLIDING_BASE.get(architecture))
    theta = same("rope.freq_base", theta, stated)
    return float(rope.need("freq_base") if theta is None else theta)


def pairing_of(rope: Keys, architecture: str, stated: bool | None) -> tuple[list[int], bool]:
    """Sizes of the sections, where positions have axes, and whether pairs are interleaved."""
    sizes = [int(size) for size in rope.take("dimension_sections", [])]
    while sizes and not sizes[-1]:  # four numbers, of which models use three
        sizes.pop()
    known = None
    if architecture in INTERLEAVED | HALF_SPLIT:  # with sections llama.cpp always has halves
        known = architecture in INTERLEAVED and not sizes
    pairing = same("interleaved", stated, known)
    if pairing is None:
        raise ValueError(f"general.architecture {architecture!r} is not known: pass interleaved=")
    return sizes, bool(pairing)


def sections_with(sizes: list[int], architecture: str, pairs: int) -> Sections | None:
    """The sections: one after the other or in turns."""
    if not sizes:
        return None
    if architecture in INTERLEAVED_SECTIONS:
        return axes.in_turns(sizes, pairs)
    if architecture in CONTIGUOUS_SECTIONS:
        return Sections(sizes)
    raise ValueError(f"dimension_sections: {architecture!r} is not known to have sections")


# ---------------------------------------------------------------------------------------- scalings


def with_scaling(
    spec: RotarySpec, architecture: str, model: Keys, rope: Keys, tensors: Keys
) -> RotarySpec:
    """The specification with the file's scaling and the factors of its tensors."""
    rope.ignore("scaling.finetuned")
    kind = rope.take("scaling.type", "linear")
    factor = rope.same("scaling.factor", "scale_linear")
    attention_factor = float(rope.take("scaling.attn_factor", 1.0))
    if kind == "longrope":
        return with_longrope(spec, attention_factor, model, rope, tensors)
    scaling: RotaryScaling | None = None
    if kind == "yarn":
        scaling = yarn(architecture, factor, attention_factor, model, rope)
    elif kind == "linear" and factor is not None:
        scaling = LinearScaling(factor)
    elif kind not in ("none", "linear"):
        raise ValueError(
            f"scaling.type: expected 'none', 'linear', 'longrope' or 'yarn', got {kind!r}"
        )
    if kind != "yarn" and attention_factor != 1.0:
        raise ValueError(f"scaling.attn_factor: expected none beside scaling.type {kind!r}")
    spec = dataclasses.replace(spec, scaling=scaling)
    factors = tensors.take("rope_freqs.weight")
    if factors is None:
        return spec
    return scalings.divided(spec, factors, int(model.need("context_length")))


def original_length(model: Keys, rope: Keys) -> int:
    """The context of training."""
    length = rope.take("scaling.original_context_length")
    return int(length if length is not None else model.need("context_length"))


def yarn(
    architecture: str, factor: Any, attention_factor: float, model: Keys, rope: Keys
) -> RotaryScaling:
    """YaRN; the attention factor multiplies that of the paper, or that of mscale_all_dim."""
    if factor is None:
        rope.need("scaling.factor")
    if rope.take("scaling.yarn_ext_factor", 1.0) != 1.0:
        raise ValueError("scaling.yarn_ext_factor: expected 1: a partial blend has no scaling here")
    if rope.take("scaling.yarn_attn_factor", 1.0) != 1.0:
        raise ValueError("scaling.yarn_attn_factor: expected 1, beside scaling.attn_factor")
    mscale, all_dim = None, rope.take("scaling.yarn_log_multiplier")
    if all_dim is not None:
        mscale = all_dim if architecture in TENTH_OF_MSCALE else 1.0
    scaling = YarnScaling(
        factor,
        original_length(model, rope),
        beta_fast=rope.take("scaling.yarn_beta_fast", 32.0),
        beta_slow=rope.take("scaling.yarn_beta_slow", 1.0),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )
    if attention_factor == 1.0:
        return scaling
    own = RotarySpec(8, scaling=scaling).attention_factor
    return dataclasses.replace(scaling, attention_factor=attention_factor * own)


def with_longrope(
    spec: RotarySpec, attention_factor: float, model: Keys, rope: Keys, tensors: Keys
) -> RotarySpec:
    """LongRoPE: its factors are tensors of the file."""
    scaling = LongRopeScaling(
        tuple(tensors.need("rope_factors_short.weight")),
        tuple(tensors.need("rope_factors_long.weight")),
        original_length(model, rope),
        attention_factor=attention_factor,
    )
    return dataclasses.replace(spec, scaling=scaling)
