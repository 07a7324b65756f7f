"""Several runs of run.py side by side: one table for each case, one row for each run.

python benchmarks/run.py --case rotary --json 1.json --threads 1 --allocator reusing
python benchmarks/run.py --case rotary --json 2.json --threads 2
python benchmarks/call_table.py 1.json 2.json

Cells say how many times as fast as the column's call posembed is, by the fastest timing of each.
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


def setting(run: dict[str, Any]) -> str:
    facts = run["facts"]
    return f"{facts['threads']}, {facts['allocator']}"


def cells(result: dict[str, Any], labels: list[str]) -> list[str]:
    """Times of posembed's calls, and its speed beside the others'."""
    best, found = result["best"], []
    for label in labels:
        if label not in best:
            found.append("")
        elif label.startswith(OURS):
            found.append(measure.readable(best[label]))
        else:
            found.append(f"{measure.speed(best, OURS, label):.2f}")
    return found


def case_table(name: str, results: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The case in every run that has it, and the goals that were missed."""
    labels = list(dict.fromkeys(label for _, result in results for label in result["best"]))
    labels.sort(key=lambda label: not label.startswith(OURS))
    lines = [f"### {name}", "", f"| threads, allocator | {' | '.join(labels)} |"]
    lines.append("|---|" + "---:|" * len(labels))
    lines += [f"| {run} | {' | '.join(cells(result, labels))} |" for run, result in results]
    missed = [
        f"- {run}: {goal}" for run, result in results for goal in result["goals"] if "**" in goal
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
            (setting(run), result)
            for run in runs
            for result in run["results"]
            if result["name"] == name
        ]
        lines += case_table(name, found)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
