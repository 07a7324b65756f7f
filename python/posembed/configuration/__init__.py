"""RotarySpec from a model's configuration: Hugging Face's, Meta's and Mistral's params.json, GGUF.

Reading is strict: unknown and missing keys and contradictions raise, because a wrong rotation is
not an error at run time, only a worse model. A published config.json leaves out what the model's
configuration class adds: where transformers is installed, it completes the file first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posembed.configuration import completion, conventions, gguf, huggingface, layers, meta, parts
from posembed.configuration.huggingface import Stated
from posembed.configuration.keys import Fields, check_effect
from posembed.configuration.parts import select_part as select_part
from posembed.specification import RotarySpec

# Files of a model's folder: transformers', Meta's.
NAMES = ("config.json", "params.json")


def load(config: Any) -> Fields:
    """The configuration as a dict: that of its file or its folder, or of the object."""
    if not isinstance(config, (str, os.PathLike)):
        return parts.as_fields(config, "config")
    with open(file_of(config), encoding="utf-8") as file:
        found = json.load(file)
    if not isinstance(found, dict):
        raise ValueError(f"config: expected a file with a JSON object, got {found!r:.40}")
    return found


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
    ignore: Iterable[str] = (),
) -> RotarySpec:
    """See :meth:`RotarySpec.from_huggingface`."""
    fields = load(config)
    if is_gguf(fields):
        check_effect("part", part, "GGUF metadata has no parts")
        return gguf.read(fields, layer_type, interleaved, base, ignore)
    if is_params(fields):
        check_effect("part", part, "params.json has no parts")
        check_effect("interleaved", interleaved, "pairs of params.json are interleaved")
        return meta.read(fields, layer_type, base, ignore)
    chosen, accounted = text_or_part(config, fields, part)
    stated = Stated(interleaved, base, accounted | frozenset(ignore))
    return huggingface.read(chosen, layer_type, stated)


def for_layers(
    config: Any,
    *,
    part: str | None = None,
    interleaved: bool | None = None,
    base: float | None = None,
    ignore: Iterable[str] = (),
) -> list[RotarySpec | None]:
    """See :meth:`RotarySpec.for_layers`."""
    fields = load(config)
    if is_gguf(fields):
        check_effect("part", part, "GGUF metadata has no parts")
        return gguf.read_layers(fields, interleaved, base, ignore)
    if is_params(fields):
        check_effect("part", part, "params.json has no parts")
        check_effect("interleaved", interleaved, "pairs of params.json are interleaved")
        return meta.read_layers(fields, base, ignore)
    chosen, accounted = text_or_part(config, fields, part)
    return huggingface.read_layers(chosen, Stated(interleaved, base, accounted | frozenset(ignore)))


def is_gguf(fields: Fields) -> bool:
    """Whether this is metadata of a GGUF file."""
    return "general.architecture" in fields


def is_params(fields: Fields) -> bool:
    """Whether this is a params.json, of Meta or Mistral."""
    return "n_heads" in fields and "dim" in fields and "model_type" not in fields


def text_or_part(config: Any, fields: Fields, part: str | None) -> tuple[Fields, frozenset[str]]:
    """The configuration to read, completed, and the keys that its class accounts for."""
    if part is None and fields.get("model_type") in conventions.UNSUPPORTED:
        return fields, frozenset()
    given = isinstance(config, (Mapping, str, os.PathLike))
    own = parts.typed(fields, part)
    for layer in layers.every_list_place(own):
        layers.legacy(layer)  # before a class takes one of two numbers that contradict each other
    whole = completion.complete(parts.normalised(fields)) if given else config
    if whole is not None and type(whole).__module__.startswith("transformers."):
        completed, known = parts.of_object(whole, part)
        layers.check_kept(own, completed)
        return completed, known
    completion.check_complete(own)
    return own, frozenset()
