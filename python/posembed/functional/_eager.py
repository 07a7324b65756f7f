"""Chooses between two ways to call an operator."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic


def eager(*arguments: Tensor | float | None) -> bool:
    """Whether a call may enter the dispatcher from C++, which costs less than torch.ops.

    The compiler and tensor types with ``__torch_function__`` must see the operator itself.
    """
    return not (is_compiling() or has_torch_function_variadic(*arguments))
