"""Reads the machine code of the hot CUDA kernels and fails where it has got worse.

    python scripts/machine_code.py build/dev/csrc/libposembed_kernels.so [--record]

A hot kernel must not use more registers, local memory (spilled registers), float64 instructions or
instructions for a KiB that it moves than machine_code.json records, and must move 16 bytes at a
time; one that moves no vectors, more instructions. --record writes what is found. The disassembler
is the one that triton's wheel brings.

The smallest loop that moves the most vectors counts, or the loop that a mark in the source names:

    for (...) {  // Counted: rotary::sum_kernel, 8 vectors an iteration

for all instances of a kernel, or for some: rotary_norm::norm_kernel<*, true>.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
SOURCES = Path(__file__).parent.parent / "csrc"
MARK = re.compile(r"// Counted: (\w+::\w+(?:<.*>)?), (\d+) vectors an iteration")

# With packs, as for a head_dim of 128. {T} stands for bfloat16, float16 and float32 in turn, {half}
# for the first two, {pack} for the elements of a pack.
HOT = (
    "rotary::rotate_kernel<{T}, {pack}, false, 64, exact>",
    "rotary::rotate_kernel<{T}, {pack}, true, 64, exact>",
    "rotary::rotate_kernel<{T}, {pack}, false, 64, own>",
    "rotary::rotate_kernel<BFloat16, 8, false, 512, pairs>",
    "rotary::rotate_kernel<{T}, {pack}, false, 512, by_head>",
    "rotary::sum_kernel<{T}, {pack}, false, false>",
    "rotary_norm::norm_kernel<{T}, {pack}, false, 128, true>",
    "rotary_norm::norm_kernel<{T}, {pack}, false, 128, false>",
    "rotary_norm::whole_heads_kernel<{T}, {pack}, false, 64>",
    "rotary_norm::backward_kernel<{T}, {pack}, false, 128>",
    "rotary_cache::cache_kernel<{T}, {pack}, false, false, 64>",
    "rotary_cache::cache_kernel<{T}, {pack}, false, true, 64>",
    "rotary_cache::norm_cache_kernel<{T}, {pack}, false, 128>",
    "token::gather_kernel<{T}, {pack}, false>",
    "token::sum_kernel<{T}, {pack}>",
    "token::group_kernel",
    "token::order_kernel",
    "ngram::hash_kernel<products>",
    "ngram::hash_kernel<modular>",
    "token::gather_codes_kernel<{T}, float8, 16>",
    "token::gather_codes_kernel<{half}, uint4, 16>",
    "bag::add_kernel<{T}, {pack}, false>",
    "learned::add_kernel<{T}, {pack}>",
    "learned::staged_sum_kernel<{T}, {pack}>",
    "sinusoidal::encode_kernel<{T}, {pack}, false>",
    "input::forward_kernel<{half}, 8, 3, true, false, true>",
    "input::forward_kernel<{half}, 8, 4, true, true, true>",
    "input::forward_kernel<{T}, {pack}, 4, false, false, true>",
    "input::forward_kernel<{T}, {pack}, 2, true, false, false>",
    "input::backward_kernel<{T}, {pack}, 3, true>",
    "input::backward_kernel<{T}, {pack}, 2, false>",
    "alibi::bias_kernel<{T}, false>",
    "alibi::bias_kernel<{T}, true>",
    "alibi::row_softmax_kernel<{T}>",
    "alibi::row_softmax_backward_kernel<{T}>",
)
FORMS = ("exact", "decaying", "table", "pairs", "own", "by_head", "head_table")  # rotary::Form
TYPES = (("BFloat16", 8), ("Float16", 8), ("float", 4))
TOLERANCE = 1.02  # of instructions: another order of the same work is no fault


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its address, its name with modifiers, and where it may jump."""

    address: int
    name: str
    target: int | None

    def moves_a_vector(self) -> bool:
        """Whether it is a load, store or asynchronous copy of 16 bytes of global memory."""
        return self.name.startswith(("LDG", "STG")) and ".128" in self.name


@dataclasses.dataclass
class Kernel:
    """A kernel of one architecture, as the disassembler shows it."""

    symbol: str
    name: str
    registers: int
    stack: int
    mark: int | None = None  # vectors that the loop that counts moves in an iteration
    code: list[Instruction] = dataclasses.field(default_factory=list)

    def found(self) -> dict[str, float]:
        """The numbers that are recorded; instructions are those of a warp."""
        arithmetic = ("DADD", "DMUL", "DFMA")
        float64 = sum(one.name.startswith(arithmetic) for one in self.code)
        found = {"registers": self.registers, "stack": self.stack, "float64": float64}
        if vectors(self.code) == 0:
            return {**found, "instructions": len(self.code)}
        return {**found, "per_kib": round(self.per_kib(), 1)}

    def per_kib(self) -> float:
        """Instructions for a KiB, in the loop that counts."""
        spans = [
            [other for other in self.code if one.target <= other.address <= one.address]
            for one in self.code
            if one.target is not None and one.target < one.address
        ]
        marked = [span for span in spans if vectors(span) == self.mark]
        if self.mark is not None and not marked:
            sys.exit(
                f"{self.name}: no loop moves {self.mark} vectors, as a mark in its source says"
            )
        best = max(marked or [*spans, self.code], key=lambda span: (vectors(span), -len(span)))
        return 2 * len(best) / max(1, vectors(best))  # a warp moves half of a KiB


