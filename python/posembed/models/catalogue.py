"""What is known of model types, as data, and what a published file omits.

catalogue.json is what scripts/catalogue.py finds by running the classes of transformers: pairing,
defaults, names. models.json, kept by hand, is what no run shows; each entry names its source.
"""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from posembed.models import layers, rope_parameters
from posembed.models.data import table, words
from posembed.models.fields import Fields, Keys, items_of, same, shown, text_of, whole, wholes
from posembed.models.layers import MOST_LAYERS
from posembed.models.widths import head_width

# The key that says how a converted checkpoint is rotated, which overrides the model type:
# "interleaved" or "half_split".
CONVERTED = "posembed_rotary_pairs"


def _patched(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396): null removes a key, objects are merged."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _patched(found.get(key), value)
    return found


@functools.cache
def types() -> dict[str, Fields]:
    """What is known of each model type, in the words of models.json."""
    generated = table("catalogue")
    found = {name: dict(own) for name, own in generated["types"].items()}
    for instead, names in generated["instead"].items():
        for name in names:
            found.setdefault(name, {})["instead"] = instead
    for name in generated["whole_heads"]:
        found[name]["whole_heads"] = True
    for name, own in table("models")["types"].items():
        found[name] = _patched(found.get(name), own)
    return found


def of(fields: Fields) -> Fields:
    """What is known of the model type of a configuration; nothing of an unknown one."""
    return of_type(text_of(fields.get("model_type")))


def of_type(model_type: str) -> Fields:
    """What is known of a model type."""
    return types().get(model_type, {})


# ---------------------------------------------------------------------------------- completed files


def _stated_keys(fields: Fields) -> set[str]:
    """The keys that a file states, at its top level or in rope_parameters."""
    stated = set()
    for key, value in fields.items():
        is_none = value is None or (key == "no_rope_layers" and value in ([], {}))
        if not is_none or key not in words("defaults_to_none"):
            stated.add(key)
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if not isinstance(rope, dict):
            continue
        nested = rope_parameters.is_nested(rope)
        if nested or rope.get("rope_theta") is not None:
            stated.update(rope_parameters.ALL_BASES)
        if nested or rope.get("partial_rotary_factor") is not None:
            stated.update(("partial_rotary_factor", "rotary_pct"))
        stated.update(rope)
    return stated


def _is_stated(stated: set[str], key: str) -> bool:
    others = table("words")["other_keys"].get(key, ())
    return key in stated or not stated.isdisjoint(others)


def _renamed(fields: Fields, names: dict[str, str]) -> Fields:
    """The class's own names of keys become the usual ones."""
    fields = dict(fields)
    for alias, name in names.items():
        given = fields.get(alias)
        if given is not None:
            fields[name] = same(name, (fields.get(name), given))
            del fields[alias]
    return fields


def completed(fields: Fields) -> Fields:
    """A part's configuration with the values that its class adds.

    A key from which the class alone derives what is missing is a ValueError.
    """
    own = of(fields)
    defaults = own.get("defaults")
    if not isinstance(defaults, dict):
        return fields
    fields = _renamed(fields, own.get("names", {}))
    for key, other in own.get("needs", {}).items():
        if key in fields and other not in fields:
            raise ValueError(
                f"{other}: missing in the configuration, which has {key}: the class of the model "
                "takes both"
            )
    if "kinds" in own:
        if not isinstance(fields.get("rope_theta"), list):  # each layer's base already
            _complete_kinds(fields, defaults["rope_parameters"], own)
    elif "rope_parameters" in defaults and (
        "passed_over" in own or not _is_stated(_stated_keys(fields), "rope_parameters")
    ):
        fields["rope_parameters"] = fields.get("rope_parameters") or defaults["rope_parameters"]
    stated = _stated_keys(fields)
    missing = {key: value for key, value in defaults.items() if not _is_stated(stated, key)}
    missing.pop("rope_parameters", None)
    for step in ("constant", "times", "cycle", "by"):  # as they follow from each other
        for key, value in missing.items():
            rules = ("times", "by", "cycle") if isinstance(value, dict) else ()
            if next((rule for rule in rules if rule in value), "constant") != step:
                continue
            if layers.has_lists(fields) and key in table("words")["layer_counts"]:
                continue  # the lists have their own length
            found = value if step == "constant" else _derived(fields, key, value)
            if found is not None:
                fields[key] = found
    return fields


