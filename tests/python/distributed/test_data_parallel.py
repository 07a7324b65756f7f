"""Tests FSDP2 and DDP: losses and parameters of a few steps equal those of one process."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import posembed as pe
import pytest
import torch
from posembed.integrations.distributed import VocabularyParallel
from support.processes import Processes
from support.refusals import refused
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

DIM, HEADS, ROWS = 16, 4, 23


class Model(nn.Module):
    """A model of every module with parameters, which all learn; the output is tied to the input."""

    def __init__(self, rows: str = "dense", unused: bool = False) -> None:
        super().__init__()
        self.embed = pe.InputEmbedding(ROWS, DIM, max_positions=16, num_types=2, norm="layer", padding_idx=3)
        self.bag = pe.TokenBag(ROWS, DIM, gradient=rows)
        self.position = pe.LearnedPositionalEmbedding(16, DIM)
        self.wave = pe.SinusoidalPositionalEmbedding(DIM, learned_scale=True)
        self.rope = pe.RotaryEmbedding(DIM // HEADS, learned_frequencies=True)
        self.alibi = pe.ALiBi(HEADS, learned=True)
        self.project = nn.Linear(DIM, DIM)
        self.unused = pe.TokenEmbedding(5, DIM) if unused else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wave(self.position(self.embed(ids))) + self.bag(ids)[:, None]
        heads = self.project(x).unflatten(-1, (HEADS, -1))
        query, key = (each.transpose(1, 2) for each in self.rope(heads, heads))
        mixed = self.alibi.attention(query, key, key).transpose(1, 2).flatten(2)
        return self.embed.token.logits(mixed) / DIM


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(ROWS, (4, 6), generator=generator) for _ in range(3)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def own(ids: Tensor) -> Tensor:
    """This process's samples of a batch."""
    return ids.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


