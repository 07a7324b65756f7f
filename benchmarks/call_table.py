"""Several runs of run.py side by side: one table for each case, one column for each run.

python benchmarks/run.py --case rotary --json 1.json --threads 1 --allocator reusing
python benchmarks/run.py --case rotary --json 2.json --threads 2
python benchmarks/call_table.py 1.json 2.json

Cells say how many times as fast as the row's call posembed is, by the fastest timing of each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import measure

OURS = "posembed"


def heading(runs: list[dict[str, Any]]) -> list[str]:
    """Facts that the runs have in common."""
    first = runs[0]["facts"]
    names = ("date", "device", "instruction set", "torch", "posembed", "peers")
    return [f"- {name}: {first[name]}" for name in names]


def column(run: dict[str, Any]) -> str:
    """A run's setting in words."""
    threads = run["facts"]["threads"]
    return f"{threads} thread{'' if threads == '1' else 's'}, {run['facts']['allocator']}"


def cell(result: dict[str, Any], label: str) -> str:
    """The time of a call of posembed, or its speed beside another's."""
    best = result["best"]
    if label not in best:
        return ""
    if label.startswith(OURS):
        return str(measure.readable(best[label]))
    return f"{measure.speed(best, OURS, label):.2f}"


def case_table(name: str, found: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """The case in every run that has it, and the goals that were missed."""
    labels = list(dict.fromkeys(label for _, result in found for label in result["best"]))
    labels.sort(key=lambda label: not label.startswith(OURS))
    lines = [f"### {name}", "", f"| call | {' | '.join(column(run) for run, _ in found)} |"]
    lines.append("|---|" + "---:|" * len(found))
    for label in labels:
        lines.append(f"| {label} | {' | '.join(cell(result, label) for _, result in found)} |")
    missed = [
        f"- {column(run)}: {goal}"
        for run, result in found
        for goal in result["goals"]
        if "**" in goal
    ]
    return [*lines, "", *missed, *([""] if missed else [])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="what run.py --json wrote")
    runs = [json.loads(path.read_text()) for path in parser.parse_args().runs]
    names = list(dict.fromkeys(result["name"] for run in runs for result in run["results"]))
    lines = [*heading(runs), ""]
    for name in names:
        found = [
            (run, result) for run in runs for result in run["results"] if result["name"] == name
        ]
        lines += case_table(name, found)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
