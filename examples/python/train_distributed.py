"""Trains a small language model on several processes: FSDP2 and tensor parallelism.

torchrun --nproc-per-node 4 train_distributed.py

The text is the standard library's own source. Losses are the same for any number of processes:
data, dropout mask and initial weights do not depend on it.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import posembed as pe
import torch
import torch.distributed as dist
from posembed.integrations.distributed import VocabularyParallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

BYTES, WIDTH, HEADS, LAYERS, DROPOUT = 256, 64, 4, 2, 0.1


def parse_settings(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of .py files (default: the standard library)",
    )
    parser.add_argument("--length", type=int, default=64, help="bytes of a training window")
    parser.add_argument("--batch", type=int, default=16, help="windows of all processes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--tensor", type=int, help="processes that share each layer (default: at most 2)"
    )
    return parser.parse_args(arguments)


class Block(nn.Module):
    """Attention and feed-forward, each added to its input, on normalised input.

    Under tensor parallelism, each process has some of the heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.rope = pe.RotaryEmbedding(WIDTH // HEADS, layout="bhsd")

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width], the same in all processes that share the layer."""
        x = x + self.output(self.attend(functional.rms_norm(x, (WIDTH,))))
        return x + self.down(functional.gelu(self.up(functional.rms_norm(x, (WIDTH,)))))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        query, key = self.rope(query, key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """A causal language model, whose output head is the token table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = pe.InputEmbedding(
            BYTES, WIDTH, positions=None, scale="sqrt_dim", dropout=DROPOUT
        )
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        nn.init.normal_(self.embed.token.weight, std=0.02)

    def forward(self, ids: Tensor, mesh: DeviceMesh, seed: Tensor, first_token: int) -> Tensor:
        """int64 ids [batch, seq] -> logits, of which each process of the mesh has some columns."""
        x = self.embed(ids, seed=seed, first_token=first_token)
        for block in self.blocks:
            x = block(x)
        x = functional.rms_norm(x, (WIDTH,))
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return self.embed.token.logits(whole)


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Shards each layer over one mesh dimension, and the batch over the other."""
    plan: dict[str, ParallelStyle] = {"embed": VocabularyParallel()}
    for name in ("query", "key", "value", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("output", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tensor"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


def read_bytes(folder: Path, size: int) -> Tensor:
    """The first ``size`` bytes of a folder's .py files, files sorted by name: int64 [size]."""
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= size:
            return torch.frombuffer(text, dtype=torch.uint8)[:size].long()
    raise ValueError(f"{folder}: expected {size} bytes of .py files, found {len(text)}")


def train(settings: argparse.Namespace) -> list[float]:
    """The loss of each step, in nats per byte; each process has the mean of all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = dist.get_world_size()
    shared = settings.tensor or min(2, processes)
    grid = (processes // shared, shared)
    mesh = init_device_mesh(device, grid, mesh_dim_names=("data", "tensor"))
    text = read_bytes(settings.text, settings.steps * settings.batch * settings.length + 1)
    inputs, targets = (each.to(device) for each in pe.data.windows(text, settings.length))
    own = settings.batch // grid[0]  # windows per step
    first = own * mesh["data"].get_local_rank()

    torch.manual_seed(0)
    model = Decoder().to(device)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(settings.steps):
        start = step * settings.batch + first
        seed = torch.tensor([step], device=device)
        token = first * settings.length
        with loss_parallel():
            logits = model(inputs[start : start + own], mesh["tensor"], seed, token)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), targets[start : start + own].flatten()
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.full_tensor().detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / processes)
    return losses


def start() -> None:
    """Joins the processes of torchrun, or makes a group of this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    settings = parse_settings()
    start()
    losses = train(settings)
    if dist.get_rank() == 0:
        for step in sorted({*range(0, settings.steps, 10), settings.steps - 1}):
            print(f"step {step:4}  loss {losses[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
