"""Merging a mapped dimension with one that an operator has, and parting them again."""

from __future__ import annotations

import torch
from torch import Tensor


def fold(tensor: Tensor, mapped: int | None, into: int, size: int) -> Tensor:
    """Joins dimension ``mapped`` with ``into`` of the rest; None: repeats ``size`` times."""
    if mapped is None:
        tensor, mapped = tensor.unsqueeze(0).expand(size, *tensor.shape), 0
    return tensor.movedim(mapped, into).flatten(into, into + 1)


def unfold(tensor: Tensor, into: int, size: int, rest: int) -> tuple[Tensor, int]:
    """The inverse of :func:`fold`, and where the mapped dimension is then.

    ``rest`` is what :func:`size_of` says of the folded tensor, which no size tells if one is 0.
    """
    return torch.unflatten(tensor, into, (size, rest)), into


def size_of(tensor: Tensor, mapped: int | None, dim: int) -> int:
    """The size of ``dim``, counted without the mapped dimension."""
    return tensor.shape[dim + (mapped is not None and mapped <= dim)]


def front(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """The mapped dimension in front; None: ``size`` views of one tensor."""
    if mapped is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(mapped, 0)
