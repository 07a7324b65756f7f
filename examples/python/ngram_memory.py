"""A byte language model with and without a memory of n-grams.

Both models read bytes of Python's standard library with the same small GRU. The second also looks
up the 2-, 3- and 4-grams that end at each byte (Engram, arXiv:2601.07372). Its table is trained
with SparseAdam on the rows that were looked up, so a step costs the same for any number of rows.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import posembed as pe
import torch
from torch import Tensor, nn

LENGTH, BATCH = 128, 16


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
    ids = text[starts + torch.arange(LENGTH + 1)]
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: Model, ids: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def train(model: Model, learn: Tensor, test: Tensor, steps: int) -> float:
    """The loss on the other files, in bits for each byte."""
    dense = [p for name, p in model.named_parameters() if not name.startswith("memory.")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=2e-3)]
    if model.memory is not None:
        optimizers.append(torch.optim.SparseAdam(model.memory.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        loss = loss_of(model, *batch(learn, generator))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        losses = [loss_of(model, *batch(test, generator)) for _ in range(20)]
    return float(torch.stack(losses).mean()) / torch.tensor(2.0).log().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each head")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="bytes of text")
    options = parser.parse_args()
    learn, test = library(options.bytes)
    spec = pe.NgramSpec.qwen4_exp(256, boundary=0, ngram_size=4, heads=2, rows=options.rows)
    for name in ("without a memory", "with a memory"):
        torch.manual_seed(0)
        memory = None
        if name.startswith("with a"):
            memory = pe.NgramEmbedding(spec, options.width, summed=True, gradient="rows")
            nn.init.normal_(memory.weight, std=0.02)
        model = Model(options.width, memory)
        begin = time.perf_counter()
        bits = train(model, learn, test, options.steps)
        milliseconds = 1000 * (time.perf_counter() - begin) / options.steps
        table = 0 if memory is None else memory.memory()["cpu"]
        print(
            f"{name:17}  {bits:.3f} bits per byte, {milliseconds:.0f} ms per step, "
            f"table {table / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
