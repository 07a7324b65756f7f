"""Tests FSDP2 and DDP: losses and parameters of a few steps equal those of one process."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
                logits = model(piece).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), piece.flatten()) / len(pieces)
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
    torch.testing.assert_close(model(ids), low(ids))  # bits of a product depend on where a parameter starts
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
        torch.testing.assert_close(found, expected)  # bits of a product depend on where a parameter starts
        for result in (found, expected):
            result.square().sum().backward()
        for ours, theirs in zip(model[name].parameters(), plain[name].parameters(), strict=True):
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


def check_ddp(static: bool = False, unused: bool = False, accumulate: bool = False, rows: str = "dense") -> None:
    plain = Model(rows, unused)
    model = DistributedDataParallel(copy.deepcopy(plain), static_graph=static, find_unused_parameters=unused)
    losses = mean(train(model, lambda ids: own(ids).chunk(1 + accumulate)))
    torch.testing.assert_close(losses, torch.stack(train(plain)))
    same(model, plain)


def check_fsdp_rows() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    table = fully_shard(pe.TokenEmbedding(ROWS, DIM, gradient="rows"), mesh=mesh)
    refused((table(batches()[0]).sum().backward, NotImplementedError, "SparseCPU"))


TWO: dict[str, Callable[[], None]] = {
    "fsdp, resharded": partial(check_fsdp, True, False),
    "fsdp": partial(check_fsdp, False, False),
    "fsdp with offload": partial(check_fsdp, True, True),
    "fsdp with mixed precision": check_mixed_precision,
    "methods other than forward": check_other_methods,
    "fsdp takes no row gradients": check_fsdp_rows,
    "ddp with a static graph": partial(check_ddp, static=True),
    "ddp with unused parameters": partial(check_ddp, unused=True),
    "ddp with accumulated gradients": partial(check_ddp, accumulate=True),
    "ddp with row gradients": partial(check_ddp, rows="rows"),
}
FOUR: dict[str, Callable[[], None]] = {
    "padding after meta in two dimensions": check_padding_after_meta,
    "fsdp with tensor parallel": check_fsdp_with_tensor_parallel,
}


@pytest.mark.parametrize("name", TWO)
def test_in_two_processes(name: str, two: Processes) -> None:
    two.run(TWO[name])


@pytest.mark.parametrize("name", FOUR)
def test_in_four_processes(name: str, four: Processes) -> None:
    four.run(FOUR[name])
