"""What tests must know of the library whose operators take their CUDA half on the CPU: make test-cuda-on-cpu."""

import ctypes
from pathlib import Path

import posembed as pe
import pytest

LIBRARY = ctypes.CDLL(str(Path(pe.__file__).parent / "lib" / "libposembed.so"))

# That library counts launches of kernels.
CUDA_ON_CPU = hasattr(LIBRARY, "posembed_launches")

# Values of ids, positions, slots and cu_seqlens are checked before the call by the CPU's half alone.
AT_ONCE = pytest.mark.no_stand_in
