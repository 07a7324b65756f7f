"""Reads a Hugging Face configuration of transformers 4 or 5, flat or nested by kind of layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from posembed.glue.validation import one_of
from posembed.models import axes, catalogue, rope_parameters, scalings
from posembed.models.data import table, words
from posembed.models.fields import (
    IN_FULL,
    Fields,
    Keys,
    NoRuleError,
    base_number,
    real,
    reals,
    same,
    share_of,
    shown,
    whole,
)
from posembed.models.layers import Layer, check_type, every_layer, kinds_of_layers
from posembed.models.options import Options
from posembed.models.parts import layer_part
from posembed.models.unknown_keys import check_understood, repeated
from posembed.models.widths import Widths, check_rotated, head_width, latent_width, widths_of
from posembed.specifications import RotarySpec

Specs = list[RotarySpec | None]
WITHOUT_EFFECT: dict[str, str] = {}


# -------------------------------------------------------------------------- whether a layer rotates


def _rotates(config: Keys, rules: Fields, kind: str | None) -> bool:
    """Whether a layer rotates at all."""
    switch = rules.get("switch")
    if switch is not None and config.take(switch["key"], switch["otherwise"]) != switch["rotating"]:
        return False
    if not config.take("use_rotary_embedding", True):
        return False
    never = kind == "cross_attention" or kind in words("without_attention")
    if never and "head" not in rules:
        return False
    if config.take("use_rope_layers", True) == 0 or config.take("no_rope_layers") == 0:
        return False  # 1: rotated
    if rope_parameters.own_base(config) == 0:
        return False
    if "rotates" not in rules or kind == "sliding_attention":
        return True
    if rules["rotates"] == "sliding_attention_if_windowed":
        return not config.take("sliding_window")
    dense = config.take("mlp_layer_types") == "dense"  # Cohere's first layers
    return bool(dense and config.take("prefix_dense_sliding_window_pattern") == 1)


# ------------------------------------------------------------------------------- numbers of a layer


def _base_of(config: Keys, rope: Keys, rules: Fields, stated: float | None) -> float:
    """rope_theta, or the base in the model's code."""
    theta, own = rope.take("rope_theta"), rope_parameters.own_base(config)
    key = rules.get("ratio")
    if key and real(key, config.take(key, 1.0)) != 1.0:
        if stated is None:
            raise ValueError(
                f"{key}: some of these models multiply the base by it, others divide positions: "
                "pass base=, the product, for the former"
            )
        return base_number("base", stated)
    given = theta if own is None else own
    base = same("rope_theta", (rules.get("base") if given is None else given, stated))
    if base is not None:
        return base_number("rope_theta", base)
    parts = [
        key
        for key, value in config.fields.items()
        if key.endswith("_config") and "model_type" in value
    ]
    hint = f": pass part= of {shown(parts)}" if parts else ""
    raise ValueError(f"rope_theta: missing in the configuration{hint}")


def _is_interleaved(config: Keys, rules: Fields, stated: bool | None) -> bool:
    """Which components form a pair: as a converted file says, or as known for the model type."""
    pairing, key = rules.get("pairing"), "rope_interleave"
    converted = None if "head" in rules else config.take(catalogue.CONVERTED)
    if converted is not None:
        one_of(catalogue.CONVERTED, converted, "interleaved", "half_split")
    if converted is not None or "head" in rules:  # of a part of a layer, keys do not speak
        config.ignore(catalogue.CONVERTED, key)
        return bool(same("interleaved", (stated, (converted or pairing) == "interleaved")))
    given = config.take(key)
    known: Any = pairing == "interleaved"
    if pairing == key:  # without the key, such models are interleaved
        if given is None and stated is None and config.has(key):
            config.need(key)
        known = bool(given) if given is not None else stated in (None, True)
    return bool(same("interleaved", (stated, known, given)))


def _with_learned_scale(spec: RotarySpec, config: Keys, tensor: str) -> RotarySpec:
    """LeRoPE: frequencies times the exponential of a tensor that only the checkpoint has."""
    alpha = config.take(tensor)
    if alpha is None:
        raise ValueError(
            f"{tensor}: missing: frequencies are learned; pass the checkpoint's values among the "
            f"configuration's keys, {{**config.to_dict(), '{tensor}': [...]}}"
        )
    try:
        divisors = [math.exp(-value) for value in reals(tensor, alpha)]
    except OverflowError:
        raise ValueError(f"{tensor}: expected numbers above -700") from None
    length = getattr(spec.scaling, "original_max_positions", None)
    if length is None:
        length = whole(scalings.LENGTH, config.need(scalings.LENGTH))
    return scalings.divided(spec, divisors, length)


