"""Runs stages of ``make test`` and of CI one after the other, and prints the seconds of each.

    python3 scripts/stages.py requirements build ctest pytest

A stage with inputs runs only if these, or the tools that it uses, differ from those of its last
pass, whose hash .ci/stamps keeps: commit the stamps with the change. A stage that writes one of its
inputs, such as a page that is stale, fails. --all runs every stage. What a stage prints is in
build/stages/NAME.log, and on the screen if it fails.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMPS = ROOT / ".ci" / "stamps"
PINS = (".ci/requirements.txt", ".ci/newest-torch.txt")
BUILD_FILES = ("CMakeLists.txt", "*/CMakeLists.txt", "cmake")
LISTS = dict(
    re.findall(r"^(on_both_halves|programs) := (.*)$", (ROOT / "Makefile").read_text(), re.M)
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A target of make, its budget on two idle cores, and when it runs."""

    target: str
    budget: int  # seconds
    does: str
    inputs: tuple[str, ...] = ()  # pathspecs of git; none: the stage always runs
    tools: tuple[str, ...] = ()  # programs whose versions count as inputs


STAGES = {
    "install": Stage("install-locked", 180, "installs packages with known hashes"),
    "requirements": Stage("requirements", 240, "installs torch and the tools of the tests"),
    "build": Stage("build-tests", 720, "compiles posembed and its C++ tests"),
    "demo-requirements": Stage("demo-requirements", 240, "installs torch and what the demo needs"),
    "demo-build": Stage("build", 600, "compiles posembed for this machine"),
    "ctest": Stage("test-cpp", 120, "runs the C++ tests"),
    "sanitizers": Stage(
        "check-memory",
        360,
        "runs the CUDA kernels' sources on the CPU under AddressSanitizer",
        ("csrc/*.cu", "csrc/*.h", "csrc/*_cpu.cpp", "tests/cpp", *BUILD_FILES),
        ("c++",),
    ),
    "pytest": Stage("test-python", 600, "runs the Python tests"),
    "programs": Stage(
        "test-programs",
        420,
        "runs whole programs of the examples and pages, whole models, and wheels",
        (
            "docs/start/nanogpt.md",
            "examples",
            "python",
            "csrc/include",
            "cmake",
            "setup.py",
            "scripts/build_wheel.py",
            "tests/python/support",
            *LISTS["programs"].split(),
        ),
        ("c++",),
    ),
    "packaging": Stage(
        "test-packaging",
        720,
        "compiles a project that includes posembed, from scratch",
        (
            "CMakeLists.txt",
            "csrc/CMakeLists.txt",
            "csrc/binding/CMakeLists.txt",
            "cmake",
            "tests/install",
        ),
    ),
    "headers": Stage(
        "check-newest-torch",
        180,
        "compiles against the newest torch's headers",
        ("csrc", ":!csrc/*.cu", *BUILD_FILES, "scripts/newest_torch.py"),
        ("c++",),
    ),
    "machine-code": Stage(
        "check-machine-code",
        90,
        "reads the machine code of CUDA kernels",
        ("csrc/*.cu", "csrc/*.h", *BUILD_FILES, "scripts/machine_code.*"),
        ("nvcc",),
    ),
    "stand-in": Stage(
        "test-cuda-on-cpu",
        480,
        "runs the operators' CUDA half on the CPU",
        (
            "csrc",
            "tests/cpp/cuda_on_cpu",
            "tests/gpu/sweep.py",
            "tests/python/support",
            *(f"tests/python/{name}" for name in LISTS["on_both_halves"].split()),
        ),
        ("c++",),
    ),
    "lint": Stage("lint", 60, "checks format and types"),
    "docs": Stage(
        "docs",
        180,
        "runs the notebooks and builds the documentation",
        ("docs", "mkdocs.yml", "*.md", "python", "examples", "csrc/include", "benchmarks/results"),
    ),
}

FIRST = ("install", "requirements", "build", "demo-requirements", "demo-build")  # others need them


