"""The C++ modules in Python, for tests and for trying out parts of a LibTorch program.

Models should use the modules of :mod:`posembed` itself, which are ordinary ``nn.Module``. Because
of limits of torch's binding, bound C++ modules cannot be compiled, pickled or deep-copied, and
their parameters cannot be replaced.
"""

from typing import TYPE_CHECKING

from posembed._library import bindings

if TYPE_CHECKING:
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

globals().update({name: getattr(bindings(), name) for name in __all__})
