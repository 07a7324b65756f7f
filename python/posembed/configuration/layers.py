"""Layers with rotations of their own: bases, scalings, widths, and layers without rotation."""

from __future__ import annotations

from typing import Any, NamedTuple

from posembed.configuration import conventions
from posembed.configuration.keys import Fields, Keys, check_mapping, number, same

# Keys with one value for each layer, and the key of a layer's own value.
BY_LAYER = {
    "no_rope_layers": "no_rope_layers",
    "use_rope_layers": "use_rope_layers",
    "layer_rope_theta": "layer_rope_theta",
    "partial_rotary_factors": "partial_rotary_factor",
    "rope_theta": "rope_theta",
    "mlp_layer_types": "mlp_layer_types",
}
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")


class Layer(NamedTuple):
    """A layer, or all layers of a kind where the configuration does not list them."""

    kind: str | None
    fields: Fields  # the configuration as this layer sees it


class OneKindOfLayerError(ValueError):
    """A kind of layer was asked for where all layers are alike."""


def check_type(kinds: list[str], layer_type: str) -> None:
    """Raises ValueError for a kind of layer that the configuration does not have."""
    if not kinds:
        raise OneKindOfLayerError(
            f"layer_type: expected none: there is one kind of layer, got {layer_type!r}"
        )
    if layer_type not in kinds:
        raise ValueError(f"layer_type: expected one of {sorted(set(kinds))}, got {layer_type!r}")


def count(fields: Fields) -> int | None:
    """The number of layers, where the configuration says it."""
    return next((int(fields[key]) for key in COUNTS if fields.get(key)), None)


def every_layer(fields: Fields) -> list[Layer]:
    """The layers in their order; raises ValueError where the configuration does not list them."""
    length = count(fields)
    if length is None:
        raise ValueError(
            f"num_hidden_layers: missing in the configuration: it has {sorted(fields)}"
        )
    kinds = listed_kinds(fields, length)
    if kinds is None and nested_kinds(seen_by(fields, 0)):
        raise ValueError("layer_types: missing in the configuration, whose layers differ")
    return [Layer(kind, seen_by(fields, i)) for i, kind in enumerate(kinds or [None] * length)]


def kinds_of_layers(fields: Fields) -> list[Layer]:
    """The layers, or one of each kind where only the kinds are known."""
    kinds = listed_kinds(fields, count(fields))
    if kinds is not None:
        return [Layer(kind, seen_by(fields, place)) for place, kind in enumerate(kinds)]
    if any(isinstance(fields.get(key), list) for key in BY_LAYER):
        return [Layer(None, layer) for layer in every_list_place(fields)[: count(fields)]]
    nested = nested_kinds(fields)
    if nested:
        return [Layer(kind, wider(fields, kind)) for kind in nested]
    return [Layer(None, fields)]


def listed_kinds(fields: Fields, length: int | None) -> list[Any] | None:
    """The kind of each layer, where the configuration lists them."""
    scaled = fields.get("rope_scaling_layers")
    if scaled is not None and length is not None and len(scaled) < length:  # Molmo 2
        return ["scaled" if place in scaled else "unscaled" for place in range(length)]
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    kinds = kinds or fields.get("hybrid_layer_types")
    crossing = fields.get("cross_attention_layers")
    if not kinds and crossing and length:  # Llama 3.2 Vision: those see images
        return [
            "cross_attention" if place in crossing else "full_attention" for place in range(length)
        ]
    return list(kinds)[:length] if kinds else None


def nested_kinds(fields: Fields) -> list[str]:
    """The kinds of layers with rope_parameters of their own."""
    rope = legacy(fields)
    return sorted(key for key, value in rope.items() if isinstance(value, dict))


def seen_by(fields: Fields, place: int) -> Fields:
    """The configuration as one layer sees it."""
    own = {int(key): value for key, value in (fields.get("per_layer_config") or {}).items()}
    kinds = fields.get("layer_types") or []
    found = wider(fields, kinds[place] if place < len(kinds) else None)
    found = {**found, **own.get(place, {})}
    for key, single in BY_LAYER.items():
        values = found.get(key)
        if isinstance(values, list) and values:
            del found[key]
            found[single] = values[place] if place < len(values) else None
    return found


def wider(fields: Fields, kind: str | None) -> Fields:
    """The configuration with the width of full-attention layers, where they have their own."""
    if kind == "full_attention" and fields.get("global_head_dim"):
        return {**fields, "head_dim": fields["global_head_dim"]}
    return dict(fields)


# -------------------------------------------------------------------------------- rope_parameters


def is_nested(rope: Fields) -> bool:
    """Whether each kind of layer has rope_parameters of its own."""
    return any(isinstance(value, dict) for value in rope.values())


