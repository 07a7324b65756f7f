"""Facts for tests about make test-cuda-on-cpu, where operators run CUDA code on the CPU."""

import os

import pytest

# Given by the environment, not looked up, so that tests fail with another library.
CUDA_ON_CPU = os.environ.get("POSEMBED_CUDA_ON_CPU") == "1"

# Only CPU code checks values of ids, positions, slots and cu_seqlens before the call.
AT_ONCE = pytest.mark.no_stand_in
