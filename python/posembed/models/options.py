"""What a caller says beside a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class Options:
    """See :meth:`posembed.RotarySpec.from_huggingface`."""

    layer_type: str | None = None
    part: str | None = None
    interleaved: bool | None = None
    base: float | None = None
    ignore: Collection[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", tuple(str(key) for key in self.ignore))
