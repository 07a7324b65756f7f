"""What ``make demo`` runs: a pretrained input layer, then language models in C++ and in Python.

Fails if the input layer differs from transformers', or the Python twin from the C++ program.
The table of losses and the curves are drawn into build/examples.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build" / "examples"


def run(*command: object) -> str:
    """Runs one part, prints what it prints and its time; where it fails, the demo ends."""
    start = time.perf_counter()
    words = [str(word) for word in command]
    process = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    print(f"{process.stdout}({time.perf_counter() - start:.0f} s)", flush=True)
    return process.stdout


def build_language_model() -> Path:
    """Builds the C++ program against the installed package, as any other project would."""
    source, build = EXAMPLES / "cpp" / "language_model", BUILD / "language_model"
    command = [sys.executable, "-m", "posembed", "--cmake-dir"]
    package = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    options = ["-G", "Ninja", "--log-level=WARNING", f"-DPosEmbed_DIR={package}"]
    subprocess.run(["cmake", "-S", source, "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    return build / "language_model"


def read_table(text: str) -> tuple[dict[str, list[float | None]], list[int]]:
    """The table that the language models print last: losses of each method, and lengths."""
    rows = [line.split() for line in text.splitlines()]
    head = next(i for i, row in enumerate(rows) if row and all(cell.isdigit() for cell in row))
    losses = {
        method: [None if cell == "n/a" else float(cell) for cell in cells]
        for method, *cells in rows[head + 1 :]
    }
    return losses, [int(cell) for cell in rows[head]]


def read_curves(file: Path) -> dict[str, tuple[list[int], list[float]]]:
    """The losses of each method's training by step."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    with file.open() as stream:
        for row in csv.DictReader(stream):
            steps, losses = curves.setdefault(row["method"], ([], []))
            steps.append(int(row["step"]))
            losses.append(float(row["loss"]))
    return curves


def draw(table: str, curves: Path) -> None:
    """Pictures of the table and of the curves, beside the programs."""
    import posembed as pe

    pictures = {
        "extrapolation.png": pe.plot.extrapolation(*read_table(table)),
        "losses.png": pe.plot.losses(read_curves(curves)),
    }
    for name, axes in pictures.items():
        axes.figure.savefig(BUILD / name)
        print(f"drawn: {(BUILD / name).relative_to(ROOT)}")


def main() -> int:
    # Waiting threads give their core away: otherwise a machine that does other things too takes ten
    # times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    python, text = sys.executable, sysconfig.get_path("stdlib")
    losses = BUILD / "losses.csv"
    try:
        print("== Real sentences through MiniLM's input layer", flush=True)
        run(python, EXAMPLES / "python" / "minilm_input.py")
        print("\n== A C++ program trains a language model with each position method", flush=True)
        table = run(build_language_model(), "--text", text, "--losses", losses)
        draw(table, losses)
        print("\n== Its Python twin takes the first steps", flush=True)
        twin = EXAMPLES / "python" / "language_model.py"
        run(python, twin, "--text", text, "--compare", losses)
    except subprocess.CalledProcessError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
