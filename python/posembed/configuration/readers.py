"""The readers of csrc/configuration, called with a configuration's keys as JSON."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

Fields = dict[str, Any]

# The key that `posembed convert` writes into a configuration: "interleaved" or "half_split".
CONVERTED = "posembed_rotary_pairs"

# Larger than any configuration.
MOST_BYTES = 100_000_000


class Completed(NamedTuple):
    """A file, or one of its parts, completed by the model's own configuration class."""

    fields: Fields
    known: frozenset[str]  # keys that the class knows, which need not be understood


class Preset(NamedTuple):
    """Arguments of :meth:`posembed.ALiBi.from_preset`, for all heads of the model."""

    name: str
    num_heads: int
    options: dict[str, Any]


def plain(value: Any) -> Any:
    """A configuration value as a JSON type."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # NumPy, torch
        return value.tolist()
    return list(value) if isinstance(value, (set, frozenset)) else str(value)


def as_json(fields: Fields) -> str:
    """A configuration as JSON text."""
    try:
        return json.dumps(fields, default=plain, skipkeys=True)
    except RecursionError as error:
        raise ValueError("config: expected fewer nested values") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device might never end
        raise ValueError(f"{path}: expected a regular file")
    if found.st_size > MOST_BYTES:
        raise ValueError(f"{path}: expected at most {MOST_BYTES} bytes, got {found.st_size}")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path}: expected JSON of fewer levels") from error
    except ValueError as error:  # not UTF-8, not JSON
        raise ValueError(f"{path}: expected JSON: {error}") from error


def stated(completed: Completed | None, options: dict[str, Any]) -> dict[str, Any]:
    """The operator arguments besides the configuration."""
    ignore: Iterable[str] = options.pop("ignore", ())
    options["ignore"] = [str(key) for key in ignore]
    options["known"] = [] if completed is None else sorted(completed.known)
    options["completed"] = None if completed is None else as_json(completed.fields)
    return options


def rotary(fields: Fields, completed: Completed | None, **options: Any) -> str:
    """The text of a rotary specification; see :meth:`posembed.RotarySpec.from_huggingface`."""
    read = torch.ops.posembed.rotary_from_configuration.default
    return read(as_json(fields), **stated(completed, options))  # type: ignore[no-any-return]


def rotary_layers(fields: Fields, completed: Completed | None, **options: Any) -> list[str]:
    """The text for each layer; empty for a layer that does not rotate."""
    read = torch.ops.posembed.rotary_layers_from_configuration.default
    return read(as_json(fields), **stated(completed, options))  # type: ignore[no-any-return]


def mrope(fields: Fields) -> str:
    """The JSON text of a rule of positions."""
    return torch.ops.posembed.mrope_rule_from_configuration.default(as_json(fields))  # type: ignore[no-any-return]


def score_scales(fields: Fields, completed: Completed | None, **options: Any) -> list[str]:
    """The text of each layer's scale of scores; empty for a scale of 1."""
    read = torch.ops.posembed.score_scales_from_configuration.default
    return read(as_json(fields), **stated(completed, options))  # type: ignore[no-any-return]


def alibi(fields: Fields) -> Preset:
    """See :meth:`posembed.ALiBi.from_config`."""
    return Preset(
        **json.loads(torch.ops.posembed.alibi_from_configuration.default(as_json(fields)))
    )


def input_layer(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The input layer in a model folder: "options", "file" and "tensors" by parameter."""
    text = torch.ops.posembed.input_layer_of_folder.default(os.fspath(folder))
    return json.loads(text)  # type: ignore[no-any-return]


def check(fields: Fields) -> None:
    """Raises ValueError for counts so large that no code should begin to work on them."""
    torch.ops.posembed.check_configuration.default(as_json(fields))


def path_of(fields: Fields, part: str | None) -> list[str]:
    """The path of keys to a part, or to the text model; empty if there are no parts."""
    return torch.ops.posembed.configuration_path.default(as_json(fields), part)  # type: ignore[no-any-return]


@functools.cache
def tables() -> dict[str, Any]:
    """What the readers know of models: the JSON files of csrc/configuration."""
    return json.loads(torch.ops.posembed.configuration_tables.default())  # type: ignore[no-any-return]
