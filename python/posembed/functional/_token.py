"""Functional token-table lookups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from posembed.functional._options import Gradient, Initialization, is_wrapper
from posembed.glue.gate import check_tensors, gated
from posembed.glue.sharding import PLAIN, call, is_sharded, refuse_sharded, with_rows

_EMBEDDING_RESIZE = gated(torch.ops.posembed.embedding_resize.default)
_EMBEDDING = gated(torch.ops.posembed.embedding.default)
_WITH_FEATURES = gated(torch.ops.posembed.embedding_with_features.default)
PLAIN_LOOKUP = (-1, 1.0, False, -1, "dense")  # the defaults of the operator's options


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    gradient: Gradient = "dense",
    vocabulary_start: int | None = None,
) -> Tensor:
    """``scale * weight[ids]``, with a deterministic table gradient, summed in float32.

    Args:
        ids: int32 or int64 of any shape, each from 0 to num_embeddings - 1.
        weight: float32, float64, bfloat16 or float16 [num_embeddings, embedding_dim]. Subclasses of
            Tensor with their own lookup, such as quantised tables, use that.
        padding_idx: The row that gets no gradient.
        scale: Multiplies the result.
        scale_grad_by_freq: Divide a row's gradient by its id's count among ``ids``.
        gradient: "dense", or "rows" for a coalesced sparse gradient of the rows that were looked
            up; it has no second derivative.
        vocabulary_start: The id of the first row, if ``weight`` is one shard of a vocabulary, as in
            vocabulary parallelism. ``ids`` and ``padding_idx`` refer to the whole vocabulary. Ids
            of other shards give zeros and no gradient, so the results of all shards add up to that
            of the whole table.

    Returns:
        [..., embedding_dim] in the dtype of ``weight``.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.
        IndexError: An id is outside the table and ``vocabulary_start`` is None.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.randn(100, 8)
        >>> ids = torch.tensor([[1, 99]])
        >>> vectors = pe.functional.embedding(ids, weight)
        >>> parts = [
        ...     pe.functional.embedding(ids, weight[start : start + 50], vocabulary_start=start)
        ...     for start in (0, 50)
        ... ]
        >>> torch.equal(parts[0] + parts[1], vectors)
        True
    """
    if padding_idx is not None:
        check_tensors(weight=weight)
    if vocabulary_start is None:
        padding = padding_row(padding_idx, weight)
    else:
        padding = _known_id("padding_idx", padding_idx)
    start = _known_id("vocabulary_start", vocabulary_start)
    return looked_up(ids, weight, padding, scale, scale_grad_by_freq, start, gradient)


def looked_up(ids: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """:func:`embedding` with the operator's options, which are slow to pass for one token."""
    if type(weight) not in PLAIN or type(ids) is not Tensor:
        if is_sharded(weight) or is_sharded(ids):
            return call(_EMBEDDING, weight, ids, *options)
        if is_wrapper(weight):
            return _of_wrapper(ids, weight, *options)
    if options == PLAIN_LOOKUP:
        return _EMBEDDING(weight, ids)
    return _EMBEDDING(weight, ids, *options)


def _of_wrapper(
    ids: Tensor,
    weight: Tensor,
    padding: int,
    scale: float,
    by_freq: bool,
    start: int,
    gradient: str,
) -> Tensor:
    """PyTorch's lookup, which Tensor subclasses such as torchao's quantised tables implement."""
    if start >= 0:
        raise ValueError(
            f"vocabulary_start: expected none for a {type(weight).__name__}, got {start}"
        )
    padding_idx = None if padding < 0 else padding
    sparse = gradient == "rows"
    rows = nn.functional.embedding(
        ids, weight, padding_idx, scale_grad_by_freq=by_freq, sparse=sparse
    )
    return rows if scale == 1.0 else rows * scale


