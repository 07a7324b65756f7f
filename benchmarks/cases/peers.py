"""The peers of `posembed benchmark`, and those that only a checkout has."""

from __future__ import annotations

from posembed.commands.peers import (
    OTHERS,
    Call,
    all_of,
    complex_form,
    imported,
    torchtune,
    transformers,
    transformers_tables,
)
from posembed.commands.peers import PACKAGES as ROTARY_PACKAGES

__all__ = [
    "OTHERS",
    "PACKAGES",
    "Call",
    "all_of",
    "complex_form",
    "installed",
    "torchtune",
    "transformers",
    "transformers_tables",
]

PACKAGES = ROTARY_PACKAGES


def installed(package: str) -> bool:
    """Whether it can be imported."""
    return imported(package) is not None
