"""The operators as functions: each is one call of ``torch.ops.posembed``.

Modules hold options and parameters; everything they compute, they compute here.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.overrides
from torch import Tensor

from posembed import _C
from posembed.specification import RotarySpec

Layout = Literal["bshd", "bhsd", "sbhd", "thd"]


def eager(*arguments: Tensor | None) -> bool:
    """Whether a call may enter the dispatcher from C++, which is faster than through torch.ops.

    The compiler has to see the operator, and so have tensor types with ``__torch_function__``.
    """
    return not (torch.compiler.is_compiling() or torch.overrides.has_torch_function(arguments))


@overload
def rotary(
    query: Tensor,
    key: None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    inverse: bool = False,
) -> Tensor: ...


@overload
def rotary(
    query: Tensor,
    key: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]: ...


def rotary(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    inverse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates query, or query and key in one launch, by their positions.

    Pair ``i`` of a head turns by ``position * frequency[i]`` radians. Angles are exact at every
    position. Su et al., "RoFormer", arXiv:2104.09864.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: The same with any number of heads, or None.
        positions: int32 or int64 [seq], [batch, seq] or [tokens]; -1 leaves a token as it is.
            None: ``offset``, ``offset + 1``, and so on.
        spec: The rotation's numbers.
        layout: The order of dimensions; ``"thd"`` is [tokens, heads, head_dim].
        offset: Position of the first token where no positions are given.
        inverse: Undo the rotation instead.

    Returns:
        The rotated query, or (query, key): shapes and dtypes as given.

    Raises:
        ValueError: Shapes, layouts or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: A position is below -1.

    Example:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(64, base=500000.0)
        >>> query, key = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64)
        >>> query, key = pe.functional.rotary(query, key, spec=spec)
    """
    if eager(query, key, positions):
        return _C.rotary(query, key, positions, spec.text, layout, offset, inverse)
    options = {"spec": spec.text, "layout": layout, "offset": offset, "inverse": inverse}
    if key is None:
        return torch.ops.posembed.rotary(query, positions, **options)  # type: ignore[no-any-return]
    return torch.ops.posembed.rotary_pair(query, key, positions, **options)  # type: ignore[no-any-return]


def rotary_(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotates query, and key where given, in place: for inference.

    Arguments as :func:`rotary`; strides are free but for a contiguous last dimension.

    Raises:
        ValueError: As :func:`rotary`; or grad mode is on and an argument requires grad; or tensors
            overlap in memory.

    Example:
        >>> import torch, posembed as pe
        >>> cache = torch.randn(1, 10, 2, 64)
        >>> pe.functional.rotary_(cache, spec=pe.RotarySpec(64), offset=7)
    """
    if eager(query, key, positions):
        _C.rotary_(query, key, positions, spec.text, layout, offset, inverse)
        return
    options = {"spec": spec.text, "layout": layout, "offset": offset, "inverse": inverse}
    if key is None:
        torch.ops.posembed.rotary_(query, positions, **options)
    else:
        torch.ops.posembed.rotary_pair_(query, key, positions, **options)


def check_errors() -> None:
    """Waits for the CUDA devices and raises the first id or position error that a kernel recorded.

    A CUDA kernel that meets a bad id or position writes zeros (or leaves the token as it is) and
    goes on; the error is raised here or at posembed's next CUDA call. Returns at once on machines
    without CUDA.

    Raises:
        IndexError: Names what was out of range, its value, its place and the range.
    """
    torch.ops.posembed.check_errors()