@functools.cache
def marks() -> dict[str, int]:
    """The marks of all sources, by patterns of names."""
    files = (*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.h"))
    found = (mark for file in files for mark in MARK.findall(file.read_text()))
    return {kernel if "<" in kernel else f"{kernel}<*": int(moved) for kernel, moved in found}


def mark_of(name: str) -> int | None:
    """The vectors of the mark for a kernel's instance."""
    return next((moved for kernel, moved in marks().items() if fnmatch(name, kernel)), None)


def vectors(span: list[Instruction]) -> int:
    """How many instructions move a vector."""
    return sum(one.moves_a_vector() for one in span)


def faults(found: dict[str, float], recorded: dict[str, float]) -> Iterator[str]:
    """What exceeds the record."""
    for key, most in recorded.items():
        tolerated = most * TOLERANCE if key in ("per_kib", "instructions") else most
        if key not in found:
            yield f"no {key}: 128-bit loads and stores came or went"
        elif found[key] > tolerated:
            yield f"{key} {found[key]:g}, recorded {most:g}"


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
    """Names as in HOT: without namespaces and casts, enumerators by name."""
    names = output_of("c++filt", given="\n".join(symbols)).splitlines()
    for pattern, text in (
        (r"posembed::|\(anonymous namespace\)::|core::|\(bool\)|\(int\)", ""),
        *((rf"\(rotary::Form\){i}", form) for i, form in enumerate(FORMS)),
        (r"\(ngram::Rule\)0", "products"),
        (r"\(ngram::Rule\)2", "modular"),
        (r"\(token::Code\)0", "float8"),
        (r"\(token::Code\)2", "uint4"),
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
        name: Kernel(symbol, name, int(registers), int(stack), mark_of(name))
        for name, (symbol, registers, stack) in zip(names, usage, strict=True)
    }


def read_code(library: Path, architecture: str, kernels: list[Kernel]) -> None:
    """Reads the instructions of some kernels."""
    symbols = ",".join(kernel.symbol for kernel in kernels)
    text = output_of(disassembler(), "-sass", "-arch", architecture, "-fun", symbols, library)
    by_symbol = {kernel.symbol: kernel for kernel in kernels}
    current = None
    for line in text.splitlines():
        if function := re.match(r"\s+Function : (\S+)", line):
            current = by_symbol.get(function[1])
        found = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\S+ )?([A-Z][A-Z0-9_.]+)(.*?);", line)
        if found and current is not None:
            jump = re.search(r"0x([0-9a-f]+)\s*$", found[3]) if found[2].startswith("BRA") else None
            target = int(jump[1], 16) if jump else None
            current.code.append(Instruction(int(found[1], 16), found[2], target))


def main() -> int:
    """Prints a line for each hot kernel; 1 if one has got worse."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path, help="libposembed_kernels.so")
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--record", action="store_true", help="write what is found")
    arguments = parser.parse_args()
    if not arguments.library.is_file():
        parser.error(f"{arguments.library} is no file")
    known = kernels_of(arguments.library, arguments.architecture)
    if not known:
        print(f"skipped: {arguments.library} has no code for {arguments.architecture}")
        return 0
    names = dict.fromkeys(
        name.format(T=kind, half=kind, pack=pack)
        for name in HOT
        for kind, pack in TYPES
        if kind != "float" or "{half}" not in name
    )
    missing = [name for name in names if name not in known]
    if missing:
        sys.exit(f"{arguments.library} has no {missing[0]}: update HOT")
    hot = [known[name] for name in names]
    read_code(arguments.library, arguments.architecture, hot)
    found = {kernel.name: kernel.found() for kernel in hot}
    if arguments.record:
        lines = (f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(RECORD.read_text())
    failed = False
    for kernel in hot:
        worse = [*faults(found[kernel.name], recorded.get(kernel.name, {}))]
        worse += ["not recorded"] if kernel.name not in recorded else []
        failed = failed or bool(worse)
        numbers = " ".join(f"{key} {value:5g}" for key, value in found[kernel.name].items())
        print(f"{kernel.name:62} {numbers}", *(["WORSE:", "; ".join(worse)] if worse else []))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