def _set_series(spec: Fields, base: float, widths: Widths) -> None:
    """Sets base and widths. If the width is odd, exponents use the odd width."""
    head_dim, rotary_dim = widths
    odd = rotary_dim % 2 != 0 and rotary_dim < head_dim
    if odd and spec["scaling"] is not None:
        raise ValueError(f"partial_rotary_factor: expected an even width, got {rotary_dim}")
    check_rotated(rotary_dim)  # before axes take memory for each pair
    spec["head_dim"] = head_dim
    spec["rotary_dim"] = rotary_dim + odd
    try:
        spec["base"] = math.pow(base, (rotary_dim + 1) / rotary_dim) if odd else base
    except OverflowError:
        raise ValueError(f"rope_theta: too large for {rotary_dim} components, got {base}") from None


def _widths_of_part(config: Keys, rope: Keys, rules: Fields) -> Widths:
    """The widths of a part of a layer: that of its head is a key of its own."""
    # The first that the configuration has.
    key = next((name for name in rules["head"] if config.has(name)), rules["head"][-1])
    head_dim = whole(key, config.need(key))
    if "partial" not in rules:
        return Widths(head_dim, widths_of(config, rope, rules).rotary_dim)
    key = "partial_rotary_factor"
    part = same(key, (rope.take(key), config.take(key)))
    config.ignore("qk_rope_head_dim", "qk_nope_head_dim")
    return Widths(head_dim, share_of(head_dim, 1.0 if part is None else real(key, part)))


