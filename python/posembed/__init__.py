"""Token and positional embeddings for PyTorch: the same operators in C++ and Python."""

from posembed import _library

_library.load()

# ruff: noqa: E402  (what follows needs the library)
from posembed import batching, cpp, functional, shapes
from posembed._build_info import build_info
from posembed.functional import check_errors
from posembed.learned import LearnedPositionalEmbedding
from posembed.rotary import RotaryEmbedding
from posembed.specification import RotarySpec
from posembed.token import TokenEmbedding

batching.register()
shapes.register()

__version__ = build_info()["version"]

__all__ = [
    "LearnedPositionalEmbedding",
    "RotaryEmbedding",
    "RotarySpec",
    "TokenEmbedding",
    "build_info",
    "check_errors",
    "cpp",
    "functional",
]
