"""Reads a Hugging Face configuration of transformers 4 or 5, flat or nested by kind of layer."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from posembed.models import axes, catalogue, rope_parameters, scalings
from posembed.models.data import table, words
from posembed.models.fields import (
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
from posembed.specification import RotarySpec

Specs = list[RotarySpec | None]


class Stated(NamedTuple):
    """The caller's options, and the keys that need not be understood."""

    options: Options
    accounted: Collection[str]


def _without_rotation(head_dim: int) -> RotarySpec:
    return RotarySpec(head_dim, rotary_dim=0)


# -------------------------------------------------------------------------- whether a layer rotates


def _rotates_beside_window(config: Keys, rules: Fields) -> bool:
    """Whether layers without a sliding window rotate."""
    if rules["rotates"] == "sliding_attention_if_windowed":
        return not config.take("sliding_window")
    dense = config.take("mlp_layer_types") == "dense"  # Cohere's first layers
    return bool(dense and config.take("prefix_dense_sliding_window_pattern") == 1)


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
    return _rotates_beside_window(config, rules)


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


def _interleaved_by_key(config: Keys, stated: bool | None) -> bool:
    """rope_interleave, or the caller's option; without either, such models are interleaved."""
    key = "rope_interleave"
    may_lack = stated is not None or not config.has(key)
    given = config.take(key) if may_lack else config.need(key)
    if given is None:
        return True if stated is None else stated
    return bool(given)


def _is_interleaved(config: Keys, rules: Fields, stated: bool | None) -> bool:
    """Which components form a pair: as a converted file says, or as known for the model type."""
    pairing = rules.get("pairing")
    if "head" in rules:  # a part of a layer, of which the file's keys do not speak
        config.ignore(catalogue.CONVERTED, "rope_interleave")
        return bool(same("interleaved", (stated, pairing == "interleaved")))
    converted = config.take(catalogue.CONVERTED)
    if converted is not None:
        config.ignore("rope_interleave")  # the pairing before conversion
        if converted not in ("interleaved", "half_split"):
            raise ValueError(
                f"{catalogue.CONVERTED}: expected 'interleaved' or 'half_split', got "
                f"{shown(converted)}"
            )
        return bool(same("interleaved", (stated, converted == "interleaved")))
    known = pairing == "interleaved"
    if pairing == "rope_interleave":
        known = _interleaved_by_key(config, stated)
    return bool(same("interleaved", (stated, known, config.take("rope_interleave"))))


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
    length = scalings.original_length_of(spec.scaling)
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
        return Widths(head_dim, _widths_of(config, rope, rules).rotary_dim)
    key = "partial_rotary_factor"
    part = same(key, (rope.take(key), config.take(key)))
    config.ignore("qk_rope_head_dim", "qk_nope_head_dim")
    return Widths(head_dim, share_of(head_dim, 1.0 if part is None else real(key, part)))


def _widths_of(config: Keys, rope: Keys, rules: Fields) -> Widths:
    return widths_of(config, rope, rules, scalings.rope_type(rope))


