"""The C++ modules, bound: for parity tests, and for trying a LibTorch program's parts from Python.

Models should use the modules of :mod:`posembed` itself, which are ordinary ``nn.Module``: these
cannot be compiled, pickled, deep-copied or given parameters from outside (torch's own limits of
binding C++ modules).
"""

from posembed._C import (
    ALiBi,
    InputEmbedding,
    LearnedPositionalEmbedding,
    RotaryEmbedding,
    SinusoidalPositionalEmbedding,
    TokenBag,
    TokenEmbedding,
)

__all__ = [
    "ALiBi",
    "InputEmbedding",
    "LearnedPositionalEmbedding",
    "RotaryEmbedding",
    "SinusoidalPositionalEmbedding",
    "TokenBag",
    "TokenEmbedding",
]
