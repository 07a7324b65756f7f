"""Shapes of results whose size depends on data, for torch.compile and torch.export.

All other operators have Meta kernels in C++, but only Python can name an unknown size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def embedding_backward_rows(
    gradient: Tensor,
    ids: Tensor,
    *,
    num_embeddings: int,
    padding_idx: int = -1,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    vocabulary_start: int = -1,
) -> tuple[Tensor, Tensor]:
    """Ids and values of the looked-up rows, one for each distinct id."""
    rows = torch.library.get_ctx().new_dynamic_size()
    row_ids = torch.empty(rows, dtype=torch.int64, device=gradient.device)
    return row_ids, gradient.new_empty(rows, gradient.shape[-1])


def token_bag_backward_rows(
    gradient: Tensor,
    ids: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    maxima: Tensor | None = None,
    *,
    num_embeddings: int,
    mode: str = "sum",
    padding_idx: int = -1,
    include_last_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """As in embedding_backward_rows."""
    return embedding_backward_rows(gradient, ids, num_embeddings=num_embeddings)


def input_embedding_backward_rows(
    output_gradient: Tensor,
    mean: Tensor,
    rstd: Tensor,
    token: Tensor,
    ids: Tensor,
    *others: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """As in embedding_backward_rows; other gradients as in input_embedding_backward."""
    found = torch.ops.posembed.input_embedding_backward(
        output_gradient, mean, rstd, token, ids, *others, **options
    )
    rows = embedding_backward_rows(output_gradient, ids, num_embeddings=token.shape[0])
    return *rows, *found[1:]


def register() -> None:
    """Registers every rule with torch."""
    torch.library.register_fake("posembed::embedding_backward_rows", embedding_backward_rows)
    torch.library.register_fake(
        "posembed::input_embedding_backward_rows", input_embedding_backward_rows
    )
    torch.library.register_fake("posembed::token_bag_backward_rows", token_bag_backward_rows)
