"""Fake kernels for results with data-dependent sizes, for torch.compile and torch.export.

All other operators have Meta kernels in C++, but only Python can create an unbacked size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def embedding_backward_rows(
    gradient: Tensor, num_embeddings: int, ids: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Ids and values of the looked-up rows, one for each distinct id."""
    rows = torch.library.get_ctx().new_dynamic_size()
    row_ids = torch.empty(rows, dtype=torch.int64, device=gradient.device)
    return row_ids, gradient.new_empty(rows, gradient.shape[-1])


def input_embedding_backward_rows(
    output_gradient: Tensor, mean: Tensor, rstd: Tensor, token: Tensor, ids: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """As embedding_backward_rows; other gradients are as in input_embedding_backward."""
    found = torch.ops.posembed.input_embedding_backward(
        output_gradient, mean, rstd, token, ids, *options
    )
    rows = embedding_backward_rows(output_gradient, token.shape[0], ids)
    return *rows, *found[1:]


def register() -> None:
    """Registers every rule with torch."""
    torch.library.register_fake("posembed::embedding_backward_rows", embedding_backward_rows)
    torch.library.register_fake(
        "posembed::input_embedding_backward_rows", input_embedding_backward_rows
    )
    torch.library.register_fake("posembed::token_bag_backward_rows", embedding_backward_rows)
