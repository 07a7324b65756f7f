"""Functional learned positions, and rules that number tokens in padded sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from posembed.functional._offset import positions_from
from posembed.functional._options import ResamplingMethod
from posembed.glue.gate import check_tensors, gated
from posembed.glue.sharding import is_sharded, with_rows
from posembed.glue.validation import whole

_LEARNED_ENCODE = gated(torch.ops.posembed.learned_encode.default, sharded=True)
_LEARNED_EXTEND = gated(torch.ops.posembed.learned_extend.default)
_LEARNED_POSITIONS = gated(torch.ops.posembed.learned_positions.default, past="past_length")
_LEARNED_ADD = gated(torch.ops.posembed.learned_add.default, sharded=True)
_LEARNED_PACKED = gated(torch.ops.posembed.learned_packed.default, sharded=True)
_LEARNED_RESAMPLE = gated(torch.ops.posembed.learned_resample.default, sharded=True)

Grid = tuple[int, int]  # rows and columns
Window = Grid | tuple[int, int, int]  # or frames, rows and columns


def learned_add(
    x: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    *,
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    first_row: int = 0,
) -> Tensor:
    """Adds rows of a learned position table to x.

    Args:
        x: float32, float64, bfloat16 or float16 [batch, seq, embedding_dim].
        weight: [first_row + max_positions, embedding_dim], in the dtype of ``x`` (except under
            autocast).
        positions: int32 or int64 [seq] or [batch, seq], from -first_row to max_positions - 1. None:
            ``offset``, ``offset + 1``, and so on.
        offset: Position of the first token if ``positions`` is None. int32 or int64 [batch]: that
            of each sample's; beside ``cu_seqlens`` [documents]: that of each document's.
        cu_seqlens: int32 or int64 [documents + 1], where the batch is 1: the boundaries of packed
            documents. Positions restart at ``offset`` in each.
        first_row: The row of position 0.

    Returns:
        A tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.
        IndexError: A position has no row; the message names it.

    Examples:
        >>> import torch, posembed as pe
        >>> table = torch.randn(512, 768)
        >>> y = pe.functional.learned_add(torch.randn(2, 16, 768), table, offset=3)
    """
    if isinstance(offset, Tensor) or cu_seqlens is not None:
        positions, offset = positions_from(offset, positions, x, cu_seqlens=cu_seqlens), 0
    return added(x, weight, positions, offset, first_row)


def added(
    x: Tensor, weight: Tensor, positions: Tensor | None, offset: int, first_row: int
) -> Tensor:
    """:func:`learned_add` without keywords, which are slow for one token."""
    return _LEARNED_ADD(x, weight, positions, offset, first_row)


def learned_encode(weight: Tensor, positions: Tensor, *, first_row: int = 0) -> Tensor:
    """Rows of a learned position table: int32 or int64 [...] -> [..., embedding_dim].

    Arguments and errors are as in :func:`learned_add`.

    Examples:
        >>> import torch, posembed as pe
        >>> table = torch.arange(6.0).view(3, 2)
        >>> pe.functional.learned_encode(table, torch.tensor([0, -1]), first_row=1)
        tensor([[2., 3.],
                [0., 1.]])
    """
    return _LEARNED_ENCODE(weight, positions, first_row)


def learned_extend(
    weight: Tensor,
    max_positions: int,
    *,
    first_row: int = 0,
    method: Literal["linear", "cubic", "repeat"] = "linear",
) -> Tensor:
    """Lengthens a position table; see :meth:`posembed.LearnedPositionalEmbedding.extend`.

    Args:
        weight: Floating-point [first_row + positions, embedding_dim].
        max_positions: Number of positions in the result.
        first_row: The row of position 0.
        method: "linear", "cubic" or "repeat".

    Returns:
        [first_row + max_positions, embedding_dim].

    Raises:
        ValueError: ``max_positions`` is less than before, the method is unknown, or ``weight`` is a
            DTensor that is sharded.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.learned_extend(torch.tensor([[1.0], [3.0]]), 3)
        tensor([[1.],
                [2.],
                [3.]])
    """
    if is_sharded(weight):
        options: dict[str, Any] = {"first_row": first_row, "method": method}
        return with_rows(lambda whole: learned_extend(whole, max_positions, **options), weight)
    check_tensors(weight=weight)
    empty = weight.dim() == 2 and weight.shape[1] == 0
    # Interpolation rejects rows of 0 components, so add one and remove it afterwards.
    rows = torch.nn.functional.pad(weight, (0, 1)) if empty else weight
    longer: Tensor = _LEARNED_EXTEND(rows, max_positions, first_row, method)
    return longer[:, :0].contiguous() if empty else longer


def checked_grid(name: str, grid: Any) -> Grid:
    """A grid as two whole numbers of at least 1."""
    sizes = tuple(whole(name, size) for size in grid) if isinstance(grid, Iterable) else ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(
            f"{name}: expected the numbers of rows and columns, each 1 or more, got {grid!r}"
        )
    return sizes[0], sizes[1]


def same_grid(grid: Window, own: Window) -> bool:
    """Whether they are equal; False for symbolic sizes, which a graph for every grid has."""
    if not is_compiling():
        return tuple(grid) == own
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(size == to) for size, to in zip(grid, own, strict=True))


def learned_resample(
    weight: Tensor,
    grid: Grid,
    new_grid: Grid,
    *,
    method: ResamplingMethod = "bicubic",
    align_corners: bool = False,
    antialias: bool = False,
    scale_offset: float = 0.0,
) -> Tensor:
    """Resamples the table of a grid, as ``torch.nn.functional.interpolate``, with gradients.

    16-bit tables are interpolated in float32 and rounded once.

    Args:
        weight: float32, float64, bfloat16 or float16 [prefix + rows * columns, embedding_dim]. The
            rows of the prefix do not change.
        grid: Rows and columns of the table.
        new_grid: Those of the result.
        method: "bicubic" or "bilinear".
        align_corners: The corners of both grids are the same points.
        antialias: Average over all cells that a smaller grid merges.
        scale_offset: The scale is ``(new size + scale_offset) / size``; 0: ``new size / size``.

    Returns:
        [prefix + new rows * new columns, embedding_dim].

    Raises:
        ValueError: A grid is not one, has more cells than ``weight`` has rows, or an option is
            unknown.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> table = torch.tensor([[9.0], [0.0], [2.0]])  # a class token and a grid of 1 x 2
        >>> pe.functional.learned_resample(table, (1, 2), (1, 3), method="bilinear").T
        tensor([[9., 0., 1., 2.]])
    """
    how = (method, align_corners, antialias, scale_offset)
    return _LEARNED_RESAMPLE(weight, grid, new_grid, *how)


def learned_packed(
    weight: Tensor,
    grid: Grid,
    grids: Tensor,
    *,
    merge: int = 1,
    num_tokens: int | None = None,
    method: ResamplingMethod = "bicubic",
    align_corners: bool = False,
    antialias: bool = False,
    scale_offset: float = 0.0,
) -> Tensor:
    """Rows of pictures of any sizes that are packed one after another, with gradients.

    Each picture's are those of :func:`learned_resample`, in the order of its tokens, for each of
    its frames. 16-bit tables are interpolated in float32 and rounded once.

    Args:
        weight: float32, float64, bfloat16 or float16 [prefix + rows * columns, embedding_dim].
        grid: Rows and columns of the table.
        grids: int32 or int64 [pictures, 3]: frames, rows and columns of patches, as
            ``image_grid_thw`` of processors; or [pictures, 2].
        merge: The tokens of a frame are ordered by squares of ``merge`` x ``merge``.
        num_tokens: The number of tokens, if known; otherwise it is read, for which a GPU is waited
            for and which a compiled program does not know.
        method: "bicubic" or "bilinear".
        align_corners: The corners of both grids are the same points.
        antialias: False; a token is the sum of a fixed number of cells.
        scale_offset: As in :func:`learned_resample`.

    Returns:
        [tokens, embedding_dim].

    Raises:
        ValueError: A grid is not one, ``antialias`` is True, or ``grids`` do not fit ``merge`` or
            ``num_tokens`` (checked on the CPU).
        TypeError: A dtype is not supported.
        IndexError: On CUDA, ``grids`` do not fit.

    Examples:
        >>> import torch, posembed as pe
        >>> table = torch.tensor([[0.0], [2.0]])  # a grid of 1 x 2
        >>> grids = torch.tensor([[1, 1, 3], [2, 1, 2]])  # a picture, and two frames
        >>> pe.functional.learned_packed(table, (1, 2), grids, method="bilinear").T
        tensor([[0., 1., 2., 0., 2., 0., 2.]])
    """
    how = (method, align_corners, antialias, scale_offset)
    return _LEARNED_PACKED(weight, grid, grids, merge, num_tokens, *how)


def roberta_positions(ids: Tensor, padding_idx: int, *, past_length: int = 0) -> Tensor:
    """Numbers the tokens of padded sequences as RoBERTa does.

    Args:
        ids: int32 or int64 [..., seq].
        padding_idx: The padding id.
        past_length: Number of cached tokens.

    Returns:
        int64 [..., seq]: 0, 1, and so on for tokens, -1 for padding. In a table with
        ``first_row = padding_idx + 1``, -1 is the row before position 0.

    Raises:
        ValueError: ``past_length`` is negative, or ``ids`` is a scalar.
        TypeError: ``ids`` are not int32 or int64.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.roberta_positions(torch.tensor([[0, 31414, 2, 1, 1]]), padding_idx=1)
        tensor([[ 0,  1,  2, -1, -1]])
    """
    check_tensors(ids=ids)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids: expected int32 or int64, got {ids.dtype}")
    return _LEARNED_POSITIONS(ids.ne(padding_idx), past_length)


def opt_positions(attention_mask: Tensor, *, past_length: int = 0) -> Tensor:
    """Numbers the tokens of padded sequences as OPT does (``first_row = 2``).

    Args:
        attention_mask: bool, int32 or int64 [..., past_length + seq], 0 for padding.
        past_length: Number of cached tokens.

    Returns:
        int64 [..., seq]: positions of the uncached tokens; -1 for padding.

    Raises:
        ValueError: ``past_length`` is longer than the mask.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.opt_positions(torch.tensor([[0, 0, 1, 1, 1]]))
        tensor([[-1, -1,  0,  1,  2]])
    """
    check_tensors(attention_mask=attention_mask)
    return _LEARNED_POSITIONS(attention_mask, 0, past_length)


def fairseq_positions(ids: Tensor, padding_idx: int) -> Tensor:
    """Numbers the tokens of padded sequences as fairseq does (``first_row = padding_idx + 1``).

    Arguments and result are as in :func:`roberta_positions`.
    """
    return roberta_positions(ids, padding_idx)
