"""Tests tables of n-grams whose rows are spread over processes."""

from __future__ import annotations

import copy
from typing import Any

import posembed as pe
import pytest
import torch
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

IDS = torch.tensor([[0, 7, 3, 10, 3], [7, 7, 5, 2, 99]])
SPEC = pe.NgramSpec((3, 5, 7), ((11, 13), (17, 19)), boundary=5)


def check(summed: bool, dtype: torch.dtype) -> None:
    """Each process makes the ids; rows, gradients and steps are those of one process."""
    mesh: Any = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plain = pe.NgramEmbedding(SPEC, 8, summed=summed, dtype=dtype)
    split = copy.deepcopy(plain)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh, [Shard(0)]))
    history = torch.tensor([[1, 2], [3, 4]])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, split)]
    for _ in range(2):
        expected, found = plain(IDS, history), split(IDS, history)
        assert isinstance(found, DTensor)
        assert found.placements == (Replicate() if summed else Partial(),)
        assert found.dtype == dtype
        if summed:  # each process sums its rows, so the order differs
            torch.testing.assert_close(found.full_tensor(), expected)
        else:
            assert torch.equal(found.full_tensor(), expected)
        for result, optimizer in zip((expected, found.full_tensor()), optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
        gradient = split.weight.grad
        assert gradient is not None
        torch.testing.assert_close(gradient.full_tensor(), plain.weight.grad)  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_over_processes(summed: bool, dtype: torch.dtype, two: Processes) -> None:
    two.run(check, summed, dtype)