def train(model: nn.Module, parts: Any = lambda ids: [ids]) -> list[Tensor]:
    """Losses of each step, on this process's samples; several parts accumulate gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for ids in batches():
        optimizer.zero_grad()
        pieces = parts(ids)
        total = torch.zeros(())
        for number, piece in enumerate(pieces):
            with syncing(model, last=number == len(pieces) - 1):
                loss = loss_of(model, piece) / len(pieces)
                loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
    return losses


def syncing(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def mean(losses: list[Tensor]) -> Tensor:
    total = torch.stack(losses)
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


def same(model: nn.Module, plain: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole.cpu().float(), theirs.float(), atol=tolerance, rtol=tolerance, msg=name)


def shard(model: Model, **options: Any) -> Model:
    """As the documentation shows: frequencies apart, so that no policy casts them."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = options.pop("mp_policy", None)
    fully_shard(model.rope, mesh=mesh, **options)
    if policy is not None:
        options["mp_policy"] = policy
    fully_shard(model.bag, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def check_fsdp(reshard: bool, offload: bool) -> None:
    plain = Model()
    options = {"offload_policy": CPUOffloadPolicy(False) if offload else OffloadPolicy()}
    model = shard(copy.deepcopy(plain), reshard_after_forward=reshard, **options)
    losses = mean(train(model, lambda ids: [own(ids)]))
    torch.testing.assert_close(losses, torch.stack(train(plain)))
    same(model, plain)


def check_mixed_precision() -> None:
    """The forward pass of parameters in bfloat16, with frequencies in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = Model()
    model = shard(copy.deepcopy(plain), mp_policy=policy)
    low = copy.deepcopy(plain).bfloat16()
    ids = own(batches()[0])
    assert torch.equal(model(ids), low(ids))
    losses = mean(train(model, lambda ids: [own(ids)]))
    torch.testing.assert_close(losses, torch.stack(train(plain)), atol=0.05, rtol=0.05)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def check_other_methods() -> None:
    """Methods other than forward gather parameters if they are registered."""
    plain = nn.ModuleDict(
        {
            "rope": pe.RotaryEmbedding(8, learned_frequencies=True),
            "alibi": pe.ALiBi(HEADS, learned=True),
            "token": pe.TokenEmbedding(ROWS, 8),
        }
    )
    model = copy.deepcopy(plain)
    methods = {"rope": "rotate_", "alibi": "attention", "token": "logits"}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for name, method in methods.items():
        fully_shard(model[name], mesh=mesh)
        register_fsdp_forward_method(model[name], method)
    x = torch.randn(2, HEADS, 5, 8)
    with torch.no_grad():
        for each in (model, plain):
            each["rope"].layout = "bhsd"
        assert torch.equal(model["rope"].rotate_(x.clone()), plain["rope"].rotate_(x.clone()))
    for name, arguments in {"alibi": (x, x, x), "token": (x,)}.items():
        found, expected = (getattr(each[name], methods[name])(*arguments) for each in (model, plain))
        assert torch.equal(found, expected)
        for result in (found, expected):
            result.square().sum().backward()
        same_gradients(model[name], plain[name])


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def check_padding_after_meta() -> None:
    """Rows by FSDP2 on top of rows by tensor parallelism, whose order is not that of the mesh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for padding in (0, 3, 14, 22):
        with torch.device("meta"):
            embed = pe.InputEmbedding(ROWS, DIM, max_positions=4, padding_idx=padding)
        parallelize_module(embed, grid["tensor"], VocabularyParallel())
        fully_shard(embed, mesh=grid["data"])
        embed.to_empty(device="cpu")
        embed.token.reset_parameters()
        rows = embed.token.weight.full_tensor()
        assert (rows == 0).all(dim=1).nonzero().flatten().tolist() == [padding]


def check_fsdp_with_tensor_parallel() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plain = nn.Sequential(pe.InputEmbedding(ROWS, DIM, max_positions=16, norm="rms"), nn.Linear(DIM, ROWS))
    model = copy.deepcopy(plain)
    parallelize_module(model, grid["tensor"], {"0": VocabularyParallel()})
    fully_shard(model, mesh=grid["data"])
    own_part = grid["data"].get_local_rank()
    losses = mean(train(model, lambda ids: [ids.chunk(2)[own_part]]))
    torch.testing.assert_close(losses, torch.stack(train(plain)))
    same(model, plain)


def halves(ids: Tensor) -> Iterator[Tensor]:
    return own(ids).chunk(2)


def check_ddp(static: bool, unused: bool, accumulate: bool) -> None:
    plain = Model(unused=unused)
    model = DistributedDataParallel(copy.deepcopy(plain), static_graph=static, find_unused_parameters=unused)
    losses = mean(train(model, halves if accumulate else lambda ids: [own(ids)]))
    torch.testing.assert_close(losses, torch.stack(train(plain)))
    same(model, plain)


def check_ddp_rows() -> None:
    """Sparse gradients, as DDP adds them."""
    plain = Model(rows="rows")
    model = DistributedDataParallel(copy.deepcopy(plain))
    losses = mean(train(model, lambda ids: [own(ids)]))
    torch.testing.assert_close(losses, torch.stack(train(plain)))
    same(model, plain)


def check_fsdp_rows() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    table = fully_shard(pe.TokenEmbedding(ROWS, DIM, gradient="rows"), mesh=mesh)
    refused((table(batches()[0]).sum().backward, NotImplementedError, "SparseCPU"))


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(reshard: bool, two: Processes) -> None:
    two.run(check_fsdp, reshard, False)


def test_fsdp_with_offload(two: Processes) -> None:
    two.run(check_fsdp, True, True)


def test_fsdp_with_mixed_precision(two: Processes) -> None:
    two.run(check_mixed_precision)


def test_methods_other_than_forward(two: Processes) -> None:
    two.run(check_other_methods)


def test_padding_after_meta_in_two_dimensions(four: Processes) -> None:
    four.run(check_padding_after_meta)


def test_fsdp_with_tensor_parallel(four: Processes) -> None:
    four.run(check_fsdp_with_tensor_parallel)


@pytest.mark.parametrize(
    ("static", "unused", "accumulate"),
    [(True, False, False), (False, True, False), (False, False, True)],
    ids=["static graph", "unused parameters", "accumulated gradients"],
)
def test_ddp(static: bool, unused: bool, accumulate: bool, two: Processes) -> None:
    two.run(check_ddp, static, unused, accumulate)


def test_fsdp_takes_no_row_gradients(two: Processes) -> None:
    two.run(check_fsdp_rows)


def test_ddp_with_row_gradients(two: Processes) -> None:
    two.run(check_ddp_rows)
