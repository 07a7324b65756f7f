"""Layers with different rotations: their bases and widths, and layers without rotation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from posembed.models import rope_parameters
from posembed.models.data import table
from posembed.models.fields import Fields, check_mapping, shown, whole

# Far more layers than any model has; each sees a view of the configuration.
MOST_LAYERS = 1024
MOST_BYTES = 1 << 28

Kind = str | None


class Layer(NamedTuple):
    """A layer, or all layers of a kind if the configuration does not list layers."""

    kind: Kind
    fields: Fields  # the configuration as this layer sees it


def check_copies(fields: Fields, count: int) -> None:
    """Raises ValueError if each of ``count`` layers cannot have a view of the configuration."""
    if count > MOST_LAYERS:
        raise ValueError(f"config: expected at most {MOST_LAYERS} layers, got {count}")
    size = len(json.dumps(fields, separators=(",", ":")))
    if count * size > MOST_BYTES:
        raise ValueError(
            f"config: expected at most {MOST_BYTES} bytes in the views of all layers, got {count} "
            f"of {size}"
        )


def check_type(kinds: Iterable[str], layer_type: str) -> None:
    """Rejects a kind of layer that the configuration does not have."""
    known = sorted(set(kinds))
    if not known:
        raise ValueError(
            f"layer_type: expected none: there is one kind of layer, got {shown(layer_type)}"
        )
    if layer_type not in known:
        raise ValueError(f"layer_type: expected one of {shown(known)}, got {shown(layer_type)}")


# ---------------------------------------------------------------------------------- views of layers


def has_lists(fields: Fields) -> bool:
    """Whether a key lists a value for each layer."""
    return any(isinstance(fields.get(key), list) for key in table("words")["by_layer"])


def count_of_layers(fields: Fields) -> int | None:
    """The number of layers, if the configuration has it."""
    for key in table("words")["layer_counts"]:
        value = fields.get(key)
        if value:
            return whole(key, value, 0)
    return None


def _own_fields(fields: Fields, place: int) -> Fields:
    """The entry of per_layer_config for one layer."""
    key, own = "per_layer_config", {}
    check_mapping(fields.get(key) or {}, key)
    for number, entry in (fields.get(key) or {}).items():
        if not number.isascii() or not number.isdigit():
            raise ValueError(f"{key}: expected numbers of layers, got {shown(number)}")
        if int(number) == place:
            check_mapping(entry, key)
            own = entry
    return own


def _wider(fields: Fields, kind: Kind) -> Fields:
    """The configuration, with the width of full-attention layers if they have their own."""
    if kind == "full_attention" and fields.get("global_head_dim"):
        return {**fields, "head_dim": fields["global_head_dim"]}
    return fields


def seen_by(fields: Fields, place: int) -> Fields:
    """The configuration as one layer sees it."""
    kinds = fields.get("layer_types")
    listed = kinds[place : place + 1] if isinstance(kinds, list) else []
    found = _wider(fields, _kind_of(listed[0]) if listed else None)
    found = {**found, **_own_fields(fields, place)}
    for key, single in table("words")["by_layer"].items():
        values = found.get(key)
        if isinstance(values, list) and values:
            del found[key]
            found[single] = values[place] if place < len(values) else None
    return found


def every_list_place(fields: Fields) -> list[Fields]:
    """The configuration as seen by each layer that has its own value in a list."""
    lists = [fields.get(key) for key in table("words")["by_layer"]]
    length = max((len(values) for values in lists if isinstance(values, list)), default=0)
    check_copies(fields, length)
    return [seen_by(fields, place) for place in range(max(length, 1))]


# ---------------------------------------------------------------------------------- kinds of layers


def _kind_of(value: Any) -> Kind:
    return value if value is None or isinstance(value, str) else shown(value)


def _two_kinds(listed: Any, length: int, inside: str, outside: str) -> list[Kind]:
    """One kind for the layers that a list names, another for the others."""
    places = listed if isinstance(listed, list) else []
    return [inside if place in places else outside for place in range(length)]


def _listed_kinds(fields: Fields, length: int | None) -> list[Kind]:
    """The kind of each layer if the configuration lists them; otherwise empty."""
    crossing = fields.get("cross_attention_layers")
    if rope_parameters.scales_some(fields):
        return _two_kinds(fields["rope_scaling_layers"], length or 0, "scaled", "unscaled")
    for key in ("layer_types", "layers_block_type", "hybrid_layer_types"):
        kinds = fields.get(key)
        if kinds:
            if not isinstance(kinds, list):
                raise ValueError(f"{key}: expected a list, got {shown(kinds, 60)}")
            return [_kind_of(kind) for kind in kinds[:length]]
    if crossing and length is not None:  # Llama 3.2 Vision: those see images
        return _two_kinds(crossing, length, "cross_attention", "full_attention")
    return []


def _nested_kinds(fields: Fields) -> list[str]:
    """The kinds of layers with rope_parameters of their own."""
    rope = rope_parameters.of(fields)
    return [kind for kind, block in rope.items() if isinstance(block, dict)]


def every_layer(fields: Fields) -> list[Layer]:
    """The layers in order; a ValueError if the configuration does not list them."""
    length = count_of_layers(fields)
    if length is None and has_lists(fields):
        length = len(every_list_place(fields))
    if length is None:
        known = shown(sorted(fields))
        raise ValueError(f"num_hidden_layers: missing in the configuration: it has {known}")
    kinds = _listed_kinds(fields, length)
    if not kinds and _nested_kinds(seen_by(fields, 0)):
        raise ValueError("layer_types: missing in the configuration, whose layers differ")
    kinds = kinds or [None] * length
    check_copies(fields, len(kinds))
    return [Layer(kind, seen_by(fields, place)) for place, kind in enumerate(kinds)]


def kinds_of_layers(fields: Fields) -> list[Layer]:
    """The layers, or one of each kind if only the kinds are known."""
    length = count_of_layers(fields)
    kinds = _listed_kinds(fields, length)
    check_copies(fields, len(kinds))
    if kinds:
        return [Layer(kind, seen_by(fields, place)) for place, kind in enumerate(kinds)]
    if has_lists(fields):
        return [Layer(None, own) for own in every_list_place(fields)[:length]]
    nested = [Layer(kind, _wider(fields, kind)) for kind in _nested_kinds(fields)]
    return nested or [Layer(None, fields)]
