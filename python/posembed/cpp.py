"""The C++ modules in Python, to test them and to try out parts of a LibTorch program.

Models should use the modules of :mod:`posembed` itself, which are ordinary ``nn.Module``: bound C++
modules cannot be compiled, pickled or deep-copied, nor get parameters from outside (limits of
torch's binding).
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
