"""The canonical text of a specification: C++ writes it, operators take it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.compiler import is_compiling


def read(family: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Returns the canonical text that C++ makes from a specification's fields, or an error."""
    canonical = getattr(torch.ops.posembed, f"{family}_specification")
    try:
        return canonical(json.dumps(fields)), ""
    except ValueError as error:
        return "", str(error)


def canonical_text(family: str, fields: dict[str, Any]) -> str:
    """The text that operators take; raises ValueError for inconsistent numbers."""
    found: tuple[str, str]
    if is_compiling():
        from posembed.specifications.uncompiled import read_as_constant

        found = read_as_constant(family, fields)
    else:
        found = read(family, fields)
    text, error = found
    if error:
        raise ValueError(error)
    return text


def read_blocks(text: str) -> tuple[tuple[int, str], ...]:
    """The axis and the text of each block of columns; none with one axis."""
    axes, texts = torch.ops.posembed.sinusoidal_blocks.default(text)
    return tuple(zip(axes, texts, strict=True)) if len(axes) > 1 else ()


def block_texts(text: str) -> tuple[tuple[int, str], ...]:
    """:func:`read_blocks`, also while torch.compile traces."""
    if is_compiling():
        from posembed.specifications.uncompiled import read_blocks_as_constant

        return read_blocks_as_constant(text)  # type: ignore[no-any-return]
    return read_blocks(text)
