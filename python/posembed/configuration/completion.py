"""A published file, completed by the model's own configuration class in transformers.

Files leave out what the class adds: kinds of layers, second bases, widths, defaults. Nothing is
downloaded, and no code runs that a file brings along.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from posembed.configuration import conventions, layers
from posembed.configuration.keys import Fields


def class_of(model_type: Any) -> type | None:
    """The configuration class of a model type; None where transformers does not know it."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    found: type = CONFIG_MAPPING[model_type]
    return found if found.__module__.startswith("transformers.") else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers, which warns of keys that the readers here take or refuse."""
    from transformers.utils import logging as their_logging

    level = their_logging.get_verbosity()
    their_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        their_logging.set_verbosity(level)


def complete(fields: Fields) -> Any | None:
    """The file as an object of its configuration class.

    None where transformers does not know the model type, or its class refuses the file: the readers
    here, which take nothing for granted, then say what is missing.
    """
    own = class_of(fields.get("model_type"))
    if own is None:
        return None
    with quiet():
        try:
            return own(**copy.deepcopy(fields))
        except Exception:  # classes raise what they please
            return None


@functools.cache
def known_keys(own: type) -> frozenset[str]:
    """The keys that a configuration class knows: its fields, and what it adds to them."""
    names = set(getattr(own, "attribute_map", {})) | set(getattr(own, "__dataclass_fields__", {}))
    names |= set(inspect.signature(own.__init__).parameters)  # type: ignore[misc]
    with quiet(), contextlib.suppress(Exception):  # a class without defaults
        names |= set(own().to_dict())
    return frozenset(names)


# Where a file may say the same by another key.
OTHER_KEYS = {
    "partial_rotary_factor": ("rotary_pct", "partial_rotary_factors", "qk_rope_head_dim"),
    "rope_parameters": ("rope_scaling",),
    "layer_types": ("layers_block_type",),
}


def check_complete(fields: Fields) -> None:
    """Raises ValueError for a file that says less than the readers here need without its class."""
    rope = layers.legacy(layers.seen_by(fields, 0))
    stated = {key for key, value in fields.items() if value not in (None, [])}
    stated |= set(rope)
    if layers.is_nested(rope):
        stated |= {"layer_types", "partial_rotary_factor", "rope_parameters"}
    for key, model_types in conventions.BY_CODE.items():
        keys = {key, *OTHER_KEYS.get(key, ())}
        if fields.get("model_type") in model_types and not stated & keys:
            raise ValueError(
                f"{key}: missing in the configuration, and the configuration class of "
                f"{fields['model_type']!r} has a rule of its own for it: install transformers, "
                "which completes files, or add the key"
            )
