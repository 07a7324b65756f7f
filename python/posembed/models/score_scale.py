"""What a configuration says about the scale of scores."""

from __future__ import annotations

import math
from typing import Any

from posembed.models import catalogue, gguf
from posembed.models.data import words
from posembed.models.fields import Fields, Keys, real, shown, text_of, whole
from posembed.models.widths import head_width
from posembed.specifications import RotarySpec
from posembed.specifications.scaling import YarnScaling
from posembed.specifications.score_scale import ScoreScale


class _Scale:
    """Collects what keys say."""

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {"factor": 1.0}
        self.sources: list[str] = []

    def multiply(self, factor: float, key: str) -> None:
        if abs(factor - 1.0) >= 1e-12:
            self.numbers["factor"] *= factor
            self.sources.append(key)

    def replace(self, scale: float, head_dim: int, key: str) -> None:
        """What replaces 1 / sqrt(width), for a width of heads."""
        self.multiply(scale * math.sqrt(head_dim), key)

    def grow(self, growth: Any, length: Any, key: str) -> None:
        if growth:
            self.numbers["growth"] = real(key, growth)
            self.numbers["length"] = real(f"the length of {key}", length)
            self.sources.append(key)

    def done(self, **more: Any) -> ScoreScale | None:
        if not self.sources:
            return None
        scale = ScoreScale(**self.numbers, **more, source=", ".join(self.sources))
        RotarySpec(2, score_scale=scale)  # checks the numbers
        return scale


def _add_mscale(scale: _Scale, spec: RotarySpec) -> None:
    """DeepSeek's: YaRN's factor of queries and keys, for components that do not rotate as well."""
    yarn = spec.scaling
    if isinstance(yarn, YarnScaling) and yarn.factor > 1.0:
        mscale = 0.1 * (yarn.mscale_all_dim or 0.0) * math.log(yarn.factor) + 1.0
        scale.multiply(mscale * mscale, "mscale_all_dim")


def _add_constant(scale: _Scale, fields: Fields, head_dim: int) -> None:
    """What replaces 1 / sqrt(width) in all layers, or multiplies it."""
    rules = catalogue.of(fields)
    code = f"the code of {shown(fields.get('model_type'))}"
    if "score_scale" in rules:
        return scale.replace(real("score_scale", rules["score_scale"]), head_dim, code)
    if "score_factor" in rules:
        scale.multiply(real("score_factor", rules["score_factor"]), code)
    scalar, multiplier = "query_pre_attn_scalar", "attention_multiplier"
    if fields.get(scalar):
        number = real(scalar, fields[scalar])
        if number <= 0.0:
            raise ValueError(f"{scalar}: expected a positive number, got {shown(fields[scalar])}")
        scale.replace(1.0 / math.sqrt(number), head_dim, scalar)
    if fields.get(multiplier):
        scale.replace(real(multiplier, fields[multiplier]), head_dim, multiplier)
    return None


def of_layer(fields: Fields, spec: RotarySpec, kind: str | None) -> ScoreScale | None:
    """The scale of scores in layers of a kind that rotate as ``spec``; None if it is 1.

    From the configuration of config.json, params.json or GGUF.
    """
    if "general.architecture" in fields:
        return _of_metadata(fields, spec)
    scale = _Scale()
    blocks = (fields.get(key) for key in ("rope_parameters", "rope_scaling", "yarn"))
    rotation = next((block for block in blocks if isinstance(block, dict)), {})
    if isinstance(rotation.get(kind), dict):
        rotation = rotation[kind]
    scaling = fields.get("llama_4_scaling")
    original, beta = "original_max_position_embeddings", "llama_4_scaling_beta"
    if fields.get("qk_rope_head_dim") and "without_mscale" not in catalogue.of(fields):
        _add_mscale(scale, spec)
    scale.grow(rotation.get(beta), rotation.get(original), beta)
    if isinstance(scaling, dict):
        scale.grow(scaling.get("beta"), scaling.get(original), "llama_4_scaling")
    logn = {}
    if fields.get("use_logn_attn"):
        logn["logn"] = True
        scale.numbers["length"] = real("seq_length", fields.get("seq_length"))
        scale.sources.append("use_logn_attn")
    _add_constant(scale, fields, spec.head_dim)
    return scale.done(**logn)


def without_rotation(fields: Fields, kind: str | None) -> ScoreScale | None:
    """The scale of scores in layers of a kind that do not rotate.

    None if it is 1, or if they have no attention.
    """
    rules, scale = catalogue.of(fields), _Scale()
    key, otherwise = "attn_temperature_tuning", rules.get("temperature")
    if otherwise is not None and fields.get(key, True):  # Llama 4's
        names = ("attn_scale", "floor_scale")
        growth, length = (fields.get(name, otherwise[name]) for name in names)
        scale.grow(growth, length, key)
    if scale.sources or kind in words("without_attention"):
        return scale.done(offset=1)
    stated = any(fields.get(key) for key in ("query_pre_attn_scalar", "attention_multiplier"))
    if not stated and rules.keys().isdisjoint(("score_scale", "score_factor")):
        return None
    _add_constant(scale, fields, head_width(Keys(fields, "the configuration")))
    return scale.done()


def _of_metadata(fields: Fields, spec: RotarySpec) -> ScoreScale | None:
    model = text_of(fields.get("general.architecture")) + "."
    attention = model + "attention."
    scale = _Scale()
    if fields.get(attention + "kv_lora_rank"):
        _add_mscale(scale, spec)
    key, temperature = attention + "scale", attention + "temperature_scale"
    if fields.get(key):
        scale.replace(real(key, fields[key]), spec.head_dim, key)
    else:
        _add_programs_scale(scale, fields, spec.head_dim)
    lengths = (
        attention + "temperature_length",
        model + "rope.scaling.original_context_length",
        model + "context_length",
    )
    length = next((fields[name] for name in lengths if fields.get(name)), None)
    scale.grow(fields.get(temperature), length, temperature)
    return scale.done()


def _add_programs_scale(scale: _Scale, fields: Fields, head_dim: int) -> None:
    """What llama.cpp sets in its code, where no key says it."""
    architecture = text_of(fields.get("general.architecture"))
    rule = gguf.rules_of(architecture).get("score_scale")
    if rule is None:
        return
    code = f"the program of '{architecture}'"
    if "value" in rule:
        scale.replace(rule["value"], head_dim, code)
        return
    keys = ("block_count", "embedding_length", "attention.head_count")
    layers, width, heads = (fields.get(f"{architecture}.{key}") for key in keys)
    heads = heads[0] if isinstance(heads, list) and heads else heads
    if layers == rule["block_count"] and width and heads:
        width, heads = whole("embedding_length", width), whole("attention.head_count", heads)
        scale.replace(1.0 / math.sqrt(width // heads), head_dim, code)