def _rotation(
    config: Keys, rope: Keys, rules: Fields, stated: Stated, axis: str | None
) -> RotarySpec:
    """The specification from a model's keys and the rope_parameters of one kind of layer."""
    options = stated.options
    base = _base_of(config, rope, rules, options.base)
    spec: Fields = {"scaling": scalings.read(rope, config)}
    is_part = "head" in rules
    widths = _widths_of_part(config, rope, rules) if is_part else _widths_of(config, rope, rules)
    _set_series(spec, base, widths)
    spec["interleaved"] = _is_interleaved(config, rules, options.interleaved)
    spec["reverse"] = "reversed" in rules
    head_dim, rotary_dim = spec["head_dim"], spec["rotary_dim"]
    grid = rules.get("grid")
    if grid == "window_of_axis":
        axes.set_window_of_axis(spec, axis)
    elif grid is not None:
        axes.set_axes_of_tower(spec, config, grid)
    else:
        spec["sections"] = axes.sections_of_text(rope, rules.get("axes"), rotary_dim // 2)
    if "trailing" in rules:
        spec["rotary_start"] = head_dim - rotary_dim
    found = RotarySpec(**spec)
    tensor = rules.get("learned_scale")
    return found if tensor is None else _with_learned_scale(found, config, tensor)


# -------------------------------------------------------------------------------- parts of a layer


def _part_of(layer: Layer, parts: Fields, stated: Stated) -> str:
    """The part of a layer that is asked for.

    The attention, unless a part has the name of the layer's kind.
    """
    asked = layer_part(stated.options.part) or "attention"
    if asked == "attention":
        return layer.kind if layer.kind in parts else asked
    if asked not in parts:
        known = shown(["attention", *sorted(parts)])
        raise ValueError(f"part: expected one of {known}, got {shown(asked)}")
    return asked


def _rules_of_part(layer: Layer, stated: Stated) -> Fields | None:
    """The rules of that part; None if the layer has none."""
    rules = catalogue.of(layer.fields)
    parts = rules.get("layer_parts", {})
    name = _part_of(layer, parts, stated)
    if name == "attention":
        return rules
    own = parts[name]
    kinds, key = own.get("kinds"), own.get("if_stated")
    if kinds is not None and layer.kind not in kinds:
        return None
    if key is not None and key not in layer.fields:
        return None
    others = {word: value for word, value in rules.items() if word != "trailing"}
    return {**others, **own}


def _check_all_understood(config: Keys, rope: Keys, spec: RotarySpec, stated: Stated) -> None:
    """Rejects keys that may concern positions, unless they are known not to."""
    config.ignore("global_head_dim", "max_position_embeddings", "per_layer_config")
    config.ignore(*table("words")["by_layer"], *table("words")["layer_counts"])
    if config.has("no_rope_layers"):
        config.ignore("no_rope_layer_interval")
    known = {*stated.accounted, *stated.options.ignore}
    blocks = rope_parameters.of(config.fields).values()
    bases = [block.get("rope_theta") for block in blocks if isinstance(block, dict)]
    read = repeated(spec, [*bases, rope.take("rope_theta")], scalings.rope_type(rope))
    check_understood(config, known, read)


def _of_layer(layer: Layer, stated: Stated, axis: str | None = None) -> RotarySpec | None:
    """The specification of one layer; None if it does not rotate."""
    config = Keys(layer.fields, "the configuration")
    rules = _rules_of_part(layer, stated)
    if rules is None or not _rotates(config, rules, layer.kind):
        return None
    rope = rope_parameters.of_kind(config, layer.kind)
    if rope is None:
        return None
    spec = _rotation(config, rope, rules, stated, axis)
    _check_all_understood(config, rope, spec, stated)
    rope.done()
    return spec


# --------------------------------------------------------------------------------------- all layers


def _of_layers(found: list[Layer], stated: Stated) -> Specs:
    """The specification of each layer; layers with the same keys are read once."""
    read: list[tuple[Layer, RotarySpec | None]] = []
    specs: Specs = []
    for layer in found:
        spec = next((spec for other, spec in read if other == layer), False)
        if spec is False:
            spec = _of_layer(layer, stated)
            read.append((layer, spec))
        specs.append(spec)  # type: ignore[arg-type]
    return specs


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
    if asked is None and len(kinds) > 1:
        raise ValueError(f"layer_type: expected one of {shown(kinds)}, got None")
    if len(bases) > 1:
        raise ValueError(f"layer_rope_theta: layers differ: pass base= of {shown(sorted(bases))}")
    raise ValueError("layer_type: layers of one kind differ: use RotarySpec.for_layers")


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
        raise NoRuleError(
            f"{name} is not known: describe its rotation in full with RotarySpec, from the model's "
            "code: head_dim, base, rotary_dim, pairing (interleaved), scaling and sections, one "
            "for each kind of layer, and which layers rotate"
        )
    return rules


def read(fields: Fields, options: Options, accounted: Collection[str]) -> RotarySpec:
    """See :meth:`posembed.RotarySpec.from_huggingface`, for the configuration of a part.

    Keys that are ``accounted`` for need not be understood here.
    """
    rules = _rules_of(fields, options.part)
    stated = Stated(options, accounted)
    config = Keys(fields, "the configuration")
    if "unrotated" in rules:
        return _without_rotation(latent_width(config))
    if rules.get("grid") == "window_of_axis":
        spec = _of_layer(Layer(None, fields), stated, options.layer_type)
        return spec or _without_rotation(head_width(config))
    found = _chosen_layers(kinds_of_layers(fields), options)
    rotating = list(dict.fromkeys(spec for spec in _of_layers(found, stated) if spec is not None))
    if len(rotating) > 1:
        _refuse_differing(found, options.layer_type)
    if rotating:
        return rotating[0]
    if options.layer_type is not None:
        raise ValueError(f"layer_type: layers of kind {shown(options.layer_type)} do not rotate")
    return _without_rotation(head_width(config))


def read_layers(fields: Fields, options: Options, accounted: Collection[str]) -> Specs:
    """See :meth:`posembed.RotarySpec.for_layers`."""
    rules = _rules_of(fields, options.part)
    every = every_layer(fields)
    if "unrotated" in rules:
        return [None] * len(every)
    return _of_layers(every, Stated(options, accounted))


def kind_of(fields: Fields, place: int) -> str | None:
    """The kind of a layer, if the configuration lists kinds."""
    for key in ("layer_types", "layers_block_type"):
        kinds = fields.get(key)
        if isinstance(kinds, list) and place < len(kinds):
            return kinds[place] if isinstance(kinds[place], str) else ""
    return None
