"""The numbers that define positions, scalings and score scales."""

from posembed.specifications.mrope import MropeRule
from posembed.specifications.rotary import AngleError, Numerics, RotaryFields, RotarySpec, Sections
from posembed.specifications.sinusoidal import SinusoidalSpec

__all__ = [
    "AngleError",
    "MropeRule",
    "Numerics",
    "RotaryFields",
    "RotarySpec",
    "Sections",
    "SinusoidalSpec",
]
