"""What torch.compile leaves to Python, for callers to import while they are compiled.

The decorator loads the compiler, which takes a second: ``import posembed`` must not.
"""

from __future__ import annotations

import torch

from posembed.specification import RotarySpec


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="dynamic NTK has other frequencies at every length: compile module.resolve(seq_len)"
)
def resolved(spec: RotarySpec, seq_len: int) -> RotarySpec:
    """The specification for one length."""
    return spec.resolve(seq_len)
