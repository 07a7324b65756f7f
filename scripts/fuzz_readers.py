"""Builds the fuzzers of readers with clang and runs each for some seconds.

Prints executions and coverage. New inputs are kept in the build folder; one that crashes is named,
and belongs into tests/fuzz/readers/corpus once the reader is right.
python scripts/fuzz_readers.py --seconds 60 --build build/fuzz
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "fuzz" / "readers"
TARGETS = ("safetensors", "index", "words", "specification")


def build(folder: Path, *options: str) -> None:
    """Configures and builds."""
    configure = ["cmake", "-S", SOURCES, "-B", folder, "-G", "Ninja", "--log-level=WARNING"]
    compiler = ["-DCMAKE_CXX_COMPILER=clang++", f"-DPOSEMBED_PYTHON={sys.executable}"]
    subprocess.run([*configure, *compiler, *options], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)


def run(target: str, folder: Path, seconds: int) -> bool:
    """Runs a fuzzer from its corpus and what earlier runs have kept; whether it found nothing."""
    found = folder / "found" / target
    found.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-max_len=1024", "-print_final_stats=1"]
    prefix = f"-artifact_prefix={found.parent}/{target}-"
    command = [folder / f"fuzz_{target}", *options, prefix, found, SOURCES / "corpus" / target]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if process.returncode != 0:
        print(process.stderr[-4000:], file=sys.stderr)
        return False
    runs = re.findall(r"number_of_executed_units: (\d+)", process.stderr)[-1]
    edges, features = re.findall(r"cov: (\d+) ft: (\d+)", process.stderr)[-1]
    print(f"{target}: {runs} executions, {edges} edges, {features} features, no fault", flush=True)
    return True


def main() -> int:
    """Builds and runs the fuzzers that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each fuzzer")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("targets", nargs="*", default=TARGETS, help=", ".join(TARGETS))
    options, cmake = parser.parse_known_args()
    build(options.build, *cmake)
    results = [run(target, options.build, options.seconds) for target in options.targets]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
