"""The C++ modules in Python, for tests and for trying out parts of a LibTorch program.

Models should use the modules of :mod:`posembed` itself, which are ordinary ``nn.Module`` classes.
Because of limitations in torch's bindings, bound C++ modules cannot be compiled, pickled or
deep-copied, and their parameters cannot be replaced.
"""

from typing import TYPE_CHECKING

from posembed._library import bindings

if TYPE_CHECKING:
    from posembed._C import *  # noqa: F403

# Every module is bound as a class in _C.cpp, and a class in _C wraps it.
__all__ = sorted(name for name in dir(bindings().cpp) if not name.startswith("_"))

globals().update({name: getattr(bindings(), name) for name in __all__})
