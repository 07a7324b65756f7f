"""What cases are run under."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Setting:
    """What cases are run under.

    Attributes:
        device: "cpu" or "cuda".
        allocator: "default", "reusing" or "huge pages"; see run.py.
        compile_peers: Whether peers are also run through torch.compile.
    """

    device: str
    allocator: str
    compile_peers: bool
