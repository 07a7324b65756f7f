"""Completes a published file with the model's own configuration class in transformers.

Files omit what the class adds: layer types, second bases, widths, defaults. Nothing is downloaded,
and no code from the model repository runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from posembed.configuration import parts
from posembed.configuration.readers import Completed, Fields


def class_of(model_type: Any) -> type | None:
    """The configuration class of a model type; None if transformers does not know it."""
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
    """Silences transformers' warnings about keys that the readers here accept or reject."""
    from transformers.utils import logging as their_logging

    level = their_logging.get_verbosity()
    their_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        their_logging.set_verbosity(level)


def normalised(fields: Fields) -> Fields:
    """The file with its keys where the configuration class looks for them."""
    attention = fields.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("rope_theta") is not None:  # DBRX
        return {**fields, "rope_theta": attention["rope_theta"]}
    return fields


def complete(fields: Fields) -> Any | None:
    """The file as an object of its configuration class, or the error that the class raises.

    None if transformers does not know the model type. Without an object, the readers assume no
    defaults and report what is missing.
    """
    own = class_of(fields.get("model_type"))
    if own is None:
        return None
    with quiet():
        try:
            made = own(**copy.deepcopy(normalised(fields)))
            made.to_dict()  # which refuses some values that the class takes
            return made
        except Exception as error:  # classes may raise anything
            return error


@functools.cache
def known_keys(own: type) -> frozenset[str]:
    """The keys that a configuration class knows: its fields and the keys that it adds."""
    names = set(getattr(own, "attribute_map", {})) | set(getattr(own, "__dataclass_fields__", {}))
    names |= set(inspect.signature(own.__init__).parameters)  # type: ignore[misc]
    with quiet(), contextlib.suppress(Exception):  # a class without defaults
        names |= set(own().to_dict())
    return frozenset(names)


def completed_part(whole: Any, part: str | None) -> Completed | None:
    """A part of transformers' own object, with the keys that its class knows."""
    if not type(whole).__module__.startswith("transformers."):
        return None
    fields, own = parts.of_object(whole, part)
    return Completed(fields, known_keys(own))
