"""Positions and a specification, passed in place of tables from rotary module to rotation.

A model passes what its rotary module returns to its rotation and does nothing else with it, so it
need not be tables.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn

from posembed.integrations.huggingface._rotation import KERNEL_DEVICES, Angles

Texts = tuple[str, str, bool]


class Tables(NamedTuple):
    """What a rotary module returns; a model unpacks it like the two tables."""

    cos: Angles
    sin: Angles


class ExactAngles:
    """Base class of rotary modules that return positions instead of the model's tables.

    An instance's ``posembed_specifications`` maps each layer type, or None, to the specification
    texts that :class:`Angles` takes, and to whether positions have several axes.
    """

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """The positions, twice; the model's tables if there is no specification or kernel."""
        texts: dict[str | None, Texts] = self.__dict__.get("posembed_specifications", {})
        if layer_type in texts and x.device.type in KERNEL_DEVICES:
            halves, adjacent, several_axes = texts[layer_type]
            if several_axes and position_ids.dim() == 3 and position_ids.shape[0] == 1:
                position_ids = position_ids[0]  # the same for all axes, as the model expands it
            angles = Angles(position_ids, halves, adjacent)
            return Tables(angles, angles)
        given = (x, position_ids) if layer_type is None else (x, position_ids, layer_type)
        return super().forward(*given)  # type: ignore[misc]


def makes_tables(cls: type) -> bool:
    """Whether modules of a class look like they make tables from positions alone."""
    if not issubclass(cls, nn.Module):
        return False
    try:
        names = list(inspect.signature(cls.forward).parameters)
    except (TypeError, ValueError):
        return False
    return names[:3] == ["self", "x", "position_ids"] and names[3:] in ([], ["layer_type"])
