"""What tests must know of a build whose operators take their CUDA half on the CPU: make test-cuda-on-cpu."""

import posembed as pe
import pytest

CUDA_ON_CPU = pe.build_info()["cuda_version"] == "on CPU"

# Values of ids, positions, slots and cu_seqlens are checked before the call by the CPU's half alone.
AT_ONCE = pytest.mark.no_stand_in
