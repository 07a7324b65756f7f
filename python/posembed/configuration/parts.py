"""Composite models: selects the configuration of one part among nested ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posembed.configuration import readers
from posembed.configuration.readers import CONVERTED, Fields


def as_fields(config: Any, name: str) -> Fields:
    """The dict itself, or the dict of a configuration object."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, type) or not hasattr(config, "to_dict"):
        found = type(config).__name__
        raise TypeError(
            f"{name}: expected a dict, a PretrainedConfig or the path of a config.json, got {found}"
        )
    return dict(config.to_dict())


def select_part(fields: Fields, part: str | None) -> Any:
    """The part of a configuration, not copied."""
    chosen: Any = fields
    for name in readers.path_of(fields, part):
        chosen = chosen[name]
    return chosen


def of_object(whole: Any, part: str | None) -> tuple[Fields, type]:
    """A part of a configuration object, and the class that knows its keys."""
    fields = as_fields(whole, "config")
    path = readers.path_of(fields, part)
    beside = {}
    if path and CONVERTED in fields and path == readers.path_of(fields, None):
        beside = {CONVERTED: fields[CONVERTED]}
    for name in path:
        nested = getattr(whole, name, None)
        fields = as_fields(fields[name], name)
        whole = nested if hasattr(nested, "to_dict") else whole
    for key in ("layer_types", "layers_block_type"):  # a property of some classes
        kinds = getattr(whole, key, None)
        if isinstance(kinds, (list, tuple)):
            fields.setdefault(key, list(kinds))
    return {**beside, **fields}, type(whole)
