"""Token and positional embeddings for PyTorch: the same operators in C++ and Python."""

from posembed import _library

_library.load()

# ruff: noqa: E402  (what follows needs the library)
from posembed import batching, cpp, functional, shapes
from posembed._build_info import build_info
from posembed.alibi import ALiBi
from posembed.conversion import permute_rotary_weight
from posembed.functional import check_errors
from posembed.input import InputEmbedding
from posembed.learned import LearnedPositionalEmbedding
from posembed.rotary import RotaryEmbedding
from posembed.scaling import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    XPosScaling,
    YarnScaling,
)
from posembed.sinusoidal import SinusoidalPositionalEmbedding
from posembed.specification import RotarySpec, Sections, SinusoidalSpec
from posembed.token import TokenEmbedding

batching.register()
shapes.register()

__version__ = build_info()["version"]

__all__ = [
    "ALiBi",
    "DynamicNtkScaling",
    "InputEmbedding",
    "LearnedPositionalEmbedding",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NtkScaling",
    "ProportionalScaling",
    "RotaryEmbedding",
    "RotarySpec",
    "Sections",
    "SinusoidalPositionalEmbedding",
    "SinusoidalSpec",
    "TokenEmbedding",
    "XPosScaling",
    "YarnScaling",
    "build_info",
    "check_errors",
    "cpp",
    "functional",
    "permute_rotary_weight",
]
