"""Reads the machine code of the hot CUDA kernels and fails where it has got worse.

    python scripts/machine_code.py build/dev/csrc/libposembed.so

A hot kernel must not use more registers than recorded here, nor local memory (spilled registers),
nor more float64 instructions, and must move 16 bytes at a time. The disassembler is the one that
triton's wheel brings.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Limit:
    """The limits of a kernel.

    Attributes:
        kernel: How its demangled name begins, without namespaces of posembed.
        registers: At most so many for a thread.
        stack: At most so many bytes of local memory for a thread.
        float64: At most so many float64 instructions: positions with fractions, sums.
    """

    kernel: str
    registers: int
    stack: int = 0
    float64: int = 0


# In bfloat16, with packs, as for a head_dim of 128: as measured on an H200 (docs/guide/kernels.md).
LIMITS = (
    Limit("rotary::rotate_kernel<BFloat16, 8, false, 64, exact>", 80, float64=22),
    Limit("rotary::rotate_kernel<BFloat16, 8, true, 64, exact>", 80, float64=22),
    Limit("rotary::sum_kernel<BFloat16, 8, false>", 80, float64=94),
    Limit("rotary_norm::norm_kernel<BFloat16, 8, false, 64>", 80, float64=22),
    Limit("rotary_norm::backward_kernel<BFloat16, 8, false, 64>", 128, float64=22),
    Limit("rotary_cache::cache_kernel<BFloat16, 8, false, false, 64>", 80, float64=22),
    Limit("rotary_cache::cache_kernel<BFloat16, 8, false, true, 64>", 80, float64=22),
    Limit("token::gather_kernel<BFloat16, 8>", 64),
    Limit("token::row_kernel<BFloat16, 8>", 56, float64=22),
    Limit("bag::add_kernel<BFloat16, 8>", 128),
    Limit("learned::add_kernel<BFloat16, 8>", 32),
    Limit("sinusoidal::encode_kernel<BFloat16, 8>", 104, float64=259),
    Limit("input::forward_kernel<BFloat16, 8, 2, true>", 64, float64=23),
    Limit("input::forward_kernel<BFloat16, 8, 3, true>", 64, stack=24, float64=23),
    Limit("input::forward_kernel<BFloat16, 8, 4, false>", 80, float64=23),
    Limit("input::backward_kernel<BFloat16, 8, 3, true>", 128, float64=23),
    Limit("input::backward_kernel<BFloat16, 8, 2, false>", 128, float64=23),
    Limit("alibi::fill_kernel<BFloat16, 8, true>", 48),
    Limit("alibi::fill_kernel<BFloat16, 8, false>", 64),
    Limit("alibi::add_kernel<BFloat16, 8, true>", 48),
    Limit("alibi::add_kernel<BFloat16, 8, false>", 64),
    Limit("alibi::row_softmax_kernel<BFloat16, 8, true>", 64),
    Limit("alibi::row_softmax_kernel<BFloat16, 8, false>", 80),
    Limit("alibi::row_softmax_backward_kernel<BFloat16, 8>", 128),
    Limit("alibi::softmax_backward_kernel<BFloat16, 8, true>", 40, float64=97),
)


@dataclasses.dataclass
class Kernel:
    """A kernel of one architecture, as the disassembler shows it."""

    symbol: str
    name: str
    registers: int
    stack: int
    instructions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def faults(self, limit: Limit) -> Iterator[str]:
        """The limits that are exceeded."""
        count = self.instructions
        if self.registers > limit.registers:
            yield f"{self.registers} registers, at most {limit.registers} recorded"
        if self.stack > limit.stack:
            yield f"{self.stack} bytes of local memory, at most {limit.stack} recorded"
        if not any(name.startswith(("LDG", "STG")) and ".128" in name for name in count):
            yield "no 128-bit load or store"
        if self.float64() > limit.float64:
            yield f"{self.float64()} float64 instructions, at most {limit.float64} recorded"

    def float64(self) -> int:
        """The number of float64 instructions."""
        arithmetic = ("DADD", "DMUL", "DFMA")
        return sum(n for name, n in self.instructions.items() if name.startswith(arithmetic))


def disassembler() -> Path:
    """The program in triton's package."""
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        sys.exit("scripts/machine_code.py needs cuobjdump, which the package triton brings")
    return Path(found.submodule_search_locations[0], "backends", "nvidia", "bin", "cuobjdump")


def output_of(*command: str | Path, given: str | None = None) -> str:
    """The output of a program; cuobjdump prints nothing for a library without device code."""
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, errors="replace"
    ).stdout


def demangled(symbols: list[str]) -> list[str]:
    """Names as in LIMITS: without namespaces and casts, enumerators by name."""
    names = output_of("c++filt", given="\n".join(symbols)).splitlines()
    for pattern, text in (
        (r"posembed::|\(anonymous namespace\)::|core::|\(bool\)|\(int\)", ""),
        (r"\(rotary::Form\)0", "exact"),
        (r"^void ", ""),
        (r"\(.*", ""),
    ):
        names = [re.sub(pattern, text, name) for name in names]
    return names


def kernels_of(library: Path, architecture: str) -> dict[str, Kernel]:
    """The kernels of an architecture by name, without their code."""
    text = output_of(disassembler(), "-res-usage", "-arch", architecture, library)
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", text)
    names = demangled([symbol for symbol, *_ in usage])
    return {
        name: Kernel(symbol, name, int(registers), int(stack))
        for name, (symbol, registers, stack) in zip(names, usage, strict=True)
    }


def read_code(library: Path, architecture: str, kernels: list[Kernel]) -> None:
    """Counts the instructions of some kernels."""
    symbols = ",".join(kernel.symbol for kernel in kernels)
    text = output_of(disassembler(), "-sass", "-arch", architecture, "-fun", symbols, library)
    by_symbol = {kernel.symbol: kernel for kernel in kernels}
    current = None
    for line in text.splitlines():
        if function := re.match(r"\s+Function : (\S+)", line):
            current = by_symbol.get(function[1])
        found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\S+ )?([A-Z][A-Z0-9_.]+)", line)
        if found and current is not None:
            current.instructions[found[1]] += 1


def main() -> int:
    """Prints a line for each hot kernel; 1 if one has got worse."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path, help="libposembed.so")
    parser.add_argument("--architecture", default="sm_90")
    arguments = parser.parse_args()
    if not arguments.library.is_file():
        parser.error(f"{arguments.library} is no file")
    known = kernels_of(arguments.library, arguments.architecture)
    if not known:
        print(f"skipped: {arguments.library} has no code for {arguments.architecture}")
        return 0
    missing = [limit.kernel for limit in LIMITS if limit.kernel not in known]
    if missing:
        sys.exit(f"{arguments.library} has no {missing[0]}: update LIMITS")
    hot = [known[limit.kernel] for limit in LIMITS]
    read_code(arguments.library, arguments.architecture, hot)
    failed = False
    for kernel, limit in zip(hot, LIMITS, strict=True):
        faults = [*kernel.faults(limit)]
        failed = failed or bool(faults)
        size = sum(kernel.instructions.values())
        print(
            f"{kernel.name:62} {kernel.registers:3} registers {kernel.stack:3} bytes of stack "
            f"{size:5} instructions {kernel.float64():3} in float64",
            *(["WORSE:", "; ".join(faults)] if faults else []),
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
