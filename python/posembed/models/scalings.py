"""Reads the scaling from rope_parameters (transformers 5) or rope_scaling (4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from posembed.models import catalogue
from posembed.models.fields import (
    Keys,
    flag,
    optional_real,
    real,
    reals,
    same,
    shown,
    text_of,
    whole,
)
from posembed.specifications import RotarySpec
from posembed.specifications.scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    RotaryScaling,
    YarnScaling,
)

LENGTH = "max_position_embeddings"


def _dynamic(rope: Keys, config: Keys) -> RotaryScaling:
    """Dynamic NTK; with Hunyuan's alpha, a fixed NTK scaling."""
    alpha = rope.take("alpha")
    rope.take("factor")
    if alpha:
        rope.ignore("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # unused with alpha
        return NtkScaling(real("alpha", alpha))
    factor = real("factor", rope.need("factor"))
    return DynamicNtkScaling(factor, whole("original_max_positions", config.need(LENGTH)))


def _original_length(rope: Keys, config: Keys) -> int:
    """The context length of training, in rope_parameters or beside it (Phi-3)."""
    key = "original_max_position_embeddings"
    length = same(key, (config.take(key), rope.take(key)))
    return whole(key, rope.need(key) if length is None else length)


def _context_factor(rope: Keys, config: Keys) -> float:
    """How many times longer the context becomes: as given, or the ratio of the two lengths."""
    factor = rope.take("factor")
    if factor is not None:
        return real("factor", factor)
    length = real(LENGTH, config.need(LENGTH))
    original = _original_length(rope, config)
    if original == 0:
        raise ValueError("original_max_position_embeddings: expected a positive number, got 0")
    return length / original


def _yarn(rope: Keys, config: Keys) -> YarnScaling:
    """YaRN, including DeepSeek's."""
    same(LENGTH, (rope.take(LENGTH), config.take(LENGTH)))  # Ministral-3 repeats it here
    # The first scales queries, not the rotation; the second has no effect in the models' code.
    rope.ignore("llama_4_scaling_beta", "finetuned")
    factor = rope.take("attention_factor")
    if not rope.take("apply_yarn_scaling", True):  # vLLM's
        factor = same("attention_factor", (factor, 1.0))
    attention_factor = optional_real("attention_factor", factor)
    return YarnScaling(
        factor=_context_factor(rope, config),
        original_max_positions=_original_length(rope, config),
        beta_fast=real("beta_fast", rope.take("beta_fast") or 32.0),
        beta_slow=real("beta_slow", rope.take("beta_slow") or 1.0),
        mscale=optional_real("mscale", rope.take("mscale")),
        mscale_all_dim=optional_real("mscale_all_dim", rope.take("mscale_all_dim")),
        truncate=flag("truncate", rope.take("truncate", True)),
        attention_factor=attention_factor,
    )


def _telechat3(rope: Keys, config: Keys) -> RotaryScaling:
    """TeleChat 3, as vLLM reads it: YaRN with an attention factor of its own."""
    scaling = _yarn(rope, config)
    if scaling.attention_factor is not None or scaling.factor <= 0.0:
        return scaling
    return dataclasses.replace(scaling, attention_factor=0.07 * math.log(scaling.factor) + 1.0)


def _llama3(rope: Keys, config: Keys) -> RotaryScaling:
    """Llama 3.1."""
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (real(key, rope.need(key)) for key in keys)
    return Llama3Scaling(factor, low, high, _original_length(rope, config))


def _longrope(rope: Keys, config: Keys) -> RotaryScaling:
    """LongRoPE; Phi-3.5-MoE gives its two attention factors as short_mscale and long_mscale."""
    names = ("attention_factor", "short_mscale")
    return LongRopeScaling(
        reals("short_factor", rope.need("short_factor")),
        reals("long_factor", rope.need("long_factor")),
        original_max_positions=_original_length(rope, config),
        factor=_context_factor(rope, config),
        attention_factor=optional_real(rope.stated(*names), rope.same(*names)),
        long_attention_factor=optional_real("long_mscale", rope.take("long_mscale")),
    )


_READERS: dict[str, Callable[[Keys, Keys], RotaryScaling | None]] = {
    "axial": lambda rope, config: None,
    "default": lambda rope, config: None,
    "dynamic": _dynamic,
    "linear": lambda rope, config: LinearScaling(real("factor", rope.need("factor"))),
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": lambda rope, config: ProportionalScaling(  # Gemma's
        real("proportion", rope.take("partial_rotary_factor", 1.0)),
        real("factor", rope.take("factor", 1.0)),
    ),
    "telechat3-yarn": _telechat3,
    "yarn": _yarn,
}
# Other names of a type, and its usual name.
_USUAL = {"mrope": "default", "su": "longrope", "xdrope": "dynamic"}


def rope_type(rope: Keys) -> str:
    """The scaling's type, from its new or its legacy key."""
    names = [rope.take("rope_type"), rope.take("type")]
    given = same("rope_type", [_USUAL.get(text_of(name), name) for name in names])
    name = text_of(given) if given else "default"
    if name not in _READERS:
        raise ValueError(
            f"rope_type: expected one of {shown(sorted(_READERS))}, got {shown(given)}"
        )
    return name


def read(rope: Keys, config: Keys) -> RotaryScaling | None:
    """The scaling of rope_parameters. Leaves the keys of other types, which are then rejected."""
    scaling = _READERS[rope_type(rope)](rope, config)
    rules = catalogue.of(config.fields)
    if scaling is not None and "unscaled" in rules:
        name = shown(config.fields.get("model_type"))
        raise ValueError(f"rope_scaling: the code of model_type {name} has none, got {scaling}")
    if "doubled_ntk" not in rules:
        return scaling
    config.ignore("seq_length")
    if not config.take("use_dynamic_ntk"):
        return scaling
    # Qwen's code rounds the length up to seq_length * 2^k: at these lengths, the series is that of
    # a factor of 2.
    return DynamicNtkScaling(2.0, whole("original_max_positions", config.need("seq_length")))


# ----------------------------------------------------------------------------- what scalings become


def attention_factor_of(scaling: RotaryScaling) -> float:
    """The attention factor of a scaling, which is the same for every width."""
    return RotarySpec(8, scaling=scaling).attention_factor


def divided(spec: RotarySpec, divisors: list[float], length: int) -> RotarySpec:
    """Divides the frequencies pair by pair: LongRoPE with one list for every length.

    Keeps the attention factor. ``divisors``: [rotary_dim / 2]; ``length``: that of training.
    """
    plain = dataclasses.replace(spec, scaling=None)
    pairs = list(zip(plain.frequencies().tolist(), spec.frequencies().tolist(), strict=True))
    if len(divisors) != len(pairs):
        raise ValueError(
            f"divisors: expected rotary_dim / 2 = {len(pairs)} numbers, got {len(divisors)}"
        )
    if not all(own for _, own in pairs):
        raise ValueError("factor: too large: frequencies that it divides become 0")
    factors = [whole / own * divisor for (whole, own), divisor in zip(pairs, divisors, strict=True)]
    scaling = LongRopeScaling(factors, factors, length, attention_factor=spec.attention_factor)
    return dataclasses.replace(plain, scaling=scaling)
