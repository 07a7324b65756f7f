"""Serves a table of n-grams that is larger than memory from its file.

Writes a table of float8 codes with a scale for each row (`--gigabytes`), then generates tokens: the
rows of the next token are asked for while the layers before run, so most have arrived when they are
looked up. `--evict` empties the page cache before each run, as a table larger than memory would.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import tempfile
import time
from pathlib import Path

import posembed as pe
import torch

PART = 1 << 26  # bytes that are written at a time


def write(path: Path, rows: int, dim: int) -> None:
    """A safetensors file with random codes; most of them are written again and again."""
    ends = (rows * dim, rows * dim + 4 * rows)
    header = json.dumps(
        {
            "ngram_embedding.weight": {
                "dtype": "F8_E4M3",
                "shape": [rows, dim],
                "data_offsets": [0, ends[0]],
            },
            "ngram_embedding.weight_scale": {
                "dtype": "F32",
                "shape": [rows, 1],
                "data_offsets": [*ends],
            },
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    codes = torch.randn(PART).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    scales = torch.full((PART // 4,), 0.02).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for part, size in ((codes, ends[0]), (scales, 4 * rows)):
            for begin in range(0, size, PART):
                file.write(part[: size - begin])
        file.flush()
        os.fsync(file.fileno())


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def generate(memory: pe.NgramEmbedding, tokens: int, layers: torch.nn.Module, ahead: bool) -> float:
    """Milliseconds for a token."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(50_000, (1, tokens), generator=generator)
    hidden = torch.zeros(1, 1024)
    history = memory.next_history(text[:, :0])
    begin = time.perf_counter()
    for i in range(tokens):
        token = text[:, i : i + 1]
        asked = memory.prefetch(token, history) if ahead else None
        hidden = layers(hidden)
        rows = asked.take() if asked else memory(token, history)
        hidden = hidden + rows.mean()
        history = memory.next_history(token, history)
    return 1000 * (time.perf_counter() - begin) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the table")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dim", type=int, default=256, help="numbers of a row")
    parser.add_argument("--folder", default=None, help="where the file is written")
    parser.add_argument("--evict", action="store_true", help="empty the page cache before a run")
    options = parser.parse_args()
    heads = 16
    rows = int(options.gigabytes * 1e9 / (options.dim + 4) / heads)
    spec = pe.NgramSpec.qwen4_exp(50_000, boundary=0, rows=rows)
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    layers.requires_grad_(False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "memory.safetensors")
        write(path, spec.num_embeddings, options.dim)
        for ahead in (False, True):
            if options.evict:
                evict(path)
            memory = pe.NgramEmbedding.from_file(path, spec, keep="file")
            table = memory.table
            milliseconds = generate(memory, options.tokens, layers, ahead)
            print(
                f"{'asked for ahead' if ahead else 'looked up':15}  {milliseconds:.2f} ms a token, "
                f"{table.misses} of {options.tokens * heads} rows were waited for, "
                f"{table.memory()['file'] / 1e9:.2f} GB in the file"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{peak / 2**20:.1f} GiB of memory at most")


if __name__ == "__main__":
    main()
