"""Models made of several: the configuration of one part among those nested in a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posembed.configuration import completion, conventions
from posembed.configuration.keys import Fields

# Where the text model's configuration is, in whatever part has it.
TEXT = ("text_config", "thinker_config", "llm_config", "language_config", "vlm_config")


def as_fields(config: Any, name: str) -> Fields:
    """A dict, or that of a configuration object."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, type) or not hasattr(config, "to_dict"):
        found = type(config).__name__
        raise TypeError(
            f"{name}: expected a dict, a PretrainedConfig or the path of a config.json, got {found}"
        )
    return dict(config.to_dict())


def normalised(fields: Fields) -> Fields:
    """The file with keys where its configuration class looks for them."""
    attention = fields.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("rope_theta") is not None:  # DBRX
        return {**fields, "rope_theta": attention["rope_theta"]}
    return fields


def path_of(fields: Fields, part: str | None) -> list[str]:
    """The names on the way to a part, or to the text model."""
    if part is None:
        return path_of_text(fields)
    path = part.split(".")
    for name in path:
        known = sorted(key for key in fields if key.endswith("_config") and fields[key])
        if name not in known:
            which = f"one of {known}" if known else "none for a configuration without parts"
            raise ValueError(f"part: expected {which}, got {name!r}")
        fields = as_fields(fields[name], name)
    return path


def path_of_text(fields: Fields) -> list[str]:
    """The names on the way to the text model: none where the whole is one."""
    name = next((key for key in TEXT if fields.get(key)), None)
    if name is None:
        return []
    return [name, *path_of_text(as_fields(fields[name], name))]


def of_object(whole: Any, part: str | None) -> tuple[Fields, frozenset[str]]:
    """A part of a configuration object, and the keys that its class knows."""
    fields = as_fields(whole, "config")
    path = path_of(fields, part)
    if path and path == path_of_text(fields) and conventions.CONVERTED in fields:
        beside = {conventions.CONVERTED: fields[conventions.CONVERTED]}
    else:
        beside = {}
    for name in path:
        nested = getattr(whole, name, None)
        fields = as_fields(fields[name], name)
        whole = nested if hasattr(nested, "to_dict") else whole
    for key in ("layer_types", "layers_block_type"):  # a property of some classes
        kinds = getattr(whole, key, None)
        if isinstance(kinds, (list, tuple)):
            fields.setdefault(key, list(kinds))
    own: type = type(whole)
    return {**beside, **fields}, completion.known_keys(own)


def select_part(fields: Fields, part: str | None) -> Any:
    """The part of a configuration, itself and no copy."""
    chosen: Any = fields
    for name in path_of(fields, part):
        chosen = chosen[name]
    return chosen


def typed(fields: Fields, part: str | None) -> Fields:
    """A part, with the model_type that files of an older layout leave to the whole's."""
    chosen = as_fields(select_part(normalised(fields), part), part or "text_config")
    whole = fields.get("model_type")
    if whole not in conventions.FLAT_TEXT or chosen.get("model_type") not in (None, "", whole):
        return chosen
    if part in (None, "text_config"):
        return {**chosen, "model_type": conventions.FLAT_TEXT[whole]}
    return {**chosen, "model_type": f"{whole}_{str(part).removesuffix('_config')}"}