def _rotation(
    config: Keys, rope: Keys, rules: Fields, options: Options, axis: str | None
) -> RotarySpec:
    """The specification from a model's keys and the rope_parameters of one kind of layer."""
    base = _base_of(config, rope, rules, options.base)
    spec: Fields = {"scaling": scalings.read(rope, config)}
    of_widths = _widths_of_part if "head" in rules else widths_of
    _set_series(spec, base, of_widths(config, rope, rules))
    spec["interleaved"] = _is_interleaved(config, rules, options.interleaved)
    spec["reverse"] = "reversed" in rules
    head_dim, rotary_dim = spec["head_dim"], spec["rotary_dim"]
    grid = rules.get("grid")
    if grid is not None:
        axes.set_axes_of_tower(spec, config, grid, axis)
    else:
        spec["sections"] = axes.sections_of_text(rope, rules.get("axes"), rotary_dim // 2)
    if "trailing" in rules:
        spec["rotary_start"] = head_dim - rotary_dim
    found = RotarySpec(**spec)
    tensor = rules.get("learned_scale")
    return found if tensor is None else _with_learned_scale(found, config, tensor)


# -------------------------------------------------------------------------------- parts of a layer


def _rules_of_part(layer: Layer, part: str | None) -> Fields | None:
    """The rules of the part of a layer that is asked for; None if the layer has none.

    The attention, unless a part has the name of the layer's kind.
    """
    rules = catalogue.of(layer.fields)
    parts, name = rules.get("layer_parts", {}), layer_part(part) or "attention"
    if name == "attention":
        name = str(layer.kind) if layer.kind in parts else name
    elif name not in parts:
        known = shown(["attention", *sorted(parts)])
        raise ValueError(f"part: expected one of {known}, got {shown(name)}")
    if name == "attention":
        return rules
    own = parts[name]
    if layer.kind not in own.get("kinds", [layer.kind]):
        return None
    if own.get("if_stated", "model_type") not in layer.fields:
        return None
    return {**{word: value for word, value in rules.items() if word != "trailing"}, **own}


def _check_all_understood(
    config: Keys, rope: Keys, spec: RotarySpec, ignore: Iterable[str]
) -> None:
    """Rejects keys that may concern positions, unless they are known not to."""
    config.ignore("global_head_dim", "max_position_embeddings", "per_layer_config")
    config.ignore(*table("words")["by_layer"], *table("words")["layer_counts"])
    if config.has("no_rope_layers"):
        config.ignore("no_rope_layer_interval")
    blocks = rope_parameters.of(config.fields).values()
    bases = [block.get("rope_theta") for block in blocks if isinstance(block, dict)]
    read = repeated(spec, [*bases, rope.take("rope_theta")], scalings.rope_type(rope))
    check_understood(config, {*ignore, *catalogue.known(config.fields)}, read)


def _of_layer(layer: Layer, options: Options, axis: str | None = None) -> RotarySpec | None:
    """The specification of one layer; None if it does not rotate."""
    config = Keys(layer.fields, "the configuration")
    rules = _rules_of_part(layer, options.part)
    if rules is None or not _rotates(config, rules, layer.kind):
        return None
    rope = rope_parameters.of_kind(config, layer.kind)
    if rope is None:
        return None
    spec = _rotation(config, rope, rules, options, axis)
    _check_all_understood(config, rope, spec, options.ignore)
    rope.done()
    return spec


# --------------------------------------------------------------------------------------- all layers


def _of_layers(found: list[Layer], options: Options) -> Specs:
    """The specification of each layer; layers with the same keys are read once."""
    read: list[tuple[Layer, RotarySpec | None]] = []
    for layer in found:
        if not any(other == layer for other, _ in read):
            read.append((layer, _of_layer(layer, options)))
    return [next(spec for other, spec in read if other == layer) for layer in found]


def _chosen_layers(found: list[Layer], options: Options) -> list[Layer]:
    """The layers of one kind, and of one base if each layer has its own."""
    if options.layer_type is not None:
        check_type([layer.kind for layer in found if layer.kind is not None], options.layer_type)
        found = [layer for layer in found if layer.kind == options.layer_type]
    if options.base is None:
        return found
    with_base = [layer for layer in found if layer.fields.get("layer_rope_theta") == options.base]
    return with_base or found


def _refuse_differing(found: list[Layer], asked: str | None) -> None:
    """Raises an error that says why these layers have no common specification."""
    kinds = sorted({layer.kind for layer in found if layer.kind is not None})
    bases = {layer.fields.get("layer_rope_theta") or None for layer in found} - {None}
    why = "layer_type: layers of one kind differ: use RotarySpec.for_layers"
    if asked is None and len(kinds) > 1:
        why = f"layer_type: expected one of {shown(kinds)}, got None"
    elif len(bases) > 1:
        why = f"layer_rope_theta: layers differ: pass base= of {shown(sorted(bases))}"
    raise ValueError(why)


def check_supported(fields: Fields) -> None:
    """Raises ValueError for a model type without a specification."""
    why = catalogue.of(fields).get("refused")
    if why is not None:
        raise ValueError(f"model_type {shown(fields.get('model_type'))}: {why}")


def _rules_of(fields: Fields, part: str | None) -> Fields:
    """The entry of a model type that rotates."""
    if not fields.get("model_type"):
        raise ValueError(
            f"model_type: missing in {part or 'the configuration'}: without it, nothing says how "
            "components are paired; describe its rotation in full with RotarySpec"
        )
    check_supported(fields)
    rules = catalogue.of(fields)
    name = f"model_type {shown(fields.get('model_type'))}"
    if "instead" in rules:
        key, kind = "position_embedding_type", fields.get("position_embedding_type")
        if kind in table("words")["said"][key]:
            raise ValueError(
                f"{key}: got {shown(kind)}, but the class of {name} has {rules['instead']}: "
                "describe the rotation of the model's own code in full with RotarySpec"
            )
        raise ValueError(f"{name} does not rotate: it has {rules['instead']}")
    if "parts" in rules and rules.keys().isdisjoint(("pairing", "unrotated")):
        raise ValueError(f"{name} is made of parts: pass part= of {shown(sorted(rules['parts']))}")
    if "pairing" not in rules and "unrotated" not in rules:
        raise NoRuleError(f"{name} is not known: {IN_FULL}")
    return rules


def read(fields: Fields, options: Options) -> RotarySpec:
    """See :meth:`posembed.RotarySpec.from_huggingface`, for the configuration of a part."""
    rules, config = _rules_of(fields, options.part), Keys(fields, "the configuration")
    found: list[Layer] = []
    if "unrotated" in rules:
        return RotarySpec(latent_width(config), rotary_dim=0)
    if rules.get("grid") == "window_of_axis":
        specs = [_of_layer(Layer(None, fields), options, options.layer_type)]
    else:
        found = _chosen_layers(kinds_of_layers(fields), options)
        specs = _of_layers(found, options)
    rotating = list(dict.fromkeys(spec for spec in specs if spec is not None))
    if len(rotating) > 1:
        _refuse_differing(found, options.layer_type)
    if rotating:
        return rotating[0]
    if found and options.layer_type is not None:
        raise ValueError(f"layer_type: layers of kind {shown(options.layer_type)} do not rotate")
    return RotarySpec(head_width(config), rotary_dim=0)


def read_layers(fields: Fields, options: Options) -> Specs:
    """See :meth:`posembed.RotarySpec.for_layers`."""
    rules, every = _rules_of(fields, options.part), every_layer(fields)
    return [None] * len(every) if "unrotated" in rules else _of_layers(every, options)


def kind_of(fields: Fields, place: int) -> str | None:
    """The kind of a layer, if the configuration lists kinds."""
    for key in ("layer_types", "layers_block_type"):
        kinds = fields.get(key)
        if isinstance(kinds, list) and place < len(kinds):
            return kinds[place] if isinstance(kinds[place], str) else ""
    return None
