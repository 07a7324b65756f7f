"""A Hugging Face configuration: transformers 4 and 5, flat or nested by the kind of layer."""

from __future__ import annotations

import math
import re

from posembed.configuration import axes, conventions, layers, scalings
from posembed.configuration.keys import Fields, Keys, same
from posembed.configuration.widths import head_width, latent_width, widths
from posembed.specification import RotarySpec

# Every key that matches is read or has no bearing; another one is refused.
ROTARY_KEY = re.compile("rope|rotary|theta")


def read(
    fields: Fields, layer_type: str | None, interleaved: bool | None, base: float | None
) -> RotarySpec:
    """See :meth:`RotarySpec.from_huggingface`."""
    model_type = str(fields.get("model_type", ""))
    if model_type in conventions.UNSUPPORTED:
        raise ValueError(f"model_type {model_type!r}: {conventions.UNSUPPORTED[model_type]}")
    config = Keys(layers.of_type(fields, layer_type), "the configuration")
    config.ignore(*conventions.NO_BEARING)
    if model_type in conventions.UNROTATED:
        return RotarySpec(latent_width(config), rotary_dim=0)
    axis = layer_type if model_type in conventions.WINDOW_OF_AXIS else None
    rope = layers.parameters(config, None if axis else layer_type)
    if rope is None or not rotates(config, model_type, layer_type):
        return RotarySpec(head_width(config), rotary_dim=0)
    spec = rotation(config, rope, model_type, axis, interleaved, base)
    config.done(ROTARY_KEY.pattern)
    rope.done()
    return spec


def rotates(config: Keys, model_type: str, layer_type: str | None) -> bool:
    """Whether the model, or the kind of its layers that is asked for, rotates at all."""
    key, default, rotating = conventions.SWITCHES.get(model_type, (None, None, ()))
    if key is not None and config.take(key, default) not in rotating:
        return False
    if not config.take("use_rotary_embedding", True):
        return False
    of_layers = config.take("no_rope_layers")  # 1: rotated
    if of_layers and not any(of_layers):
        return False
    sliding = model_type in conventions.ROTATED_IF_SLIDING and config.take("sliding_window")
    return not (sliding and layer_type == "full_attention")


def rotation(
    config: Keys,
    rope: Keys,
    model_type: str,
    axis: str | None,
    interleaved: bool | None,
    base: float | None,
) -> RotarySpec:
    """The specification out of a model's keys and those of one kind of its layers."""
    theta = base_of(config, rope, model_type, base)
    scaling = scalings.read(rope, config)
    head_dim, rotary_dim = widths(config, rope, model_type)
    if rotary_dim % 2 and rotary_dim < head_dim:  # exponents go over the odd width
        if scaling is not None:
            raise ValueError(f"partial_rotary_factor: expected an even width, got {rotary_dim}")
        theta, rotary_dim = theta ** ((rotary_dim + 1) / rotary_dim), rotary_dim + 1
    options: Fields = {
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "base": theta,
        "scaling": scaling,
        "interleaved": is_interleaved(config, model_type, interleaved),
        "reverse": model_type in conventions.REVERSED,
    }
    if model_type in conventions.AXIAL:
        options.update(axes.of_tower(config, model_type, head_dim, theta))
    elif model_type in conventions.WINDOW_OF_AXIS:
        options.update(axes.window_of_axis(head_dim, axis))
    else:
        options["sections"] = axes.of_text(rope, model_type, rotary_dim // 2)
    if model_type in conventions.TRAILING:
        options["rotary_start"] = head_dim - rotary_dim
    spec = RotarySpec(**options)
    tensor = conventions.LEARNED_SCALE.get(model_type)
    return spec if tensor is None else with_learned_scale(spec, config, tensor)


def base_of(config: Keys, rope: Keys, model_type: str, stated: float | None) -> float:
    """rope_theta, or what the model's code has in its place."""
    by_layer = sorted(set(config.take("layer_rope_theta", [])) - {0})  # Granite; 0: not rotated
    theta = rope.take("rope_theta")
    if len(by_layer) > 1 and stated not in by_layer:
        raise ValueError(f"layer_rope_theta: layers differ: pass base= of {by_layer}")
    if by_layer:
        return float(same("layer_rope_theta", stated or by_layer[0], stated))
    theta = same("rope_theta", theta, stated)
    if theta is None and model_type in conventions.FIXED_BASE:
        theta = conventions.FIXED_BASE[model_type]
    if theta is None:
        raise ValueError("rope_theta: missing in the configuration: pass base=")
    return float(theta)


def is_interleaved(config: Keys, model_type: str, stated: bool | None) -> bool:
    """Which components form a pair: written by convert, known for the model type, or stated."""
    converted = config.take(conventions.CONVERTED)
    if converted is not None:
        config.ignore("rope_interleave")  # which says what was before
        return bool(same("interleaved", stated, named(converted)))
    known = None
    if model_type in conventions.BY_KEY:
        known = by_key(config, stated)
    elif model_type in conventions.INTERLEAVED | conventions.INTERLEAVED_AXIAL:
        known = True
    elif model_type in conventions.HALF_SPLIT | conventions.AXIAL:
        known = False
    pairing = same("interleaved", stated, known, config.take("rope_interleave"))
    if pairing is None:
        raise ValueError(
            f"model_type {model_type!r} is not known: pass interleaved=True (pairs 2i, 2i + 1) or "
            "interleaved=False (pairs i, i + rotary_dim / 2), as its code has it"
        )
    return bool(pairing)


def by_key(config: Keys, stated: bool | None) -> bool:
    """rope_interleave, or what is stated; without either such models are interleaved."""
    key = "rope_interleave"
    given = config.take(key) if stated is not None or not config.has(key) else config.need(key)
    if given is None:
        given = True if stated is None else stated
    return bool(given)


def named(pairing: str) -> bool:
    """Whether the name that convert has written is that of interleaved pairs."""
    if pairing not in ("interleaved", "half_split"):
        raise ValueError(
            f"{conventions.CONVERTED}: expected 'interleaved' or 'half_split', got {pairing!r}"
        )
    return pairing == "interleaved"


def with_learned_scale(spec: RotarySpec, config: Keys, tensor: str) -> RotarySpec:
    """LeRoPE: frequencies times the exponential of a tensor that only the checkpoint has."""
    alpha = config.take(tensor)
    if alpha is None:
        raise ValueError(
            f"{tensor}: missing: frequencies are learned; pass the checkpoint's values among the "
            f"configuration's keys, {{**config.to_dict(), {tensor!r}: [...]}}"
        )
    length = getattr(spec.scaling, "original_max_positions", None)
    length = length or config.need("max_position_embeddings")
    return scalings.divided(spec, [math.exp(-float(value)) for value in alpha], length)
