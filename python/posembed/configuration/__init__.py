"""RotarySpec from a model's configuration: Hugging Face's, Meta's params.json, GGUF metadata.

Reading is strict: unknown and missing keys and contradictions raise, because a wrong rotation is
not an error at run time, only a worse model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from posembed.configuration import gguf, huggingface, meta
from posembed.configuration.keys import Fields
from posembed.specification import RotarySpec


def load(config: Any) -> Fields:
    """The configuration as a dict: that of its file, or of the object."""
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    elif not isinstance(config, Mapping):
        config = config.to_dict()
    return dict(config)


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
        return meta.read(fields, base)
    return huggingface.read(load(select_part(fields, part)), layer_type, interleaved, base)


def select_part(fields: Fields, part: str | None) -> Any:
    """A model made of several configurations: the named one, or that of its text model."""
    if part is None:
        rotates = any(huggingface.ROTARY_KEY.search(key) for key in fields if fields[key])
        return fields if rotates or not fields.get("text_config") else fields["text_config"]
    parts = [key for key in fields if key.endswith("_config") and fields[key]]
    if part not in parts:
        raise ValueError(f"part: expected one of {sorted(parts)}, got {part!r}")
    return fields[part]
