"""A Hugging Face configuration: transformers 4 and 5, flat or nested by the kind of layer."""

from __future__ import annotations

import math
from typing import NamedTuple

from posembed.configuration import axes, conventions, layers, scalings
from posembed.configuration.irrelevant import is_irrelevant
from posembed.configuration.keys import Fields, Keys, same
from posembed.configuration.layers import Layer
from posembed.configuration.widths import head_width, latent_width, widths
from posembed.specification import RotarySpec


class Stated(NamedTuple):
    """What the caller says beside the configuration."""

    interleaved: bool | None = None
    base: float | None = None
    accounted: frozenset[str] = frozenset()  # keys that need not be understood here


def read(fields: Fields, layer_type: str | None, stated: Stated) -> RotarySpec:
    """See :meth:`RotarySpec.from_huggingface`."""
    model_type = checked_type(fields)
    if model_type in conventions.UNROTATED:
        return RotarySpec(latent_width(Keys(fields, "the configuration")), rotary_dim=0)
    if model_type in conventions.WINDOW_OF_AXIS:
        axis = of_layer(Layer(None, fields), stated, layer_type)
        assert axis is not None
        return axis
    found = chosen(layers.kinds_of_layers(fields), layer_type, stated.base)
    rotating = {spec for spec in of_layers(found, stated) if spec is not None}
    if len(rotating) == 1:
        return rotating.pop()
    if rotating:
        raise differing(found, layer_type)
    if layer_type is not None:
        raise ValueError(f"layer_type: layers of kind {layer_type!r} do not rotate")
    return RotarySpec(head_width(Keys(fields, "the configuration")), rotary_dim=0)


def read_layers(fields: Fields, stated: Stated) -> list[RotarySpec | None]:
    """See :meth:`RotarySpec.for_layers`."""
    model_type = checked_type(fields)
    if model_type in conventions.WINDOW_OF_AXIS:
        raise ValueError(
            f"model_type {model_type!r}: each layer rotates twice: pass layer_type='height' and "
            "'width' to from_huggingface"
        )
    every = layers.every_layer(fields)
    return [None] * len(every) if model_type in conventions.UNROTATED else of_layers(every, stated)


def checked_type(fields: Fields) -> str:
    """The model type; raises ValueError for one without a specification."""
    model_type = str(fields.get("model_type", ""))
    if model_type in conventions.UNSUPPORTED:
        raise ValueError(f"model_type {model_type!r}: {conventions.UNSUPPORTED[model_type]}")
    return model_type


def chosen(found: list[Layer], layer_type: str | None, base: float | None) -> list[Layer]:
    """The layers of one kind, and of one base where each layer has its own."""
    if layer_type is not None:
        kinds = [layer.kind for layer in found if layer.kind is not None]
        layers.check_type(kinds, layer_type)
        found = [layer for layer in found if layer.kind == layer_type]
    with_base = [layer for layer in found if base in (layer.fields.get("layer_rope_theta"), None)]
    return with_base or found


def of_layers(found: list[Layer], stated: Stated) -> list[RotarySpec | None]:
    """The specification of each layer; layers with the same keys are read once."""
    read_before: list[tuple[Layer, RotarySpec | None]] = []
    for layer in found:
        same_keys = next((spec for other, spec in read_before if other == layer), ...)
        spec = of_layer(layer, stated) if same_keys is ... else same_keys
        read_before.append((layer, spec))
    return [spec for _, spec in read_before]


def differing(found: list[Layer], layer_type: str | None) -> ValueError:
    """Why there is no one specification for these layers."""
    kinds = {layer.kind for layer in found if layer.kind is not None}
    if layer_type is None and len(kinds) > 1:
        return ValueError(f"layer_type: expected one of {sorted(kinds)}, got None")
    bases = sorted({layer.fields.get("layer_rope_theta") or 0 for layer in found} - {0})
    if len(bases) > 1:
        return ValueError(f"layer_rope_theta: layers differ: pass base= of {bases}")
    return ValueError("layer_type: layers of one kind differ: use RotarySpec.for_layers")


def of_layer(layer: Layer, stated: Stated, axis: str | None = None) -> RotarySpec | None:
    """The specification of one layer; None where it does not rotate."""
    config = Keys(layer.fields, "the configuration")
    model_type = str(layer.fields.get("model_type", ""))
    if not rotates(config, model_type, layer.kind):
        return None
    rope = layers.parameters(config, layer.kind)
    if rope is None:
        return None
    spec = rotation(config, rope, model_type, axis, stated.interleaved, stated.base)
    check_all_understood(config, stated.accounted)
    rope.done()
    return spec


def check_all_understood(config: Keys, accounted: frozenset[str]) -> None:
    """Raises ValueError for keys that may concern positions: no name says that they do not."""
    config.ignore("global_head_dim", *conventions.NO_BEARING, *layers.BY_LAYER, *layers.COUNTS)
    if config.take("layer_types") or config.take("layers_block_type"):
        config.ignore(*conventions.PATTERNS)
    if config.has("no_rope_layers"):
        config.ignore("no_rope_layer_interval")
    unknown = [key for key in config.left() if key not in accounted and not is_irrelevant(key)]
    if unknown:
        raise ValueError(
            f"{config.where}: keys that are not understood: {unknown}: pass ignore={unknown} if "
            "they do not concern rotary positions"
        )


def rotates(config: Keys, model_type: str, kind: str | None) -> bool:
    """Whether a layer rotates at all."""
    key, default, rotating = conventions.SWITCHES.get(model_type, (None, None, ()))
    if key is not None and config.take(key, default) not in rotating:
        return False
    if not config.take("use_rotary_embedding", True) or kind in conventions.WITHOUT_ROTATION:
        return False
    if config.take("use_rope_layers", True) in (False, 0):
        return False
    if config.take("no_rope_layers") == 0 or layers.own_base(config) == 0:  # 1: rotated
        return False
    if model_type not in conventions.ROTATED_IF_SLIDING or kind == "sliding_attention":
        return True
    if model_type in conventions.ROTATED_WITHOUT_WINDOW:
        return not config.take("sliding_window")
    dense = config.take("mlp_layer_types") == "dense"  # Cohere's first layers
    return bool(dense and config.take("prefix_dense_sliding_window_pattern") == 1)


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
    theta, own = rope.take("rope_theta"), layers.own_base(config)
    theta = same("rope_theta", theta if own is None else own, stated)
    if theta is None and model_type in conventions.FIXED_BASE:
        theta = conventions.FIXED_BASE[model_type]
    if theta is None:
        parts = sorted(key for key in config.fields if key.endswith("_config"))
        hint = f", or part= of {parts}" if parts else ""
        raise ValueError(f"rope_theta: missing in the configuration: pass base={hint}")
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
