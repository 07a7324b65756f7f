"""Options that several functions share."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posembed.specification import RotarySpec, SinusoidalSpec

Device = torch.device | str | int  # a number means an accelerator
Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
CacheLayout = Literal["nhd", "hnd"]
Gradient = Literal["dense", "rows"]
BagMode = Literal["sum", "mean", "max"]
RelativeBuckets = Literal["t5", "bert"]
Initialization = Literal["mean", "mean-and-covariance", "normal"]


PLAIN = (Tensor, nn.Parameter)


def rotary_text(spec: RotarySpec, name: str = "spec") -> str:
    """The specification as operators take it."""
    if not isinstance(spec, RotarySpec):
        raise TypeError(f"{name}: expected a RotarySpec, got {type(spec).__name__}")
    return spec.text


def sinusoidal_text(spec: SinusoidalSpec, name: str = "spec") -> str:
    """The specification as operators take it."""
    if not isinstance(spec, SinusoidalSpec):
        raise TypeError(f"{name}: expected a SinusoidalSpec, got {type(spec).__name__}")
    return spec.text


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without the slow import of its class."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a wrapper subclass of Tensor, such as a quantised table."""
    return type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor)


def sharded() -> Any:
    """The functions for DTensors, imported on first use."""
    from posembed.functional import _sharded

    return _sharded


def refuse_sharded(**tensors: Tensor) -> None:
    """Raises ValueError for DTensors, where an operator takes local tensors."""
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise ValueError(
                f"{name}: expected a Tensor, got a DTensor placed {tensor.placements}; "  # type: ignore[attr-defined]
                "pass this process's part, to_local()"
            )