def embedding_with_features(
    ids: Tensor,
    weight: Tensor,
    features: Tensor,
    places: Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
    gradient: Gradient = "dense",
) -> Tensor:
    """:func:`embedding`, and in some places rows of features: those of images among tokens.

    Every row of the result is written once. Gradients of both tables are deterministic.

    Args:
        ids: int32 or int64 of any shape. Those in places of features are not read.
        weight: float32, float64, bfloat16 or float16 [num_embeddings, embedding_dim].
        features: [features, embedding_dim] in the dtype of ``weight``. They are not scaled.
        places: bool, like ids: the places of the features, in order, as many as there are. Or int32
            or int64, like ids: the row of ``features`` for each id, or -1 for ``weight[id]``.
        padding_idx: The row of ``weight`` that gets no gradient.
        scale: Multiplies the rows of ``weight``.
        gradient: Form of the gradient of ``weight``, "dense" or "rows".

    Returns:
        [..., embedding_dim] in the dtype of ``weight``.

    Raises:
        ValueError: Shapes or options are incompatible, or the number of features is not that of the
            places. On CUDA, a later call raises IndexError for the latter.
        TypeError: A dtype is not supported.
        IndexError: An id or a place is outside its table.

    Examples:
        >>> import torch, posembed as pe
        >>> ids, mask = torch.tensor([5, 0, 0, 7]), torch.tensor([False, True, True, False])
        >>> weight, features = torch.randn(100, 8), torch.randn(2, 8)
        >>> rows = pe.functional.embedding_with_features(ids, weight, features, mask)
        >>> torch.equal(rows, torch.stack([weight[5], features[0], features[1], weight[7]]))
        True
    """
    check_tensors(ids=ids, weight=weight, features=features, places=places)
    refuse_sharded(ids=ids, weight=weight, features=features, places=places)
    return _WITH_FEATURES(
        weight, features, ids, places, padding_row(padding_idx, weight), scale, gradient
    )


def embedding_resize(
    weight: Tensor,
    num_embeddings: int,
    initialization: Initialization | Tensor = "mean",
    *,
    covariance_scale: float = 1e-9,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Resizes a table to ``num_embeddings`` rows; old rows do not change.

    Args:
        weight: [rows, embedding_dim].
        num_embeddings: Number of rows of the result; if fewer than before, the last are cut off.
        initialization: The new rows: the "mean" of the old ones; "mean-and-covariance", drawn from
            the normal distribution with their mean and ``covariance_scale`` times their covariance;
            "normal", N(0, 1); or the new rows themselves.
        covariance_scale: The default is that of transformers: rows differ, logits hardly change.
        generator: Random generator for new rows, on the device of ``weight``; default: torch's
            default generator.

    Returns:
        [num_embeddings, embedding_dim], contiguous, in the dtype of ``weight``.

    Raises:
        ValueError: Shapes or options are incompatible, or ``weight`` is a DTensor that is sharded.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.embedding_resize(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), 3)
        tensor([[1., 2.],
                [3., 6.],
                [2., 4.]])
    """
    if is_sharded(weight):
        options: dict[str, Any] = {"covariance_scale": covariance_scale, "generator": generator}
        return with_rows(
            lambda whole: embedding_resize(whole, num_embeddings, initialization, **options), weight
        )
    check_tensors(weight=weight)
    given = isinstance(initialization, Tensor)
    rows = (initialization, "mean") if given else (None, initialization)
    return _EMBEDDING_RESIZE(weight, num_embeddings, *rows, covariance_scale, generator)


def _known_id(name: str, value: int | None) -> int:
    """An id in the operators' form; -1 means none."""
    if value is not None and value < 0:
        raise ValueError(f"{name}: expected an id, 0 or more, got {value}")
    return -1 if value is None else value


def padding_row(padding_idx: int | None, table: Tensor) -> int:
    """The row in the operators' form; -1 means none. A negative padding_idx counts from the end."""
    if padding_idx is None or table.dim() == 0:  # the operator rejects a scalar table
        return -1
    rows = table.shape[0]
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx: expected {-rows} to {rows - 1}, got {padding_idx}")
    return padding_idx % rows
