"""The new order of the rows of a checkpoint's tensors that are components of queries and keys.

Which rows these are is seen in a small model (tracing.py) and found again in the large one
(checkpoint.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from posembed.conversion import permute_rotary_weight
from posembed.specification import RotarySpec

Pairing = Literal["interleaved", "half_split"]
Specs = Mapping[str | None, RotarySpec]


def pairing(spec: RotarySpec) -> Pairing:
    """The name of a specification's pairs."""
    return "interleaved" if spec.interleaved else "half_split"


def rotated(spec: RotarySpec) -> int:
    """How many components of a head are rotated."""
    return spec.head_dim if spec.rotary_dim is None else spec.rotary_dim


def windows(specs: Specs) -> set[tuple[int, int, int]]:
    """Which components of heads are rotated; all that a permutation needs to know."""
    rotating = (spec for spec in specs.values() if rotated(spec))
    return {(spec.head_dim, rotated(spec), spec.rotary_start) for spec in rotating}


def check_direction(specs: Specs, fields: Mapping[str, Any], to: Pairing) -> None:
    """Raises ValueError unless a model has components that can be rotated in other pairs."""
    rotating = [spec for spec in specs.values() if rotated(spec)]
    if not rotating:
        raise ValueError("the configuration says that no layer is rotated")
    if to in {pairing(spec) for spec in rotating}:
        raise ValueError(f"--to: the configuration says that the pairs are {to} already")
    if fields.get("attention_k_eq_v"):
        raise ValueError("attention_k_eq_v: values shared with keys cannot be converted")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where a tensor has components of queries and keys.

    Args:
        spec: Their rotation.
        starts: The unit of the first rotated component of each head; the others follow.
        units: The number of units.
        elements: Whether a unit is one element, as in norms; otherwise it is a row.
    """

    spec: RotarySpec
    starts: tuple[int, ...]
    units: int
    elements: bool

    def permuted(self, tensor: Tensor, to: Pairing) -> Tensor:
        """The tensor with its rows in the new order, as bytes, so any number format works."""
        size, order = rotated(self.spec), torch.arange(self.units)
        pairs = permute_rotary_weight(torch.arange(size), 1, to=to)
        for start in self.starts:
            order[start : start + size] = start + pairs
        return tensor.reshape(self.units, -1).view(torch.uint8)[order]


def specs_of_kinds(
    fields: dict[str, Any],
    interleaved: bool | None,
    base: float | None,
    ignore: Iterable[str] = (),
) -> dict[str | None, RotarySpec]:
    """The rotation of each layer type in a configuration.

    None: of layers of no named type, if the configuration needs no type.

    Raises:
        ValueError: The configuration cannot be read, or weights of such models cannot be converted.
    """
    if "_class_name" in fields:
        raise ValueError(
            "_class_name: a class of diffusers has one pairing, whatever its file says"
        )
    named = (*(fields.get("layer_types") or ()), *(fields.get("rope_parameters") or ()))
    specs: dict[str | None, RotarySpec] = {}
    refused: list[ValueError] = []
    for kind in dict.fromkeys((None, *named, "full_attention", "sliding_attention")):
        try:
            specs[kind] = RotarySpec.from_huggingface(
                fields, kind, interleaved=interleaved, base=base, ignore=ignore
            )
        except ValueError as error:
            if not str(error).startswith("layer_type:"):  # no such type, or a type is needed
                raise
            refused.append(error)
    if not specs:
        raise refused[0]
    if any(spec.sections is not None and spec.sections.within_axes for spec in specs.values()):
        raise ValueError("config: expected pairs of the whole head, got pairs within axes")
    return specs
