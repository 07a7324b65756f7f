"""Builds the fuzzers of readers with clang and runs each on many inputs, one fuzzer per core.

The readers in Python (tests/fuzz/files.py) run beside them, on a hundredth of the inputs. Prints
executions and coverage. New inputs are kept in the build folder; one that crashes is named, and
belongs into tests/fuzz/readers/corpus once the reader is right.
python scripts/fuzz_readers.py --runs 200000 --build build/fuzz
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "fuzz" / "readers"
# A third faster: no stacks of allocations (repeat a crash without this to see them), and inputs
# drawn alike.
VARIABLES = {"ASAN_OPTIONS": "malloc_context_size=0"}
OPTIONS = ["-max_len=1024", "-entropic=0", "-print_final_stats=1"]
# For one input of at most max_len; tests/fuzz/readers/budget.h has the limits for each byte.
OPTIONS += ["-malloc_limit_mb=64", "-rss_limit_mb=1024", "-timeout=30"]
TARGETS = ("safetensors", "index", "words", "specification", "positions")
IN_PYTHON = ("gguf", "formats", "configurations")
SLOWER = 100


def build(folder: Path, *options: str) -> None:
    """Configures and builds."""
    configure = ["cmake", "-S", SOURCES, "-B", folder, "-G", "Ninja", "--log-level=WARNING"]
    compiler = ["-DCMAKE_CXX_COMPILER=clang++", f"-DPOSEMBED_PYTHON={sys.executable}"]
    subprocess.run([*configure, *compiler, *options], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)


def run(target: str, folder: Path, runs: int) -> bool:
    """Runs a fuzzer from its corpus and what earlier runs have kept; whether it found nothing."""
    found = folder / "found" / target
    found.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={runs}", f"-artifact_prefix={found.parent}/{target}-", *OPTIONS]
    command = [folder / f"fuzz_{target}", *options, found, SOURCES / "corpus" / target]
    start = time.monotonic()
    process = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env={**os.environ, **VARIABLES}
    )
    if process.returncode != 0:
        print(process.stderr[-4000:], file=sys.stderr)
        return False
    done = re.findall(r"number_of_executed_units: (\d+)", process.stderr)[-1]
    edges = re.findall(r"cov: (\d+)", process.stderr)[-1]
    speed = f"{int(done) / (time.monotonic() - start):.0f} per second"
    print(f"{target}: {done} executions, {speed}, {edges} edges, no fault", flush=True)
    return True


def run_in_python(target: str, runs: int) -> bool:
    """Runs a fuzzer of a reader in Python; whether it found nothing."""
    command = [sys.executable, ROOT / "tests" / "fuzz" / "files.py", target, f"--runs={runs}"]
    process = subprocess.run(command, capture_output=True, text=True)
    print(process.stdout or process.stderr[-4000:], end="", flush=True)
    return process.returncode == 0


def main() -> int:
    """Builds and runs the fuzzers that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200_000, help="of each fuzzer")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "fuzz")
    every = (*TARGETS, *IN_PYTHON)
    parser.add_argument("targets", nargs="*", default=every, help=", ".join(every))
    options, cmake = parser.parse_known_args()
    if not set(IN_PYTHON).issuperset(options.targets):
        build(options.build, *cmake)

    def one(target: str) -> bool:
        if target in IN_PYTHON:
            return run_in_python(target, max(1, options.runs // SLOWER))
        return run(target, options.build, options.runs)

    with ThreadPoolExecutor(os.cpu_count()) as cores:
        results = [*cores.map(one, options.targets)]
        return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
