"""What tests must know of the library whose operators take their CUDA half on the CPU: make test-cuda-on-cpu."""

import os

import pytest

# Told and not looked up: with another library, tests then fail.
CUDA_ON_CPU = os.environ.get("POSEMBED_CUDA_ON_CPU") == "1"

# Values of ids, positions, slots and cu_seqlens are checked before the call by the CPU's half alone.
AT_ONCE = pytest.mark.no_stand_in
