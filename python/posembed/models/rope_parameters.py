"""rope_parameters of transformers 5, flat or one for each kind of layer, and what preceded them."""

from __future__ import annotations

from typing import Any

from posembed.models import catalogue, layers
from posembed.models.fields import Fields, Keys, check_mapping, items_of, same, shown

BASES = ("rope_theta", "rotary_emb_base", "rotary_embedding_base")
LOCAL_BASES = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
ALL_BASES = (*BASES, *LOCAL_BASES, "global_rope_theta", "compress_rope_theta")
# What some files repeat beside the kinds of layers, which transformers passes over.
SHARED = ("factor", "partial_rotary_factor", "rope_theta", "rope_type", "type")


def is_nested(rope: Fields) -> bool:
    """Whether each kind of layer has rope_parameters of its own."""
    return any(isinstance(value, dict) for value in rope.values())


def scales_some(fields: Fields) -> bool:
    """Whether a list says that only some layers are scaled (Molmo 2)."""
    scaled = fields.get("rope_scaling_layers")
    if scaled is None:
        return False
    return len(items_of(scaled)) < (layers.count_of_layers(fields) or 0)


def of(fields: Fields) -> Fields:
    """rope_parameters as they are, or converted from the keys that preceded them."""
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling") or None
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None:
            check_mapping(value, name)
    rope = _agreed(parameters, scaling)
    if not is_nested(rope):
        return _from_bases(fields, rope)
    for key in SHARED:
        if isinstance(rope.get(key), dict):
            raise ValueError(f"{key}: expected a number or a name, got {shown(rope[key])}")
    _check_nested(fields, rope)
    return rope


def _agreed(parameters: Fields | None, scaling: Fields | None) -> Fields:
    """The block under both of its names, of which one may have keys that stood beside the other."""
    if not parameters or not scaling:
        return parameters or scaling or {}
    one, other = (
        {
            "rope_type" if key == "type" and "rope_type" not in block else key: block[key]
            for key in block
        }
        for block in (parameters, scaling)
    )
    beside = {"rope_theta", "partial_rotary_factor"} & (one.keys() ^ other.keys())
    if any(one.get(key) != other.get(key) for key in {*one, *other} - beside):
        same("rope_scaling", (parameters, scaling))
    return {**other, **one}


def _check_nested(fields: Fields, rope: Fields) -> None:
    """Rejects a base outside rope_parameters that none of them has."""
    nested = [block.get("rope_theta") for block in rope.values() if isinstance(block, dict)]
    for key in ALL_BASES:
        given = fields.get(key)
        if given is not None and not isinstance(given, list) and given not in nested:
            raise ValueError(
                f"{key}: the configuration contradicts itself: {shown([given, *nested])}, with "
                f"{shown(sorted(rope))}"
            )


def _from_bases(fields: Fields, rope: Fields) -> Fields:
    """rope_parameters of files from before they were nested: a second base beside rope_theta."""
    given = Keys({key: fields.get(key) for key in ALL_BASES}, "")
    theta, local = given.same(*BASES), given.same(*LOCAL_BASES)
    compressed = given.take("compress_rope_theta")
    if local is not None:  # Gemma 3, ModernBERT: local layers are not scaled
        base = given.take("global_rope_theta", theta)
        return {
            "full_attention": {**rope, "rope_theta": base},
            "sliding_attention": {"rope_theta": local},
        }
    if compressed is not None:  # DeepSeek-V4, whose code has no attention factor
        factor = {"attention_factor": 1.0} if "yarn" in rope.values() else {}
        return {
            "compress": {**factor, **rope, "rope_theta": compressed},
            "main": {"rope_theta": theta},
        }
    plain = {"rope_theta": same("rope_theta", (rope.get("rope_theta"), theta))}
    scaled = {**rope, **plain}
    if "scaled" in catalogue.of(fields):
        return {"full_attention": scaled, "sliding_attention": plain}
    if scales_some(fields):
        return {"scaled": scaled, "unscaled": plain}
    return scaled


def _label(fields: Fields, kind: str | None, rope: Fields) -> str:
    """The key of a kind of layer in rope_parameters."""
    name = "None" if kind is None else kind
    if "compressed" not in catalogue.of(fields) or name in rope:
        return name
    return "main" if name == "sliding_attention" else "compress"


def of_kind(config: Keys, kind: str | None) -> Keys | None:
    """The rope_parameters of one kind of layer; None if such layers are not rotated."""
    config.ignore("rope_parameters", "rope_scaling", "rope_scaling_layers", *ALL_BASES)
    if "scaled" in catalogue.of(config.fields):
        same("yarn_only_types", (config.take("yarn_only_types"), ["full_attention"]))
    rope = of(config.fields)
    if is_nested(rope):
        every = Keys(rope, "rope_parameters")
        every.ignore(*SHARED, *(key for key, value in rope.items() if isinstance(value, dict)))
        every.done()
        own = rope.get(_label(config.fields, kind, rope))
        if own is None:
            return None
        rope = own
    name: Any = "default"
    if isinstance(rope, dict):
        name = rope.get("rope_type", rope.get("type", "default"))
    return Keys(rope, f"rope_parameters of type {shown(name)}")


def own_base(config: Keys) -> Any:
    """This layer's base in a list of all layers' bases; 0 if it does not rotate."""
    return config.take("layer_rope_theta")
