"""Model configurations: Hugging Face's, Meta's and Mistral's params.json, GGUF's metadata.

csrc/configuration reads them, for both C++ and Python. A published config.json omits what the
model's configuration class adds; in Python, transformers completes the file first if it is
installed. Results are JSON texts and plain numbers.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posembed import _gguf
from posembed.configuration import completion, parts, readers
from posembed.configuration.parts import select_part as select_part
from posembed.configuration.readers import Fields, Preset
from posembed.configuration.readers import tables as tables

# File names in a model folder: transformers', Meta's.
NAMES = ("config.json", "params.json")


def load(config: Any) -> Fields:
    """The configuration as a dict, from a file, a folder or an object."""
    if not isinstance(config, (str, os.PathLike)):
        return parts.as_fields(config, "config")
    path = file_of(config)
    if _gguf.is_gguf(path):
        return _gguf.GgufFile(path).metadata()
    found = readers.read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"config: expected a file with a JSON object, got {found!r:.40}")
    return found


def file_of(path: str | os.PathLike[str]) -> Path:
    """The configuration file at a path, or in a model folder."""
    if not Path(path).is_dir():
        _check_is_no_name_of_the_hub(path)
        return Path(path)
    found = [Path(path, name) for name in NAMES if Path(path, name).is_file()]
    if not found:
        raise ValueError(f"{path}: expected a folder with {' or '.join(NAMES)}")
    return found[0]


def _check_is_no_name_of_the_hub(path: str | os.PathLike[str]) -> None:
    """Raises FileNotFoundError for owner/model, which transformers takes and posembed does not."""
    missing = not os.path.lexists(path)
    if missing and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.gguf)", os.fspath(path)):
        reason = (
            f"{os.strerror(errno.ENOENT)}; a name on the Hugging Face hub is not downloaded: "
            "pass transformers.AutoConfig.from_pretrained(name), or a folder"
        )
        raise FileNotFoundError(errno.ENOENT, reason, os.fspath(path))


def rotary(config: Any, *, part: str | None = None, **options: Any) -> str:
    """The JSON text of a rotary specification; see :meth:`posembed.RotarySpec.from_huggingface`."""
    return _read(readers.rotary, config, part, options)  # type: ignore[no-any-return]


def rotary_layers(config: Any, *, part: str | None = None, **options: Any) -> list[str]:
    """The JSON text for each layer; empty for a layer that does not rotate."""
    return _read(readers.rotary_layers, config, part, options)  # type: ignore[no-any-return]


def score_scales(config: Any, *, part: str | None = None, **options: Any) -> list[str]:
    """The JSON text of each layer's scale of scores; empty for a scale of 1."""
    return _read(readers.score_scales, config, part, options)  # type: ignore[no-any-return]


def _read(
    reader: Callable[..., Any], config: Any, part: str | None, options: dict[str, Any]
) -> Any:
    """Runs a reader on the configuration, completed by the model's own class if possible."""
    fields = load(config)
    given = isinstance(config, (Mapping, str, os.PathLike))
    if given:
        readers.check(fields)  # before a class of transformers takes memory for each layer
    whole = completion.complete(fields) if given else config
    if whole is not None and not isinstance(whole, Exception):
        readers.path_of(fields, part)  # raises for a part that the file itself does not have
        return reader(fields, completion.completed_part(whole, part), part=part, **options)
    try:
        return reader(fields, None, part=part, **options)
    except ValueError as error:
        if whole is None:
            raise
        refusal = " ".join(str(whole).split())
        raise ValueError(f"{error}; its class in transformers says: {refusal:.200}") from whole


def mrope(config: Any) -> str:
    """The JSON text of a rule of positions; see :meth:`posembed.MropeRule.from_huggingface`."""
    fields = load(config)
    whole: Any = None
    if isinstance(config, (Mapping, str, os.PathLike)):
        whole = completion.complete(fields)
    complete = whole.to_dict() if hasattr(whole, "to_dict") else fields
    return readers.mrope(complete)


def alibi(config: Any) -> Preset:
    """See :meth:`posembed.ALiBi.from_config`."""
    return readers.alibi(load(config))
