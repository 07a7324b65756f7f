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
from torch import Tensor

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
    "triton",
]

PACKAGES = (*ROTARY_PACKAGES, "triton")


def installed(package: str) -> bool:
    """Whether it can be imported."""
    return imported(package) is not None


def triton(query: Tensor, key: Tensor) -> dict[str, Call]:
    """In place, on CUDA."""
    if not installed("triton"):
        return {}
    from cases import triton_rotary

    angles = triton_rotary.tables(query.shape[1], query.shape[-1], query.device)
    return {"Triton, in place": lambda: triton_rotary.rotate_(query, key, *angles)}
