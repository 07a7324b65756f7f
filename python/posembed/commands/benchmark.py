"""benchmark: compares posembed with copies of the same bytes and with peers, on this machine.

Peers are plain torch and the rotary embeddings of other installed libraries. A source checkout has
more benchmarks, with goals: make benchmark.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from posembed import build_info
from posembed.commands import common, measure, peers
from posembed.commands.check import devices
from posembed.commands.measure import Case
from posembed.rotary import RotaryEmbedding
from posembed.sinusoidal import SinusoidalPositionalEmbedding
from posembed.token import TokenEmbedding

if TYPE_CHECKING:
    from posembed.commands.common import Commands

VOCABULARY, WIDTH, TOKENS = 30522, 768, 8192


def add(commands: Commands) -> None:
    """Arguments of benchmark."""
    parser = common.add_command(
        commands,
        "benchmark",
        run,
        "measure posembed's calls beside copies of the same bytes and beside installed peers",
        ["", "--case rotary --threads 1", "--device cuda --json"],
    )
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=common.positive, help="default: torch's own choice")
    parser.add_argument("--rounds", type=common.positive, default=7)


def rotation(device: str) -> Case:
    """Rotates query and key of one layer into new tensors."""
    rope = RotaryEmbedding(128)
    query = torch.randn(1, 4096, 32, 128, device=device)
    key = torch.randn(1, 4096, 8, 128, device=device)
    return Case(
        "rotary, query and key into new tensors [1, 4096, 32 + 8, 128] float32",
        {
            "clone": lambda: (query.clone(), key.clone()),
            "posembed": lambda: rope(query, key),
            **peers.all_of(query, key),
        },
        "clone",
    )


def lookup(device: str) -> Case:
    """Looks up rows of a table."""
    token = TokenEmbedding(VOCABULARY, WIDTH, device=device)
    ids = torch.randint(VOCABULARY, (TOKENS,), device=device)
    return Case(
        f"tokens [{TOKENS}] of [{VOCABULARY}, {WIDTH}] float32",
        {
            "index_select": lambda: token.weight.index_select(0, ids),
            "posembed": lambda: token(ids),
            "torch": lambda: torch.nn.functional.embedding(ids, token.weight),
        },
        "index_select",
    )


def sinusoids(device: str) -> Case:
    """Computes and adds sinusoidal encodings."""
    position = SinusoidalPositionalEmbedding(WIDTH)
    x = torch.randn(8, TOKENS // 8, WIDTH, device=device)
    table = position.encode(torch.arange(TOKENS // 8, device=device))
    return Case(
        f"sinusoidal add [8, {TOKENS // 8}, {WIDTH}] float32",
        {
            "clone": lambda: x.clone(),
            "posembed": lambda: position(x),
            "torch, table at hand": lambda: x + table,
        },
        "clone",
    )


CASES: tuple[tuple[str, Callable[[str], Case]], ...] = (
    ("rotary in place", measure.rotation_in_place),
    ("rotary", rotation),
    ("tokens", lookup),
    ("sinusoidal", sinusoids),
)


@torch.no_grad()
def run(arguments: argparse.Namespace) -> int:
    """Prints a table for each case."""
    device = devices(arguments.device)[0]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    chosen = [make for name, make in CASES if arguments.case in name]
    if not chosen:
        names = ", ".join(name for name, _ in CASES)
        raise ValueError(f"--case: expected a part of one of: {names}; got {arguments.case!r}")
    known: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "instruction_set": build_info()["instruction_set"],
        "peers": ", ".join(f"{name} {version}" for name, version in peers.versions()) or "none",
    }
    if not arguments.json:
        print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in known.items()))
    found = []
    for make in chosen:
        found.append(measure.run(make(device), arguments.rounds))
        if not arguments.json:
            print("\n" + "\n".join(measure.table(found[-1])).rstrip(), flush=True)
    if arguments.json:
        common.print_json({**known, "results": found})
    else:
        print("\nMore, with goals: make benchmark in a source checkout.")
    return 0
