"""Layers with rotations of their own: bases, scalings and heads by the kind of layer."""

from __future__ import annotations

from posembed.configuration.keys import Fields, Keys, check_mapping, same


def of_type(fields: Fields, layer_type: str | None) -> Fields:
    """The configuration as layers of that type see it: some have wider heads."""
    layers, own = fields.get("layer_types") or [], fields.get("per_layer_config")
    if layer_type is None or not own or layer_type not in layers:
        if layer_type == "full_attention" and fields.get("global_head_dim"):
            return {**fields, "head_dim": fields["global_head_dim"]}
        return fields
    place = layers.index(layer_type)
    overrides = {int(key): value for key, value in own.items()}.get(place, {})
    return {**fields, **overrides}


def is_nested(rope: Fields) -> bool:
    """Whether each kind of layer has rope_parameters of its own."""
    return any(isinstance(value, dict) for value in rope.values())


def legacy(config: Keys, rope: Fields) -> Fields:
    """Before rope_parameters were nested: a second base beside rope_theta."""
    theta = config.same("rope_theta", "rotary_emb_base", "rotary_embedding_base")
    whole = config.take("global_rope_theta", theta)
    local = config.same("rope_local_base_freq", "local_rope_theta")
    compressed = config.take("compress_rope_theta")
    scaled = config.take("rope_scaling_layers")
    if is_nested(rope):
        return rope
    if local is not None:  # Gemma 3, ModernBERT: local layers are not scaled
        return {
            "full_attention": {**rope, "rope_theta": whole},
            "sliding_attention": {"rope_theta": local},
        }
    if compressed is not None:  # DeepSeek-V4, whose code has no attention factor
        factor = {"attention_factor": 1.0} if "yarn" in rope.values() else {}
        return {
            "main": {"rope_theta": theta},
            "compress": {**factor, **rope, "rope_theta": compressed},
        }
    rope = {**rope, "rope_theta": same("rope_theta", rope.get("rope_theta"), theta)}
    if scaled is not None and len(scaled) < config.need("num_hidden_layers"):  # Molmo 2
        return {"scaled": rope, "unscaled": {"rope_theta": rope["rope_theta"]}}
    return rope


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


def parameters(config: Keys, layer_type: str | None) -> Keys | None:
    """The rope_parameters of one kind of layer; None where such layers are not rotated."""
    new, old = config.take("rope_parameters"), config.take("rope_scaling") or None
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        check_mapping({} if value is None else value, key)
    rope = legacy(config, same("rope_scaling", new, old) or {})
    if is_nested(rope):
        kinds = {key for key, value in rope.items() if value is None or isinstance(value, dict)}
        if layer_type is None and len(kinds) == 1:
            layer_type = next(iter(kinds))
        if layer_type not in kinds:
            raise ValueError(f"layer_type: expected one of {sorted(kinds)}, got {layer_type!r}")
        every = Keys(rope, "rope_parameters")
        every.ignore(*kinds)
        every.done()
        rope = rope[layer_type]
    elif layer_type is not None:
        check_type(config.take("layer_types", []), layer_type)
    if rope is None:
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    return Keys(rope, f"rope_parameters of type {kind!r}")
