"""Functional sinusoidal encodings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posembed.functional._offset import positions_from
from posembed.functional._options import Device, sinusoidal_text
from posembed.glue.gate import check_tensors, gated
from posembed.specifications import SinusoidalSpec

_SINUSOIDAL_ENCODE = gated(torch.ops.posembed.sinusoidal_encode.default, sharded=True)
_SINUSOIDAL_SHIFT_MATRIX = gated(torch.ops.posembed.sinusoidal_shift_matrix.default)
_SINUSOIDAL_ADD = gated(torch.ops.posembed.sinusoidal_add.default, sharded=True)
_GRID_POSITIONS = gated(torch.ops.posembed.sinusoidal_grid_positions.default, like="x")


def sinusoidal(
    x: Tensor,
    positions: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Adds sinusoidal encodings; gradients flow to x, floating-point positions and scale.

    Vaswani et al., "Attention Is All You Need", arXiv:1706.03762. Errors are below 1.5e-7 up to
    position ``2 ** 31`` and grow beyond it; use float64 data there.

    Args:
        x: float32, float64, bfloat16 or float16, [batch, seq, embedding_dim] or
            [seq, embedding_dim]; [batch, seq, embedding_dim] for several axes.
        positions: int32, int64, float32 or float64 [seq] or [batch, seq]. None: ``offset``,
            ``offset + 1``, and so on. For several axes: [axes, seq] or [axes, batch, seq].
        scale: Floating-point, one element: multiplies the encodings.
        spec: The specification of the encoding.
        offset: Position of the first row if ``positions`` is None. int32 or int64 [batch]: that of
            each sample's; beside ``cu_seqlens`` [documents]: that of each document's.
        cu_seqlens: int32 or int64 [documents + 1], where the batch is 1: the boundaries of packed
            documents. Positions restart at ``offset`` in each.

    Returns:
        x plus encodings, with the shape and dtype of x.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> y = pe.functional.sinusoidal(torch.randn(2, 16, 512), spec=pe.SinusoidalSpec(512))
    """
    text = sinusoidal_text(spec)
    if isinstance(offset, Tensor) or cu_seqlens is not None:
        positions, offset = positions_from(offset, positions, x, cu_seqlens=cu_seqlens), 0
    if spec.block_texts and positions is not None and positions.dim() == 2:
        positions = positions.unsqueeze(1)  # the batch
    return waved(x, text, positions, offset, scale)


def sinusoidal_grid_positions(
    grid: Sequence[int],
    mask: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    device: Device | None = None,
) -> Tensor:
    """The positions of a grid's cells, row by row, as the program of a preset has them.

    Args:
        grid: Rows and columns; or frames, rows and columns: a size for each axis of ``spec``.
        mask: bool [batch, rows, columns], True for the cells of each picture and False for padding
            at its right and bottom. Lengths are then those of the picture.
        spec: The specification of the encoding.
        device: Device of the result; default: that of the mask, otherwise the default device.

    Returns:
        float64 [axes, 1 or batch, cells].

    Raises:
        ValueError: Sizes do not match ``spec`` or the mask.
        TypeError: The mask is not bool.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.sinusoidal_grid_positions((2, 3), spec=pe.SinusoidalSpec(8, preset="mae"))
        tensor([[[0., 0., 0., 1., 1., 1.]],
        <BLANKLINE>
                [[0., 1., 2., 0., 1., 2.]]], dtype=torch.float64)
    """
    if mask is not None:
        check_tensors(mask=mask)
    like = torch.empty(0, device=device) if mask is None else mask
    return cells(like, grid, mask, sinusoidal_text(spec))


def cells(like: Tensor, grid: Sequence[int], mask: Tensor | None, spec: str) -> Tensor:
    """:func:`sinusoidal_grid_positions` on the device of a tensor."""
    return _GRID_POSITIONS(like, spec, grid, mask)


def waved(
    x: Tensor, spec: str, positions: Tensor | None, offset: int, scale: Tensor | None
) -> Tensor:
    """:func:`sinusoidal` without keywords, which are slow for one token."""
    if scale is None:
        return _SINUSOIDAL_ADD(x, spec, positions, offset)
    return _SINUSOIDAL_ADD(x, spec, positions, offset, scale)


def sinusoidal_encode(
    positions: Tensor,
    scale: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sinusoidal encodings of positions; gradients flow to floating-point positions and scale.

    Args:
        positions: int32, int64, float32 or float64 [...]; [axes, ...] for several axes.
        scale: Floating-point, one element: multiplies the encodings.
        spec: The specification of the encoding.
        dtype: Default: that of floating-point positions, otherwise float32.

    Returns:
        [..., embedding_dim]; NaN if a position is not finite, or is floating-point and at least
        2 ** 63.

    Raises:
        ValueError: ``scale`` does not have one element, or positions have not the axes of
            ``spec``.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> time = pe.SinusoidalSpec(64, preset="ddpm")
        >>> pe.functional.sinusoidal_encode(torch.tensor([998.39]), spec=time).shape
        torch.Size([1, 64])
    """
    text = sinusoidal_text(spec)
    if not spec.block_texts:
        return _SINUSOIDAL_ENCODE(positions, text, scale, 0, dtype)
    axes = spec.num_axes
    if positions.dim() == 0 or positions.shape[0] != axes:
        shape = list(positions.shape)
        raise ValueError(f"positions: expected [axes, ...] with {axes} axes, got {shape}")
    blocks = [
        _SINUSOIDAL_ENCODE(positions[axis], block, scale, 0, dtype)
        for axis, block in spec.block_texts
    ]
    return torch.cat(blocks, -1)


def sinusoidal_shift_matrix(distance: float, *, spec: SinusoidalSpec) -> Tensor:
    """The matrix that shifts an encoding by ``distance`` positions by rotating each pair.

    Args:
        distance: Number of positions.
        spec: The specification of the encoding.

    Returns:
        float64 [embedding_dim, embedding_dim] M with encode(p + distance) = encode(p) @ M.T.

    Raises:
        ValueError: A sine has no matching cosine, or there are several axes.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.sinusoidal_shift_matrix(3, spec=pe.SinusoidalSpec(64)).shape
        torch.Size([64, 64])
    """
    return _SINUSOIDAL_SHIFT_MATRIX(distance, sinusoidal_text(spec))
