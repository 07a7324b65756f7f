"""Functional embedding bags: pools table rows by bags of ids."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.functional._options import BagMode, Gradient
from posembed.functional._token import padding_row
from posembed.glue.gate import check_tensors, gated

_TOKEN_BAG = gated(torch.ops.posembed.token_bag.default, sharded=True)
_SUM = (-1, False, "sum", None, "dense")  # the defaults of the operator's last options


def token_bag(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    mode: BagMode = "sum",
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    gradient: Gradient = "dense",
) -> Tensor:
    """The sum, mean or maximum of the rows of each bag of ids, in float32 and rounded once.

    Args:
        ids: int32 or int64 [bags, size]; or [count], split into bags by ``offsets``.
        weight: float32, float64, bfloat16 or float16 [num_embeddings, embedding_dim].
        offsets: int32 or int64 [bags]: the start of each bag. They start at 0 and do not decrease;
            a bag whose offset equals the next one is empty.
        weights: Per-id weights for ``mode="sum"``, in the shape of ``ids`` and the dtype of
            ``weight``. A weighted mean is a sum with weights that add up to 1.
        mode: "sum", "mean" or "max". If maxima are equal, the first gets the gradient.
        padding_idx: The id to skip in every bag.
        include_last_offset: ``offsets`` has one more element: the number of ids.
        gradient: "dense", or "rows" for a coalesced sparse gradient of the rows that were looked
            up; it has no second derivative.

    Returns:
        [bags, embedding_dim] in the dtype of ``weight``; zeros for an empty bag.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.
        IndexError: An id is outside the table, or an offset is invalid.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
        >>> ids, offsets = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2])
        >>> pe.functional.token_bag(ids, weight, offsets)
        tensor([[1., 1.],
                [4., 4.]])
        >>> pe.functional.token_bag(ids, weight, offsets, torch.tensor([0.5, 1.0, 0.5, 0.0]))
        tensor([[0.5000, 1.0000],
                [1.0000, 1.0000]])
    """
    if padding_idx is not None:
        check_tensors(weight=weight)
    padding = padding_row(padding_idx, weight)
    return pooled(weight, ids, offsets, padding, include_last_offset, mode, weights, gradient)


def pooled(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    padding: int,
    include_last_offset: bool,
    mode: BagMode,
    weights: Tensor | None,
    gradient: Gradient,
) -> Tensor:
    """:func:`token_bag` with the operator's arguments, which are slow to pass for one bag."""
    options = (padding, include_last_offset, mode, weights, gradient)
    if weights is None and options == _SUM:
        return _TOKEN_BAG(weight, ids, offsets)
    return _TOKEN_BAG(weight, ids, offsets, *options)