def output_of(*command: str) -> bytes:
    """What a command prints; nothing if there is no such command."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout
    except FileNotFoundError:
        return b""


def hash_of_inputs(stage: Stage) -> str:
    """A hash of names and contents of a stage's inputs, of pinned packages and of its tools."""
    files = output_of("git", "ls-files", "-z", "-co", "--exclude-standard", *stage.inputs)
    found = hashlib.sha256()
    for name in sorted({*PINS, *files.decode().split("\0")} - {""}):
        if (ROOT / name).is_file():
            found.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    for tool in stage.tools:
        found.update(output_of(tool, "--version"))
    return found.hexdigest()


def quiet(name: str, *command: str) -> bool:
    """Whether a command of a stage passes; its output goes to build/stages/name.log."""
    log = ROOT / "build" / "stages" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    return done.returncode == 0


def run(name: str, always: bool) -> tuple[str, float]:
    """Runs a stage unless its inputs have passed before; "passed", "failed" or "unchanged"."""
    stage, began = STAGES[name], time.monotonic()
    stamp = STAMPS / name
    inputs = hash_of_inputs(stage) if stage.inputs else ""
    if inputs and not always and stamp.is_file() and stamp.read_text().strip() == inputs:
        return "unchanged", 0.0
    print(f"{name}: {stage.does} …", end=" ", flush=True)
    passed = quiet(name, os.environ.get("MAKE", "make"), stage.target)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if not passed:
        print((ROOT / "build" / "stages" / f"{name}.log").read_text(errors="replace"), flush=True)
    if passed and inputs:
        passed = hash_of_inputs(stage) == inputs
        if passed:
            STAMPS.mkdir(parents=True, exist_ok=True)
            stamp.write_text(inputs + "\n")
        else:
            print(f"{name}: wrote some of its inputs, as git status shows; commit them", flush=True)
    return "passed" if passed else "failed", time.monotonic() - began


def table(rows: list[tuple[str, str, float]]) -> str:
    """The seconds of each stage beside its budget, with a warning where they are more."""
    lines = [f"{'stage':<18} {'seconds':>7} {'budget':>6}"]
    for name, outcome, seconds in rows:
        budget = STAGES[name].budget
        over = "  WARNING: above its budget" if seconds > budget else ""
        lines.append(f"{name:<18} {seconds:7.0f} {budget:6}  {outcome}{over}")
    lines.append(f"{'all':<18} {sum(row[2] for row in rows):7.0f}")
    return "\n".join(lines)


def summary(folder: Path) -> str:
    """One line for all tests of a folder of JUnit reports: passed, failed, skipped and why."""
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for report in folder.rglob("*.xml"):
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            skipped = case.find("skipped")
            broken = case.find("failure") is not None or case.find("error") is not None
            outcome = "failed" if broken else "passed" if skipped is None else "skipped"
            counts[outcome] += 1
            if outcome == "skipped":
                message = skipped.get("message") or "no reason given"
                reasons[message.splitlines()[-1]] += 1
    why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return f"{text} ({why})" if why else text


def recorded(rows: list[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    """The rows, behind those of earlier calls in $POSEMBED_STAGES if that names a file."""
    if not (name := os.environ.get("POSEMBED_STAGES")):
        return rows
    with Path(name).open("a") as file:
        file.writelines(f"{row[0]}\t{row[1]}\t{row[2]}\n" for row in rows)
    words = (line.split("\t") for line in Path(name).read_text().splitlines())
    return [(stage, outcome, float(seconds)) for stage, outcome, seconds in words]


def main() -> int:
    """Runs the stages named; returns 1 if one failed. A failed build ends them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--all", action="store_true", help="also stages whose inputs have passed")
    options = parser.parse_args()
    chosen = [STAGES[name] for name in options.stages]
    minutes = sum(stage.budget for stage in chosen if not stage.inputs) / 60
    print(
        f"Up to {minutes:.0f} minutes on two cores:", "; ".join(s.does for s in chosen), flush=True
    )
    rows = []
    for name in options.stages:
        rows.append((name, *run(name, options.all)))
        if rows[-1][1] == "failed" and name in FIRST:
            break
    print(table(recorded(rows)))
    if "pytest" in options.stages:
        print(summary(Path(os.environ["POSEMBED_BUILD"], "reports")))
    failed = [name for name, outcome, _ in rows if outcome == "failed"]
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
