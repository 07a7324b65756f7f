"""Tests tables of n-grams whose rows are spread over processes."""

import copy
import re
from pathlib import Path
from typing import Any

import posembed as pe
import pytest
import torch
from safetensors.torch import save_file
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


def resident(view: torch.Tensor) -> int:
    """The bytes of a mapped file that this process has touched."""
    for mapping in Path("/proc/self/smaps").read_text().split("VmFlags"):
        found = re.search(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ +/", mapping)
        if found and int(found[1], 16) <= view.data_ptr() < int(found[2], 16):
            rss = re.search(r"Rss: +(\d+) kB", mapping)
            assert rss is not None
            return int(rss[1]) << 10
    raise AssertionError("the table is not a mapped file")


def check_file(path: str) -> None:
    """Each process touches its own rows of a file, and no others."""
    mesh: Any = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    view = pe.pretrained.open_vectors(path).tensor("weight")
    weight = distribute_tensor(view, mesh, [Shard(0)], src_data_rank=None)
    token = pe.TokenEmbedding.from_pretrained(weight)
    ids = torch.tensor([0, 4000, 7999, 4001, 3999])
    found = token(ids).full_tensor()
    assert resident(view) < view.nbytes * 0.75
    assert torch.equal(found, view[ids])
    view.sum()
    assert resident(view) >= view.nbytes


def test_rows_of_a_file_over_processes(two: Processes, tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    save_file({"weight": torch.randn(8000, 256)}, path)
    two.run(check_file, str(path))
