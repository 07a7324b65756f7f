"""Facts about this build of posembed and the instruction set in use."""

import json
from typing import TypedDict

import torch


class BuildInfo(TypedDict):
    """The facts of a build, in print order."""

    version: str
    """posembed's version."""
    torch_version: str
    """The torch version that it was built for."""
    cuda_version: str
    """The CUDA toolkit that built the kernels; empty for a CPU-only build."""
    cuda_architectures: list[str]
    """Architectures that CUDA kernels were compiled for, in CMake's form: 90-real, 100-virtual."""
    compiler: str
    """The C++ compiler and its version."""
    instruction_sets: list[str]
    """The instruction sets that CPU kernels were compiled for, narrowest first."""
    instruction_set: str
    """The set in use: the widest that the processor has and POSEMBED_INSTRUCTION_SET allows."""


def build_info() -> BuildInfo:
    """Versions, compiler, CUDA architectures and the instruction set in use.

    Examples:
        >>> import posembed as pe
        >>> pe.build_info()["instruction_set"] in pe.build_info()["instruction_sets"]
        True
    """
    return json.loads(torch.ops.posembed.build_info.default())  # type: ignore[no-any-return]
