"""The program of ``make demo``: a pretrained input layer, then language models in C++ and Python.

It fails if the input layer differs from transformers', or the Python twin from the C++ program. It
draws the table of losses and the curves into build/examples.
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
    """Runs one part and prints its output and its time; a failure ends the demo."""
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
    """The last table that the language models print: losses of each method, and lengths."""
    rows = [line.split() for line in text.splitlines()]
    head = next(i for i, row in enumerate(rows) if row and all(cell.isdigit() for cell in row))
    losses = {
        method: [None if cell == "n/a" else float(cell) for cell in cells]
        for method, *cells in rows[head + 1 :]
    }
    return losses, [int(cell) for cell in rows[head]]


def read_curves(file: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Training losses of each method by step."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    with file.open() as stream:
        for row in csv.DictReader(stream):
            steps, losses = curves.setdefault(row["method"], ([], []))
            steps.append(int(row["step"]))
            losses.append(float(row["loss"]))
    return curves


def draw(table: str, curves: Path) -> None:
    """Draws the table and the curves, beside the programs."""
    import posembed as pe

    pictures = {
        "extrapolation.png": pe.plot.extrapolation(*read_table(table)),
        "losses.png": pe.plot.losses(read_curves(curves)),
    }
    for name, axes in pictures.items():
        axes.figure.savefig(BUILD / name)
        print(f"drawn: {(BUILD / name).relative_to(ROOT)}")


def main() -> int:
    # Waiting threads give their core away; otherwise a busy machine takes ten times as long.
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
