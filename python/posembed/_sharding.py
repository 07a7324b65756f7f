"""Sets values of parameters that FSDP2 or tensor parallelism may have sharded (DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _sharded(values: Tensor, mesh: Any, placements: Any) -> Tensor:
    """Shards values that are replicated in every process, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, mesh, placements, src_data_rank=None)


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copies values into a parameter, or this process's shard of them into its shard."""
    with torch.no_grad():
        mesh: Any = getattr(parameter, "device_mesh", None)  # avoids a slow import
        if mesh is not None:
            values = _sharded(values.to(parameter.device), mesh, parameter.placements)  # type: ignore[attr-defined]
        parameter.copy_(values)


def zero_row(table: Tensor, row: int) -> None:
    """Sets a row of a table to zeros."""
    with torch.no_grad():
        mesh: Any = getattr(table, "device_mesh", None)
        if mesh is None:
            table[row].zero_()
            return
        from torch.distributed.tensor import Replicate

        # table[row] would be a copy that is gathered from all processes.
        found = torch.arange(table.shape[0], device=table.device).unsqueeze(1) == row
        rows = [Replicate() if place.is_shard(1) else place for place in table.placements]  # type: ignore[attr-defined]
        table.masked_fill_(_sharded(found, mesh, rows), 0)
