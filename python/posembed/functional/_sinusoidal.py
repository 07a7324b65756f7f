"""Functional sinusoidal encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._gate import gated
from posembed.functional._options import sinusoidal_text
from posembed.sharding import call, is_sharded
from posembed.specification import SinusoidalSpec

_SINUSOIDAL_ENCODE = gated(torch.ops.posembed.sinusoidal_encode.default)
_SINUSOIDAL_SHIFT_MATRIX = gated(torch.ops.posembed.sinusoidal_shift_matrix.default)
_SINUSOIDAL_ADD = gated(torch.ops.posembed.sinusoidal_add.default)


def sinusoidal(
    x: Tensor,
    positions: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    offset: int = 0,
) -> Tensor:
    """Adds sinusoidal encodings; gradients flow to x, floating-point positions and scale.

    Vaswani et al., "Attention Is All You Need", arXiv:1706.03762. Errors are below 1.5e-7 up to
    position ``2 ** 31`` and grow beyond it; use float64 data there.

    Args:
        x: float32, float64, bfloat16 or float16, [batch, seq, embedding_dim] or
            [seq, embedding_dim].
        positions: int32, int64 or floating-point [seq] or [batch, seq]. None: ``offset``,
            ``offset + 1``, and so on.
        scale: Floating-point, one element: multiplies the encodings.
        spec: The specification of the encoding.
        offset: Position of the first row if ``positions`` is None.

    Returns:
        x plus encodings, with the shape and dtype of x.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> y = pe.functional.sinusoidal(torch.randn(2, 16, 512), spec=pe.SinusoidalSpec(512))
    """
    return waved(x, sinusoidal_text(spec), positions, offset, scale)


def waved(
    x: Tensor, spec: str, positions: Tensor | None, offset: int, scale: Tensor | None
) -> Tensor:
    """:func:`sinusoidal` without keywords, which are slow for one token."""
    if type(x) is not Tensor and is_sharded(x):
        return call("sinusoidal_add", x, spec, positions, offset, scale)  # type: ignore[no-any-return]
    if scale is None:
        return _SINUSOIDAL_ADD(x, spec, positions, offset)  # type: ignore[no-any-return]
    return _SINUSOIDAL_ADD(x, spec, positions, offset, scale)  # type: ignore[no-any-return]


def sinusoidal_encode(
    positions: Tensor,
    scale: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sinusoidal encodings of positions; gradients flow to floating-point positions and scale.

    Args:
        positions: int32, int64 or floating-point [...].
        scale: Floating-point, one element: multiplies the encodings.
        spec: The specification of the encoding.
        dtype: Default: that of floating-point positions, otherwise float32.

    Returns:
        [..., embedding_dim]; NaN if a position is not finite, or is floating-point and at least
        2 ** 63.

    Raises:
        ValueError: ``scale`` does not have one element.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> time = pe.SinusoidalSpec(64, preset="ddpm")
        >>> pe.functional.sinusoidal_encode(torch.tensor([998.39]), spec=time).shape
        torch.Size([1, 64])
    """
    text = sinusoidal_text(spec)
    if is_sharded(positions):
        return call("sinusoidal_encode", positions, text, scale, 0, dtype)  # type: ignore[no-any-return]
    return _SINUSOIDAL_ENCODE(positions, text, scale, 0, dtype)  # type: ignore[no-any-return]


def sinusoidal_shift_matrix(distance: float, *, spec: SinusoidalSpec) -> Tensor:
    """The matrix that shifts an encoding by ``distance`` positions by rotating each pair.

    Args:
        distance: Number of positions.
        spec: The specification of the encoding.

    Returns:
        float64 [embedding_dim, embedding_dim] M with encode(p + distance) = encode(p) @ M.T.

    Raises:
        ValueError: A sine has no matching cosine.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.sinusoidal_shift_matrix(3, spec=pe.SinusoidalSpec(64)).shape
        torch.Size([64, 64])
    """
    return _SINUSOIDAL_SHIFT_MATRIX(  # type: ignore[no-any-return]
        distance, sinusoidal_text(spec)
    )