def legacy(fields: Fields) -> Fields:
    """rope_parameters as they are, or out of the keys that came before them."""
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling") or None
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        check_mapping({} if value is None else value, key)
    rope: Fields = same("rope_scaling", new, old) or {}
    return check_nested(fields, rope) if is_nested(rope) else from_bases(fields, rope)


BASES = ("rope_theta", "rotary_emb_base", "rotary_embedding_base")
LOCAL_BASES = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
OTHER_BASES = ("global_rope_theta", "compress_rope_theta")


def check_nested(fields: Fields, rope: Fields) -> Fields:
    """Raises ValueError for a base beside rope_parameters that none of them has."""
    bases = [value.get("rope_theta") for value in rope.values() if isinstance(value, dict)]
    for key in (*BASES, *LOCAL_BASES, *OTHER_BASES):
        given = fields.get(key)
        if given is not None and not isinstance(given, list) and given not in bases:
            raise ValueError(f"{key}: the configuration contradicts itself: {[given, *bases]}")
    return rope


def from_bases(fields: Fields, rope: Fields) -> Fields:
    """Before rope_parameters were nested: a second base beside rope_theta."""
    given = Keys({key: fields.get(key) for key in (*BASES, *LOCAL_BASES, *OTHER_BASES)}, "")
    theta, local = given.same(*BASES), given.same(*LOCAL_BASES)
    compressed = given.take("compress_rope_theta")
    if local is not None:  # Gemma 3, ModernBERT: local layers are not scaled
        return {
            "full_attention": {**rope, "rope_theta": given.take("global_rope_theta", theta)},
            "sliding_attention": {"rope_theta": local},
        }
    if compressed is not None:  # DeepSeek-V4, whose code has no attention factor
        factor = {"attention_factor": 1.0} if "yarn" in rope.values() else {}
        return {
            "main": {"rope_theta": theta},
            "compress": {**factor, **rope, "rope_theta": compressed},
        }
    rope = {**rope, "rope_theta": same("rope_theta", rope.get("rope_theta"), theta)}
    plain = {"rope_theta": rope["rope_theta"]}
    if fields.get("model_type") in conventions.SCALED_IF_FULL:
        return {"full_attention": rope, "sliding_attention": plain}
    scaled = fields.get("rope_scaling_layers")
    if scaled is not None and len(scaled) < (count(fields) or 0):  # Molmo 2
        return {"scaled": rope, "unscaled": plain}
    return rope


SAME_KEY = {"type": "rope_type", "xdrope_section": "mrope_section"}


def every_list_place(fields: Fields) -> list[Fields]:
    """The configuration as each layer sees it for which a list has a value of its own."""
    lists = [fields[key] for key in BY_LAYER if isinstance(fields.get(key), list)]
    return [seen_by(fields, place) for place in range(max(map(len, lists), default=0) or 1)]


def check_kept(given: Fields, completed: Fields) -> None:
    """Raises ValueError for numbers of the file that its configuration class passes over."""
    kept: dict[str, list[Any]] = {}
    for rope in blocks(legacy(completed)):
        for key, value in rope.items():
            kept.setdefault(SAME_KEY.get(key, key), []).append(value)
    for layer in every_list_place(given):
        for rope in blocks(legacy(layer)):
            for key, value in rope.items():
                found = kept.get(SAME_KEY.get(key, key), [])
                if value not in (None, *found) and not key.endswith("type"):
                    raise ValueError(
                        f"{key}: the file has {value!r}, its configuration class takes {found}"
                    )


def blocks(rope: Fields) -> list[Fields]:
    """rope_parameters of all kinds of layers."""
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def label(fields: Fields, kind: str | None, rope: Fields) -> str | None:
    """The name under which rope_parameters has a kind of layer."""
    if fields.get("model_type") in conventions.COMPRESSED and kind not in rope:
        return "main" if kind == "sliding_attention" else "compress"
    return kind


def parameters(config: Keys, kind: str | None) -> Keys | None:
    """The rope_parameters of one kind of layer; None where such layers are not rotated."""
    config.ignore("rope_parameters", "rope_scaling", "rope_scaling_layers")
    config.ignore(*BASES, *LOCAL_BASES, *OTHER_BASES)
    if config.fields.get("model_type") in conventions.SCALED_IF_FULL:
        same("yarn_only_types", config.take("yarn_only_types"), ["full_attention"])
    rope = legacy(config.fields)
    if is_nested(rope):
        every = Keys(rope, "rope_parameters")
        every.ignore(*(key for key, value in rope.items() if isinstance(value, dict)))
        every.done()
        own = rope.get(str(label(config.fields, kind, rope)))
        if own is None:
            return None
        rope = own
    name = rope.get("rope_type", rope.get("type", "default"))
    return Keys(rope, f"rope_parameters of type {name!r}")


def own_base(config: Keys) -> float | None:
    """The base of this layer among those of all layers; 0 where it does not rotate."""
    theta = config.take("layer_rope_theta")
    return None if theta is None else float(number("layer_rope_theta", theta))
