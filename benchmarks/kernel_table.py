"""Runs a kernel benchmark once for each instruction set and prints what it says beside the goals.

python benchmarks/kernel_table.py build/dev/benchmarks/rotary_benchmark [--filter 1_threads]

With --best FILE several runs count as one: where neighbours are noisy, a case needs many rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

SETS = ("avx512", "avx2")

# Shares of the limit: (in place, cold) -> goal.
GOALS = {
    "avx512": {(True, False): 0.92, (True, True): 0.86, (False, False): 0.95, (False, True): 0.88},
    "avx2": {(True, False): 0.80, (True, True): 0.75, (False, False): 0.88, (False, True): 0.78},
}
TOKEN_NANOSECONDS = 350

# ALiBi, by the kernel: its others compute too much to be compared with a copy.
ALIBI_GOALS = {"fill": 0.95, "add": 0.95, "softmax": 0.0, "reduce": 0.0}


def measure(program: Path, instruction_set: str, pattern: str) -> dict[str, dict[str, Any]]:
    """Counters by the name of the case."""
    output = subprocess.run(
        [program, f"--benchmark_filter={pattern}", "--benchmark_format=json"],
        env={**os.environ, "POSEMBED_INSTRUCTION_SET": instruction_set},
        capture_output=True,
        check=True,
        text=True,
    )
    read = json.loads(output.stdout)
    if read["context"]["instruction_set"] != instruction_set:
        return {}
    return {case["name"].partition("/iterations")[0]: case for case in read["benchmarks"]}


Found = dict[str, dict[str, dict[str, Any]]]


def merge(found: Found, before: Found) -> None:
    """Puts the best of two runs into `found`: of the kernel, and of what it is judged by."""
    for name, cases in found.items():
        for case, counters in cases.items():
            other = before.get(name, {}).get(case, counters)
            if "best ns" in counters:
                counters["best ns"] = min(counters["best ns"], other["best ns"])
            else:
                for speed in ("GB/s", "limit GB/s"):
                    counters[speed] = max(counters[speed], other[speed])
                counters["ratio"] = counters["GB/s"] / counters["limit GB/s"]


def share(case: str, instruction_set: str, counters: dict[str, Any]) -> str:
    """The share of the limit; bold where it misses the goal."""
    kind = case.partition("/")[0]
    if kind in ALIBI_GOALS:
        goal = ALIBI_GOALS[kind]
    else:
        goal = GOALS[instruction_set][kind == "in_place", "/cold/" in case]
    text = f"{counters['ratio']:.2f}"
    return text if counters["ratio"] >= goal else f"**{text}**"


def time(counters: dict[str, Any]) -> str:
    text = f"{counters['best ns']:.0f} ns"
    return text if counters["best ns"] <= TOKEN_NANOSECONDS else f"**{text}**"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path)
    parser.add_argument("--filter", default=".", help="a regular expression of cases")
    parser.add_argument("--best", type=Path, help="keeps the best of all runs that name it")
    arguments = parser.parse_args()
    found = {name: measure(arguments.program, name, arguments.filter) for name in SETS}
    found = {name: cases for name, cases in found.items() if cases}
    if arguments.best:
        before = json.loads(arguments.best.read_text()) if arguments.best.exists() else {}
        merge(found, before)
        kept = {name: before.get(name, {}) | cases for name, cases in found.items()}
        arguments.best.write_text(json.dumps(kept))
    print(f"{datetime.date.today().isoformat()}; a goal that is missed stands in bold.\n")
    print("| case | limit, GB/s |", " | ".join(found), "|")
    print("|---|---:|" + "---:|" * len(found))
    first = next(iter(found.values()))
    for case, counters in first.items():
        if "ratio" in counters:
            shares = [share(case, name, cases[case]) for name, cases in found.items()]
            print(f"| {case} | {counters['limit GB/s']:.1f} | {' | '.join(shares)} |")
    if not any("best ns" in counters for counters in first.values()):
        return
    print("\n| one token, 32 + 8 heads |", " | ".join(found), "|")
    print("|---|" + "---:|" * len(found))
    for case, counters in first.items():
        if "best ns" in counters:
            times = [time(cases[case]) for cases in found.values()]
            print(f"| {case} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()
