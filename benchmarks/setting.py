"""Settings that cases run under."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings that cases run under.

    Attributes:
        device: "cpu" or "cuda".
        allocator: "default", "reusing" or "huge pages"; see run.py.
        compile_peers: Whether peers are also run through torch.compile.
    """

    device: str
    allocator: str
    compile_peers: bool
