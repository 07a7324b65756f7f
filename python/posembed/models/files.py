"""Loads a configuration from a file, a model's folder, a GGUF file, a dictionary or an object."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from posembed.models.fields import Fields, dict_of
from posembed.tables import gguf
from posembed.tables.file_format import json_file

# File names in a model folder: transformers', Meta's.
NAMES = ("config.json", "params.json")


def load(config: Any) -> Fields:
    """The configuration as a dict, as it is written."""
    if not isinstance(config, (str, os.PathLike)):
        return dict_of(config, "config")
    path = file_of(config)
    if gguf.is_gguf(path):
        return gguf.GgufFile(path).metadata()
    return json_file(path)


def read_once(config: Any, loaded: Fields, trust_remote_code: bool = False) -> Any:
    """What to read again: the loaded file, unless an object or a folder's code says more."""
    return config if trust_remote_code or hasattr(config, "to_dict") else loaded


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