def _derived(fields: Fields, key: str, rule: Fields) -> Any:
    """What follows from other keys: layers, or a head that is several times as wide."""
    if "times" not in rule:
        return _layers_of(fields, key, rule)
    others = {
        key: value
        for key, value in fields.items()
        if key not in ("attention_head_dim", "kv_channels")
    }
    return head_width(Keys(others, "the configuration")) * rule["times"]


# -------------------------------------------------------------------------- kinds of layers' blocks


def _refuse_flat(name: str, blocks: Fields, got: Any) -> None:
    """Raises ValueError for one rotation where there is one for each kind of layer."""
    raise ValueError(
        f"{name}: expected an entry for each of {shown(sorted(blocks))}, got {shown(got)}"
    )


def _write(blocks: Fields, value: Any, kinds: list[str]) -> None:
    """Writes a flat key into the blocks of the kinds that take it."""
    given = value if isinstance(value, dict) else {"rope_theta": value}
    for kind in kinds:
        blocks[kind] = {**(blocks.get(kind) or {}), **given}


def _complete_kinds(fields: Fields, blocks: Fields, own: Fields) -> None:
    """rope_parameters of a class with an entry for each kind of layer."""
    given, takers = fields.get("rope_parameters"), own["kinds"]
    if given and (not isinstance(given, dict) or rope_parameters.is_nested(given)):
        if isinstance(given, dict) and "filled" in own:
            filled = {kind: {**block, **(given.get(kind) or {})} for kind, block in blocks.items()}
            fields["rope_parameters"] = {**given, **filled}
        return
    found = copy.deepcopy(blocks)
    if fields.get("qk_rope_head_dim") or fields.get("partial_rotary_factor") is not None:
        for block in found.values():  # the file's own width
            if isinstance(block, dict):
                block.pop("partial_rotary_factor", None)
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if not value:
            continue
        if name not in takers or not isinstance(value, dict):
            _refuse_flat(name, blocks, value)
        if rope_parameters.is_nested(value):
            return
        is_yarn = value.get("rope_type", value.get("type")) == "yarn"
        added = own.get("with_yarn", {}) if is_yarn else {}
        _write(found, {**added, **value}, takers[name])
        if "older_type" in takers and "type" in value:
            _write(found, {"rope_type": value["type"]}, takers[name])
        del fields[name]
    for key in sorted(takers):
        value = fields.get(key)
        if value is not None and not isinstance(value, dict):
            _write(found, value, takers[key])
            del fields[key]
    fields["rope_parameters"] = found


def check_kinds(fields: Fields) -> None:
    """Raises ValueError for one rotation where the class has one for each kind of layer."""
    own = of(fields)
    rope = fields.get("rope_parameters")
    if "kinds" not in own or rope is None:
        return
    blocks = own["defaults"]["rope_parameters"]
    if isinstance(rope, dict) and not rope_parameters.is_nested(rope):
        _refuse_flat("rope_parameters", blocks, rope)
    used = items_of(fields.get("layer_types"))
    for kind, block in blocks.items():
        if isinstance(rope, dict) and isinstance(block, dict) and kind in used and kind not in rope:
            raise ValueError(
                f"rope_parameters: expected an entry for {shown(kind)}, got {shown(sorted(rope))}"
            )


# ---------------------------------------------------------------------------------- lists of layers


def _with_period(cycle: list[Any], key: str, period: Any) -> list[Any]:
    """The cycle of another period, in which the first or the last layer differs."""
    length = whole(key, period)
    if not 0 < length <= MOST_LAYERS:
        raise ValueError(f"{key}: expected a number of layers, got {shown(period)}")
    is_first = cycle[0] != cycle[1]
    found = [cycle[1 if is_first else 0]] * length
    found[0 if is_first else -1] = cycle[0 if is_first else -1]
    return found


def _usual_layers(rule: Fields, length: int) -> list[Any]:
    """The layers of a rule, without what other keys change."""
    cycle, found = rule["cycle"], rule.get("first", [])[:length]
    found = [*found, *(cycle[place % len(cycle)] for place in range(length - len(found)))]
    if rule.get("from_end"):
        found.reverse()
    if "last" in rule and length > 0:
        found[-1] = rule["last"]
    return found


