"""Options that several functions share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from posembed.glue.sharding import PLAIN
from posembed.specifications import RotarySpec, SinusoidalSpec

Device = torch.device | str | int  # a number means an accelerator
Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
AdditiveLayout = Literal["bsd", "sbd"]
CacheLayout = Literal["nhd", "hnd"]
Gradient = Literal["dense", "rows"]
BagMode = Literal["sum", "mean", "max"]
ResamplingMethod = Literal["bicubic", "bilinear"]
By = Literal["query", "key"]
RelativeMlp = Literal["swin", "cr"]
RelativeBuckets = Literal["t5", "bert", "clipped", "deberta", "band", "grid"]
NgramRule = Literal["xor", "rolling", "modular"]
FourierUnit = Literal["radian", "half_turn", "turn"]
FourierWaves = Literal["sin_cos", "cos_sin", "sin", "cos"]
CodeFormat = Literal["float8", "int8", "int4"]
Initialization = Literal["mean", "mean-and-covariance", "normal"]


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


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a wrapper subclass of Tensor, such as a quantised table."""
    return type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor)
