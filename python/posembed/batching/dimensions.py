"""Merges a mapped dimension with one of an operator's, and splits them again."""

from __future__ import annotations

import torch
from torch import Tensor


def fold(tensor: Tensor, mapped: int | None, into: int, size: int) -> Tensor:
    """Merges dimension ``mapped`` into dimension ``into``; None: repeats ``size`` times."""
    if mapped is None:
        tensor, mapped = tensor.unsqueeze(0).expand(size, *tensor.shape), 0
    return tensor.movedim(mapped, into).flatten(into, into + 1)


def unfold(tensor: Tensor, into: int, size: int, rest: int) -> tuple[Tensor, int]:
    """The inverse of :func:`fold`, and the index of the mapped dimension.

    ``rest`` is :func:`size_of` of the folded tensor, which cannot be computed if a size is 0.
    """
    return torch.unflatten(tensor, into, (size, rest)), into


def size_of(tensor: Tensor, mapped: int | None, dim: int) -> int:
    """The size of ``dim``, numbered without the mapped dimension."""
    return tensor.shape[dim + (mapped is not None and mapped <= dim)]


def front(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """Moves the mapped dimension to the front; None: expands the tensor to ``size`` views."""
    if mapped is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(mapped, 0)
