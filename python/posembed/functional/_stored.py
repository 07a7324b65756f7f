"""Tables that lie in a file or in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from posembed.glue.gate import gated

_FILE_ROWS = gated(torch.ops.posembed.file_rows.default)


def file_rows(ids: Tensor, file: int, scale: float, dtype: torch.dtype) -> Tensor:
    """``scale`` times the rows of ids in an open table, by its handle."""
    return _FILE_ROWS(ids, file, scale, dtype)


def mapped(table: Tensor, device: torch.device) -> Tensor:
    """A tensor on ``device`` whose memory is that of a table on the CPU, which is pinned."""
    view: Tensor = torch.ops.posembed.mapped.default(table, device)
    if view.is_cuda:
        torch._dynamo.mark_static_address(view)  # CUDA graphs must not copy it
    return view
