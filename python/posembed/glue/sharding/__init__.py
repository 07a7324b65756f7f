"""DTensors: parameters that FSDP2 or tensor parallelism have sharded, and calls of operators.

torch.distributed.tensor is slow to import, so only functions that have a DTensor import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without the slow import of its class."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def any_sharded(first: Any, second: Any) -> bool:
    """Whether one of two arguments is a DTensor, in one look."""
    plain = type(first) in PLAIN and type(second) in PLAIN
    return not plain and (is_sharded(first) or is_sharded(second))


def call(operator: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a gated operator with each process's shards; the results are DTensors."""
    from posembed.glue.sharding import calls

    result: Result = calls.call(operator.__name__, *arguments)
    return result


def summed_over_processes(tensor: Any) -> Tensor:
    """A DTensor whose partial sums are added up."""
    from torch.distributed.tensor import Replicate

    places = [Replicate() if place.is_partial() else place for place in tensor.placements]
    return tensor.redistribute(placements=places)  # type: ignore[no-any-return]


def refuse_sharded(**tensors: Tensor) -> None:
    """Raises ValueError for DTensors, where an operator takes local tensors."""
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise ValueError(
                f"{name}: expected a Tensor, got a DTensor placed {tensor.placements}; "  # type: ignore[attr-defined]
                "pass this process's part, to_local()"
            )


def with_rows(function: Callable[[Tensor], Tensor], weight: Any) -> Tensor:
    """Applies a function that changes a table's rows; the table must be replicated.

    Randomly drawn rows are those of the first process.
    """
    from torch.distributed.tensor import DTensor

    for place in weight.placements:
        if not place.is_replicate():
            raise ValueError(
                f"weight: expected Replicate(), got {place!r}; change the number of rows before "
                "the table is sharded, or redistribute it"
            )
    return DTensor.from_local(
        function(weight.to_local()), weight.device_mesh, weight.placements, run_check=True
    )


def _distributed(values: Tensor, mesh: Any, placements: Any) -> Tensor:
    """Shards values that are replicated in every process, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, mesh, placements, src_data_rank=None)


def set_values(parameter: Any, values: Tensor) -> None:
    """Copies values into a parameter, or this process's shard of them into its shard."""
    with torch.no_grad():
        if is_sharded(parameter):
            values = values.to(parameter.device)
            values = _distributed(values, parameter.device_mesh, parameter.placements)
        parameter.copy_(values)


def zero_row(table: Any, row: int) -> None:
    """Sets a row of a table to zeros."""
    with torch.no_grad():
        if not is_sharded(table):
            table[row].zero_()
            return
        from torch.distributed.tensor import Replicate

        # table[row] would be a copy that is gathered from all processes.
        found = torch.arange(table.shape[0], device=table.device).unsqueeze(1) == row
        rows = [Replicate() if place.is_shard(1) else place for place in table.placements]
        table.masked_fill_(_distributed(found, table.device_mesh, rows), 0)
