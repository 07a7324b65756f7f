"""Positions and a specification that travel in the place of tables, from module to rotation.

A model hands what its rotary module returns to its rotation and does nothing else with it, so that
it need not be tables.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn

from posembed.integrations.huggingface._rotation import KERNEL_DEVICES, Angles


class Tables(NamedTuple):
    """What a rotary module returns: a model unpacks it, as it would the two tables."""

    cos: Angles
    sin: Angles


class ExactAngles:
    """Base of rotary modules that return positions; those of the model compute tables.

    ``posembed_specifications`` of an instance has the texts of a specification, as :class:`Angles`
    takes them, for each type of layer, or for None.
    """

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """The positions, twice; the model's tables where there is no specification or kernel."""
        texts: dict[str | None, tuple[str, str]] = self.__dict__.get("posembed_specifications", {})
        if layer_type in texts and x.device.type in KERNEL_DEVICES:
            angles = Angles(position_ids, *texts[layer_type])
            return Tables(angles, angles)
        given = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
        return super().forward(*given)  # type: ignore[misc]


def makes_tables(cls: type) -> bool:
    """Whether modules of a class look like those that make tables from positions alone."""
    if not issubclass(cls, nn.Module):
        return False
    try:
        names = list(inspect.signature(cls.forward).parameters)
    except (TypeError, ValueError):
        return False
    return names[:3] == ["self", "x", "position_ids"] and names[3:] in ([], ["layer_type"])
