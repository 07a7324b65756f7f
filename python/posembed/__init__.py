"""Token and positional embeddings for PyTorch: the same operators in C++ and Python."""

from posembed import _library

_library.load()

from posembed._build_info import build_info  # noqa: E402  (needs the library)

__version__ = build_info()["version"]

__all__ = ["build_info"]
