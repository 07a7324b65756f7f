"""Functions that torch.compile runs in Python; callers import them while being compiled.

The decorators import the compiler, which is slow, so ``import posembed`` must not import this
module.
"""

from __future__ import annotations

from typing import Any

import torch

from posembed.specifications import RotarySpec, text


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="dynamic NTK has other frequencies at every length: compile module.resolve(seq_len)"
)
def resolved(spec: RotarySpec, seq_len: int) -> RotarySpec:
    """The specification for one sequence length."""
    return spec.resolve(seq_len)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def read_as_constant(family: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Reads a specification as a constant of the compiled function, like its fields.

    Errors are returned, because an exception raised here would not reach the function's callers.
    """
    return text.read(family, fields)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def read_blocks_as_constant(spec: str) -> tuple[tuple[int, str], ...]:
    """The blocks of a sinusoidal specification as a constant of the compiled function."""
    return text.read_blocks(spec)
