"""RotarySpec from a model's configuration: Hugging Face's, Meta's params.json, GGUF metadata.

Reading is strict: unknown and missing keys and contradictions raise, because a wrong rotation is
not an error at run time, only a worse model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posembed.configuration import conventions, gguf, huggingface, meta
from posembed.configuration.keys import Fields
from posembed.specification import RotarySpec

# Files of a model's folder: transformers', Meta's.
NAMES = ("config.json", "params.json")


def load(config: Any) -> Fields:
    """The configuration as a dict: that of its file or its folder, or of the object."""
    if not isinstance(config, (str, os.PathLike)):
        return as_fields(config, "config")
    with open(file_of(config), encoding="utf-8") as file:
        found = json.load(file)
    if not isinstance(found, dict):
        raise ValueError(f"config: expected a file with a JSON object, got {found!r:.40}")
    return found


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


def file_of(path: str | os.PathLike[str]) -> Path:
    """A configuration, or the one in a model's folder."""
    if not Path(path).is_dir():
        return Path(path)
    found = [Path(path, name) for name in NAMES if Path(path, name).is_file()]
    if not found:
        raise ValueError(f"{path}: expected a folder with {' or '.join(NAMES)}")
    return found[0]


def from_huggingface(
    config: Any,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    interleaved: bool | None = None,
    base: float | None = None,
) -> RotarySpec:
    """See :meth:`RotarySpec.from_huggingface`."""
    fields = load(config)
    if "general.architecture" in fields:
        return gguf.read(fields, layer_type, interleaved, base)
    if "n_heads" in fields and "model_type" not in fields:
        return meta.read(fields, layer_type, base)
    return huggingface.read(typed_part(fields, part), layer_type, interleaved, base)


def select_part(fields: Fields, part: str | None) -> Any:
    """A model made of several configurations: the named one, or that of its text model."""
    if part is None:
        text = fields.get("text_config")
        flat = any(huggingface.ROTARY_KEY.search(key) for key in fields if fields[key])
        if not text or (flat and fields.get("model_type") not in conventions.FLAT_TEXT):
            return fields
        return text
    parts = [key for key in fields if key.endswith("_config") and fields[key]]
    if part not in parts:
        known = f"one of {sorted(parts)}" if parts else "none for a configuration without parts"
        raise ValueError(f"part: expected {known}, got {part!r}")
    return fields[part]


def typed_part(fields: Fields, part: str | None) -> Fields:
    """The part, with the model_type that files of an older layout leave to the whole's."""
    chosen = as_fields(select_part(fields, part), part or "text_config")
    whole = fields.get("model_type")
    if whole not in conventions.FLAT_TEXT or chosen.get("model_type") not in (None, "", whole):
        return chosen
    if part in (None, "text_config"):
        return {**chosen, "model_type": conventions.FLAT_TEXT[whole]}
    return {**chosen, "model_type": f"{whole}_{part.removesuffix('_config')}"}
