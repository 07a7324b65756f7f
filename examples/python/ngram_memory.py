"""A byte language model with and without a memory of n-grams.

All models read bytes of Python's standard library with the same small GRU. Two also look up the
2-, 3- and 4-grams that end at each byte (Engram, arXiv:2601.07372) in a table that learns in the
host's memory: with torch's SparseAdam, and with pe.optim.RowwiseAdagrad.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import posembed as pe
import torch
from torch import Tensor, nn

LENGTH, BATCH = 128, 16
Optimizer = torch.optim.Optimizer
TABLES: dict[str, Callable[[nn.Module], Optimizer] | None] = {
    "no memory": None,
    "SparseAdam": lambda memory: torch.optim.SparseAdam(memory.parameters(), lr=1e-2),
    "RowwiseAdagrad": lambda memory: pe.optim.RowwiseAdagrad(memory.parameters(), lr=0.3),
}
PARTS = ("forward", "backward", "step of layers", "step of table")


class Model(nn.Module):
    def __init__(self, width: int, memory: pe.NgramEmbedding | None) -> None:
        super().__init__()
        self.token = pe.TokenEmbedding(256, width)
        self.memory = memory
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        if self.memory is not None:
            x = x + self.memory(ids)
        return self.head(self.body(x)[0])


def library(limit: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library to learn from, and those of other files to test with."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [
        b"".join(file.read_bytes() for file in group)[:limit]
        for group in ([f for f in files if hash_of(f) != 0], [f for f in files if hash_of(f) == 0])
    ]
    learn, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return learn, test


def hash_of(file: Path) -> int:
    return sum(file.name.encode()) % 8


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(text.shape[0] - LENGTH, (BATCH, 1), generator=generator)
    ids = text[(starts + torch.arange(LENGTH + 1)).to(text.device)]
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: Model, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


class Watch:
    """Seconds of each part of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: Counter[str] = Counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self.now()
        yield
        self.seconds[name] += self.now() - begin

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(model: Model, learn: Tensor, table: Optimizer | None, steps: int) -> Watch:
    """Trains the model; the table has an optimizer of its own."""
    layers = [p for name, p in model.named_parameters() if not name.startswith("memory.")]
    optimizers = {"step of layers": torch.optim.Adam(layers, lr=2e-3), "step of table": table}
    watch, generator = Watch(learn.device), torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids, targets = batch(learn, generator)
        with watch.part("forward"):
            loss = loss_of(model, ids, targets)
        with watch.part("backward"):
            loss.backward()
        for name, optimizer in optimizers.items():
            if optimizer is not None:
                with watch.part(name):
                    optimizer.step()
                    optimizer.zero_grad()
    return watch


def bits_per_byte(model: Model, test: Tensor) -> float:
    """The loss on files that the model has not seen."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = [loss_of(model, *batch(test, generator)) for _ in range(20)]
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each head")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="bytes of text")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learn, test = (text.to(device) for text in library(options.bytes))
    spec = pe.NgramSpec.qwen4_exp(256, boundary=0, ngram_size=4, heads=2, rows=options.rows)
    print(f"{'':14}  bits per byte  ms per step: " + ", ".join(PARTS))
    for name, optimizer in TABLES.items():
        torch.manual_seed(0)
        model = Model(options.width, None).to(device)
        table = None
        if optimizer is not None:
            memory = pe.NgramEmbedding(spec, options.width, summed=True, gradient="rows")
            nn.init.normal_(memory.weight, std=0.02)
            memory.keep_on_host(device=device, trainable=True)
            model.memory, table = memory, optimizer(memory)
        watch = train(model, learn, table, options.steps)
        times = [1000 * watch.seconds[part] / options.steps for part in PARTS]
        bits = bits_per_byte(model, test)
        print(f"{name:14}  {bits:13.3f}  " + "  ".join(f"{time:.2f}" for time in times))


if __name__ == "__main__":
    main()
