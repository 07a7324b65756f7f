"""Tests the optimizers of tables whose rows are split over processes: FSDP2's, and vocabularies."""

import copy
from typing import Any

import posembed as pe
import pytest
import torch
from support.processes import Processes
from support.refusals import refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

ROWS, DIM = 23, 16
RULES: dict[str, Any] = {
    "sgd": lambda p, **k: pe.optim.SGD(p, 0.1, 0.9, weight_decay=0.1, decay="exact", **k),
    "rowwise_adagrad": lambda p, **k: pe.optim.RowwiseAdagrad(p, 0.1, **k),
    "rowwise_adam": lambda p, **k: pe.optim.RowwiseAdam(p, 0.1, **k),
    "adam": lambda p, **k: pe.optim.Adam(p, 0.1, **k),
}


def mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def check_shards(rule: str, dtype: torch.dtype, rounding: Any) -> None:
    """The bits of the whole table, those of stochastic rounding included."""
    whole = nn.Parameter(torch.randn(ROWS, DIM).to(dtype))
    split = nn.Parameter(distribute_tensor(whole.detach(), mesh(), [Shard(0)]))
    optimizers = [RULES[rule]([p], rounding=rounding, seed=3) for p in (whole, split)]
    for _ in range(3):
        whole.grad = torch.randn(ROWS, DIM).to(dtype)
        split.grad = distribute_tensor(whole.grad, mesh(), [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(split.full_tensor(), whole)  # type: ignore[attr-defined]
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    for name, value in states[0].items():
        found = states[1][name]
        if isinstance(value, Tensor):  # gloo gathers no int16
            own = distribute_tensor(value, mesh(), [Shard(0)], src_data_rank=None).to_local()
            assert torch.equal(found.to_local(), own)
        else:
            assert found == value
    resumed = RULES[rule]([split], rounding=rounding)
    resumed.load_state_dict(optimizers[1].state_dict())
    for name, value in states[1].items():
        if isinstance(value, Tensor):
            assert torch.equal(resumed.state[split][name].to_local(), value.to_local())  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", RULES)
def test_shards_of_a_vocabulary_step_as_the_whole(rule: str, two: Processes) -> None:
    two.run(check_shards, rule, torch.float32, "nearest")
    for rounding in ("stochastic", "remainder"):
        two.run(check_shards, rule, torch.bfloat16, rounding)


def check_fsdp(rule: str) -> None:
    plain = pe.TokenEmbedding(ROWS, DIM)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh())
    optimizers = [RULES[rule](each.parameters()) for each in (plain, model)]
    for _ in range(3):
        ids = torch.randint(ROWS, (4, 6))
        part = ids.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
        for each, own, optimizer in zip((plain, model), (ids, part), optimizers, strict=True):
            optimizer.zero_grad()
            each(own).square().mean().backward()
            optimizer.step()
    whole = model.weight.full_tensor()  # type: ignore[operator]
    torch.testing.assert_close(whole, plain.weight, atol=1e-4, rtol=1e-4)
    refused((lambda: pe.optim.in_backward(model, optimizers[1]), ValueError, "module: expected got a DTensor"))  # fmt: skip
    columns = nn.Parameter(distribute_tensor(torch.randn(ROWS, DIM), mesh(), [Shard(1)]))
    refused((lambda: pe.optim.SGD([columns]), ValueError, "params: expected got Shard(dim=1)"))


@pytest.mark.parametrize("rule", RULES)
def test_fsdp_trains_as_one_process(rule: str, two: Processes) -> None:
    two.run(check_fsdp, rule)
