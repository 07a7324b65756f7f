"""What a caller says beside a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TypedDict

from posembed.models.fields import check_effect


@dataclasses.dataclass(frozen=True)
class Options:
    """See :meth:`posembed.RotarySpec.from_huggingface`."""

    layer_type: str | None = None
    part: str | None = None
    interleaved: bool | None = None
    base: float | None = None
    ignore: Collection[str] = ()
    read_module: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", tuple(str(key) for key in self.ignore))
        if self.trust_remote_code and not self.read_module:
            raise ValueError("trust_remote_code: expected False without read_module=True, got True")

    def check_effect(self, without: Mapping[str, str]) -> None:
        """Rejects options that have no effect, each with its reason."""
        for name, why in without.items():
            check_effect(name, getattr(self, name), why)


class Facts(TypedDict, total=False):
    """What a caller says of a whole model; see :meth:`posembed.RotarySpec.from_huggingface`."""

    interleaved: bool | None
    base: float | None
    ignore: Iterable[str]
    read_module: bool
    trust_remote_code: bool


class Reading(Facts, total=False):
    """The same of a part."""

    part: str | None


READING = (*Reading.__annotations__,)
