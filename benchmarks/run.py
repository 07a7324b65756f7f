"""Times posembed on the CPU beside its peers and beside a copy of the same bytes, all in one run.

make benchmark                                  every case
python benchmarks/run.py --case rotary          cases whose name contains "rotary"
python benchmarks/run.py --threads 1 --json out.json
python benchmarks/run.py --allocator reusing    freed memory is kept: new outputs cost no faults

Peers that are not installed are left out; pip install -r benchmarks/requirements.txt brings all.
benchmarks/cuda.py times CUDA kernels.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import measure
import posembed as pe
from cases import (
    additive,
    alibi,
    bag,
    diffusion,
    fused_ops,
    memory,
    one_token,
    peers,
    pretrained,
    rotary,
    token,
    transformers,
)
from plan import Plan
from setting import Setting

# By default glibc's malloc gives large blocks back at once, so that each new output
# costs page faults. Servers run allocators that keep them; these settings make glibc do so too.
# "huge pages" is torch's own switch, which makes faults fewer instead.
ALLOCATORS = {
    "default": {},
    "reusing": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "-1",
        "MALLOC_TOP_PAD_": "268435456",
    },
    "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
}

FAMILIES = (
    rotary,
    fused_ops,
    token,
    bag,
    memory,
    additive,
    alibi,
    one_token,
    pretrained,
    transformers,
    diffusion,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="", help="run the cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the names of cases and stop")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7, help="turns that each candidate has")
    parser.add_argument("--allocator", default="default", choices=list(ALLOCATORS))
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of one thread on the CPU, on a busy machine"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile peers")
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--table", type=Path, help="write the table there as well")
    return parser.parse_args()


def restart_with(variables: dict[str, str]) -> None:
    """Allocators read their settings when a process starts."""
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})


def facts(arguments: argparse.Namespace) -> dict[str, str]:
    """Facts without which a result means nothing."""
    versions = {name: importlib.metadata.version(name) for name in peers.PACKAGES if has(name)}
    return {
        "command": "python benchmarks/run.py " + " ".join(map(quoted, sys.argv[1:])),
        "date": datetime.date.today().isoformat(),
        "device": processor(),
        "threads": str(arguments.threads),
        "instruction set": pe.build_info()["instruction_set"],
        "allocator": arguments.allocator,
        "torch": torch.__version__,
        "posembed": pe.__version__,
        "python": platform.python_version(),
        "peers": ", ".join(f"{name} {version}" for name, version in versions.items()) or "none",
    }


def has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def quoted(argument: str) -> str:
    return f'"{argument}"' if " " in argument else argument


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def plans(arguments: argparse.Namespace) -> Iterator[Plan]:
    """Those that were asked for."""
    setting = Setting("cpu", arguments.allocator, not arguments.no_compile)
    for family in FAMILIES:
        for plan in family.plans(setting):
            if arguments.case in plan.name:
                yield plan


def main() -> None:
    arguments = parse()
    if arguments.cpu_time:
        arguments.threads = 1
    if arguments.list:
        print("\n".join(plan.name for plan in plans(arguments)))
        return
    restart_with(ALLOCATORS[arguments.allocator])
    torch.set_num_threads(arguments.threads)
    # Inductor's cache does not ask torch how many threads to use.
    torch._inductor.config.cpp.threads = arguments.threads
    known = facts(arguments)
    lines = [f"- {name}: {value}" for name, value in known.items()] + [""]
    print("\n".join(lines))
    results = []
    for plan in plans(arguments):
        clock = time.thread_time if arguments.cpu_time else time.perf_counter
        result = measure.run(plan.build(), arguments.rounds, clock)
        results.append(result)
        lines += measure.table(result)
        print("\n".join(measure.table(result)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"facts": known, "results": results}, indent=1))
    if arguments.table:
        arguments.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
