"""What torch.compile leaves to Python, for callers to import while they are compiled.

The decorators load the compiler, which takes a second: ``import posembed`` must not.
"""

from __future__ import annotations

from typing import Any

import torch

from posembed import specification
from posembed.specification import RotarySpec


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="dynamic NTK has other frequencies at every length: compile module.resolve(seq_len)"
)
def resolved(spec: RotarySpec, seq_len: int) -> RotarySpec:
    """The specification for one length."""
    return spec.resolve(seq_len)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def read_as_constant(family: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The same when a function is compiled as whenever it runs: its fields are constants, too.

    An error is returned because what is raised here would not reach the function's callers.
    """
    return specification.read(family, fields)
