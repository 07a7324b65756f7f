"""Counts the instructions that CPU kernels execute for each element, on several processors.

Runs kernel_instructions (benchmarks/kernels) under QEMU's user mode, whose log names every block of
instructions that runs. Counts are exact; they tell how much a kernel does, not how long it takes.

    python benchmarks/instruction_counts.py "AVX2=qemu-x86_64 -cpu max kernel_instructions"
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator

DTYPES = ("float32", "bfloat16")


def instructions(emulator: list[str], command: list[str]) -> int:
    """The number of instructions that a program executes."""
    with tempfile.NamedTemporaryFile("r") as log:
        logged = ["-d", "in_asm,exec,nochain", "-D", log.name]
        subprocess.run([*emulator, *logged, *command], check=True, stdout=subprocess.DEVNULL)
        return sum(executed(log))


def executed(log: Iterator[str]) -> Iterator[int]:
    """The length of each block that runs, from QEMU's log, which prints a block before it runs."""
    lengths: dict[int, int] = {}
    begin = None
    for line in log:
        if line.startswith("IN:"):
            begin = None
        elif found := re.match(r"0x([0-9a-f]+):  ", line):
            if begin is None:
                begin = int(found[1], 16)
                lengths[begin] = 0
            lengths[begin] += 1
        elif found := re.match(r"Trace \d+: 0x[0-9a-f]+ \[[0-9a-f]+/([0-9a-f]+)/", line):
            yield lengths[int(found[1], 16)]


def per_element(emulator: list[str], program: str, case: str, dtype: str, elements: int) -> float:
    """The instructions of one call, for each element."""
    once, twice = (instructions(emulator, [program, case, dtype, str(n)]) for n in (1, 2))
    return (twice - once) / elements


def main() -> None:
    """Prints a table with a column for each processor and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("emulators", nargs="+", metavar="NAME=EMULATOR PROGRAM")
    arguments = parser.parse_args()
    runs = {}
    for text in arguments.emulators:
        name, _, command = text.partition("=")
        *emulator, program = shlex.split(command)
        runs[name] = (emulator, program)
    emulator, program = next(iter(runs.values()))
    listed = subprocess.run([*emulator, program], check=True, capture_output=True, text=True)
    elements, *cases = listed.stdout.splitlines()
    print("| kernel |", " | ".join(f"{n}, {dtype}" for dtype in DTYPES for n in runs), "|")
    print("|---" * (1 + len(DTYPES) * len(runs)) + "|")
    for case in cases:
        counts = [
            per_element(emulator, program, case, dtype, int(elements))
            for dtype in DTYPES
            for emulator, program in runs.values()
        ]
        print(f"| {case} |", " | ".join(f"{count:.2f}" for count in counts), "|", flush=True)


if __name__ == "__main__":
    main()
