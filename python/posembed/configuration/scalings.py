"""rope_parameters (transformers 5) and rope_scaling (4): from a type's keys to a scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from posembed.configuration import conventions
from posembed.configuration.keys import Keys, same
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
from posembed.specification import RotarySpec

# Other names of the same type.
SAME_TYPE = {"mrope": "default", "su": "longrope", "xdrope": "dynamic"}


def linear(rope: Keys, config: Keys) -> RotaryScaling:
    """Position interpolation."""
    return LinearScaling(rope.need("factor"))


def dynamic(rope: Keys, config: Keys) -> RotaryScaling:
    """Dynamic NTK; with Hunyuan's alpha a fixed one."""
    alpha, factor = rope.take("alpha"), rope.take("factor")
    if alpha:
        rope.ignore("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # not read beside it
        return NtkScaling(alpha)
    if factor is None:
        rope.need("factor")
    return DynamicNtkScaling(factor, config.need("max_position_embeddings"))


def original_length(rope: Keys, config: Keys) -> int:
    """The context of training, in rope_parameters or beside it (Phi-3)."""
    key = "original_max_position_embeddings"
    length = same(key, config.take(key), rope.take(key))
    return int(length if length is not None else rope.need(key))


def context_factor(rope: Keys, config: Keys) -> float:
    """How many times longer the context became: given, or the ratio of the two lengths."""
    factor = rope.take("factor")
    if factor is not None:
        return float(factor)
    return float(config.need("max_position_embeddings")) / original_length(rope, config)


def yarn(rope: Keys, config: Keys) -> RotaryScaling:
    """YaRN, DeepSeek's too."""
    length = "max_position_embeddings"  # Ministral-3 repeats it here
    same(length, rope.take(length), config.take(length))
    # Scales queries, not the rotation; of no effect in the models' code.
    rope.ignore("llama_4_scaling_beta", "finetuned")
    given_factor = rope.take("attention_factor")
    if not rope.take("apply_yarn_scaling", True):  # vLLM's name
        given_factor = same("attention_factor", given_factor, 1.0)
    return YarnScaling(
        context_factor(rope, config),
        original_length(rope, config),
        beta_fast=rope.take("beta_fast") or 32.0,
        beta_slow=rope.take("beta_slow") or 1.0,
        mscale=rope.take("mscale"),
        mscale_all_dim=rope.take("mscale_all_dim"),
        truncate=rope.take("truncate", True),
        attention_factor=given_factor,
    )


def llama3(rope: Keys, config: Keys) -> RotaryScaling:
    """Llama 3.1."""
    return Llama3Scaling(
        rope.need("factor"),
        rope.need("low_freq_factor"),
        rope.need("high_freq_factor"),
        original_length(rope, config),
    )


def longrope(rope: Keys, config: Keys) -> RotaryScaling:
    """LongRoPE; Phi-3.5-MoE gives its two attention factors as short_mscale and long_mscale."""
    return LongRopeScaling(
        rope.need("short_factor"),
        rope.need("long_factor"),
        original_length(rope, config),
        factor=context_factor(rope, config),
        attention_factor=rope.same("attention_factor", "short_mscale"),
        long_attention_factor=rope.take("long_mscale"),
    )


def proportional(rope: Keys, config: Keys) -> RotaryScaling:
    """Gemma's."""
    return ProportionalScaling(rope.take("partial_rotary_factor", 1.0), rope.take("factor", 1.0))


def unscaled(rope: Keys, config: Keys) -> None:
    """Frequencies as they are."""


READERS: dict[str, Callable[[Keys, Keys], RotaryScaling | None]] = {
    "default": unscaled,
    "axial": unscaled,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
    "proportional": proportional,
}


def rope_type(rope: Keys) -> str:
    """The scaling's type, in its new or its legacy key."""
    given = [rope.take(key) for key in ("rope_type", "type")]
    name = same("rope_type", *(SAME_TYPE.get(name, name) for name in given)) or "default"
    if name not in READERS:
        raise ValueError(f"rope_type: expected one of {sorted(READERS)}, got {name!r}")
    return str(name)


def read(rope: Keys, config: Keys) -> RotaryScaling | None:
    """The scaling of rope_parameters; the keys of other types are left, to be refused."""
    scaling = READERS[rope_type(rope)](rope, config)
    if config.fields.get("model_type") not in conventions.DOUBLED_NTK:
        return scaling
    config.ignore("seq_length")
    if not config.take("use_dynamic_ntk"):
        return scaling
    # Qwen's code takes the next of the lengths seq_length * 2 ** k: for these the series is that of
    # a factor of 2.
    return DynamicNtkScaling(2.0, config.need("seq_length"))


def divided(spec: RotarySpec, divisors: Sequence[float], length: int) -> RotarySpec:
    """Frequencies, scaled or not, divided pair by pair: LongRoPE with one list for every length.

    Args:
        spec: What is to be divided; its attention factor stays.
        divisors: [rotary_dim / 2].
        length: The context of training.
    """
    plain = dataclasses.replace(spec, scaling=None).frequencies()
    factors = plain / spec.frequencies() * torch.tensor(divisors, dtype=torch.float64, device="cpu")
    both = tuple(factors.tolist())
    scaling = LongRopeScaling(both, both, length, attention_factor=spec.attention_factor)
    return dataclasses.replace(spec, scaling=scaling)