def _following(fields: Fields, rule: Fields) -> list[Any] | None:
    """The layers that follow from another list of the file."""
    others = fields.get(rule["by"])
    if not isinstance(others, list):
        return None
    names = [other if isinstance(other, str) else json.dumps(other) for other in others]
    values = rule["values"]
    return [values[name] for name in names] if all(name in values for name in names) else None


def _change(found: list[Any], fields: Fields, rule: Fields) -> None:
    """Sets layers from a key that has an entry for each, names some, or counts the first."""
    for key, values in rule.get("each", {}).items():
        numbers = fields.get(key)
        for place, number in enumerate(numbers[: len(found)] if isinstance(numbers, list) else ()):
            name = json.dumps(number)
            if name not in values:
                known = shown(sorted(values))
                raise ValueError(
                    f"{key}: expected one of {known} for each layer, got {shown(numbers, 60)}"
                )
            found[place] = values[name]
    for key, (inside, outside) in rule.get("listed", {}).items():
        places = fields.get(key)
        if isinstance(places, list):
            found[:] = [inside if place in places else outside for place in range(len(found))]
    for key, lists in rule.get("counted", {}).items():  # from 1, in a block
        block = fields.get(key)
        given = block if isinstance(block, dict) else {}
        for name, kind in lists.items():
            for place in wholes(name, given.get(name, [])):
                if not 1 <= place <= len(found):
                    raise ValueError(f"{name}: expected 1 to {len(found)}, got {place}")
                found[place - 1] = kind
    for key, value in rule.get("leading", {}).items():
        count = fields.get(key)
        if count is not None:
            most = max(min(whole(key, count), len(found)), 0)
            found[:most] = [value] * most


def _layers_of(fields: Fields, key: str, rule: Any) -> list[Any] | None:
    """The list of a rule for a file; None if only the class knows."""
    if "by" in rule:
        return _following(fields, rule)
    length = layers.count_of_layers(fields)
    if length is None:
        return None
    unless = rule.get("unless", {})
    is_known = length >= rule.get("least", 0) and all(
        fields.get(other) is None or fields[other] == value for other, value in unless.items()
    )
    is_uniform = len(rule["cycle"]) == 1 and "first" not in rule and "last" not in rule
    if not is_known and is_uniform:
        return None
    if not is_known:
        raise ValueError(
            f"{key}: missing in the configuration, and its class derives it from "
            f"{shown(sorted(unless))}: add the key"
        )
    for name in rule.get("period", []):
        period = fields.get(name)
        if period is not None:
            rule = {**rule, "cycle": _with_period(rule["cycle"], name, period)}
    found = _usual_layers(rule, length)
    _change(found, fields, rule)
    return found


# -------------------------------------------------------------------------------------------- parts


def known(fields: Fields) -> frozenset[str]:
    """The keys about positions that the class knows, and that do not change the rotation."""
    return frozenset(of(fields).get("known", ()))


def _unstated(part: Fields, nested: Fields) -> Fields:
    """What a class passes to a part, without what the file's part states."""
    rope = part.get("rope_parameters", {})
    stated = _stated_keys(nested)
    found = {**part, **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}
    found.pop("rope_parameters", None)
    return {key: value for key, value in found.items() if not _is_stated(stated, key)}


def with_parts(fields: Fields) -> Fields:
    """A configuration with its nested ones, as its class makes them where the file has none."""
    fields = dict(fields)
    flat = {
        key: value
        for key, value in fields.items()
        if key != "model_type" and (not isinstance(value, dict) or key.startswith("rope_"))
    }
    sizes = ("hidden_size", "num_attention_heads")
    own = of(fields)
    own_parts = own.get("own_parts", ())  # whatever type a file states
    for name, part in own.get("parts", {}).items():
        nested = fields.get(name)
        if (
            nested is None
            and name == "text_config"
            and ("text" in own or all(flat.get(key) is not None for key in sizes))
        ):
            nested = flat  # the keys of a text model beside other parts, as in older files
        if nested is None:
            nested = part
        elif name in own.get("merged", ()) and isinstance(nested, dict):
            nested = {**_unstated(part, nested), **nested}
        if isinstance(nested, dict) and (name in own_parts or not nested.get("model_type")):
            nested = {**nested, "model_type": part["model_type"]}
        fields[name] = nested
    return fields
