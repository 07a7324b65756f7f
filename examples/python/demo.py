"""The program for ``make demo``: posembed on one screen, then language models in C++ and Python.

Fails if posembed differs from transformers, or the Python twin from the C++ program. Plots are
written to build/examples.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build" / "examples"
# A quarter of the language models' default training: enough for every kind of positions to help.
SETTINGS = (
    *("--text", sysconfig.get_path("stdlib")),
    *("--length", "32", "--batch", "16", "--steps", "640", "--held-out", "32768"),
)
NEXT = """\
Where to go next
  README.md                  install it, use it in Llama and in C++, all modules
  examples/notebooks         from tokens to positions, long context, train short and read long
  python -m posembed check   exactness and gradients on this machine"""


def run(*command: object) -> str:
    """Runs a program and returns its output; if it fails, the demo ends."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def build_language_model() -> Path:
    """Builds the C++ program against the installed package, as any other project would."""
    source, build = EXAMPLES / "cpp" / "language_model", BUILD / "language_model"
    package = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    options = ("-G", "Ninja", "--log-level=WARNING", f"-DPosEmbed_DIR={package}")
    run("cmake", "-S", source, "-B", build, *options)
    run("cmake", "--build", build)
    return build / "language_model"


def result_of(build: Future[Path]) -> Path:
    """Waits for the program; on a terminal, shows the elapsed time."""
    with tqdm(desc="compiling", bar_format="{desc} {elapsed}", leave=False, disable=None) as bar:
        while not build.done():
            wait([build], timeout=1.0)
            bar.refresh()
    return build.result()


def first_screen() -> int:
    """Shows each embedding at work; fails if posembed differs from transformers."""
    from zen import show_tokens

    tokens = show_tokens()
    import tour  # late import: torch takes seconds to load

    tour.show_embeddings(tokens)
    import beside_transformers

    print("\nBeside transformers:", flush=True)
    failed = beside_transformers.main()
    tour.draw(BUILD / "positions.png")
    print(f"\nPicture   {(BUILD / 'positions.png').relative_to(ROOT)}\n\n{NEXT}\n", flush=True)
    return failed


def read_table(text: str) -> tuple[dict[str, list[float | None]], list[int]]:
    """Parses the last table that the language models print: losses of each method, and lengths."""
    rows = [line.split() for line in text.splitlines()]
    head = next(i for i, row in enumerate(rows) if row and all(cell.isdigit() for cell in row))
    losses = {
        method: [None if cell == "n/a" else float(cell) for cell in cells]
        for method, *cells in rows[head + 1 :]
    }
    return losses, [int(cell) for cell in rows[head]]


def listed(names: list[str]) -> str:
    """Names in a sentence."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def lesson(losses: dict[str, list[float | None]], lengths: list[int]) -> str:
    """What the table says: which positions help at the trained length, and which beyond it."""
    lines = []
    for place, length in ((0, f"{lengths[0]} bytes as trained"), (-1, f"{lengths[-1]} bytes")):
        found = {method: row[place] for method, row in losses.items() if row[place] is not None}
        none = found.pop("none")
        better = [method for method, loss in found.items() if loss < none]
        worse = [method for method, loss in found.items() if loss >= none]
        told = f"{listed(better) if better else 'none'}{f'; not {listed(worse)}' if worse else ''}"
        lines.append(f"Better than no positions, in windows of {length}: {told}.")
    return "\n".join(lines)


def read_curves(file: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Training losses of each method by step."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    with file.open() as stream:
        for row in csv.DictReader(stream):
            steps, losses = curves.setdefault(row["method"], ([], []))
            steps.append(int(row["step"]))
            losses.append(float(row["loss"]))
    return curves


def smooth(
    curves: dict[str, tuple[list[int], list[float]]], width: int = 32
) -> dict[str, tuple[list[int], list[float]]]:
    """Means over steps, because single batches differ more than methods do."""
    result = {}
    for method, (steps, losses) in curves.items():
        parts = range(0, len(losses) - width + 1, width)
        means = [sum(losses[part : part + width]) / width for part in parts]
        result[method] = ([steps[part + width - 1] for part in parts], means)
    return result


def draw(table: str, curves: Path) -> None:
    """Draws the table and the curves in one figure."""
    import posembed as pe
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    pe.plot.losses(smooth(read_curves(curves)), axes=left)
    pe.plot.extrapolation(*read_table(table), axes=right)
    figure.savefig(BUILD / "language_models.png")
    print(f"Picture   {(BUILD / 'language_models.png').relative_to(ROOT)}", flush=True)


def train_language_models(build: Future[Path]) -> int:
    """Trains in C++; fails if the Python twin's losses differ."""
    import language_model

    losses = BUILD / "losses.csv"
    print("A C++ program trains one small language model with each kind of positions:", flush=True)
    table = run(result_of(build), *SETTINGS, "--losses", losses)
    print(f"{table}\n{lesson(*read_table(table))}")
    draw(table, losses)
    print("\nIts Python twin takes the first steps:", flush=True)
    return language_model.main([*SETTINGS, "--compare", str(losses)])


def main() -> int:
    # Idle threads yield their core; otherwise a busy machine takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print("posembed: from token ids to vectors that know their position.")
    print("A C++ program compiles in the background, for half a minute.\n", flush=True)
    with ThreadPoolExecutor() as background:
        build = background.submit(build_language_model)
        try:
            return first_screen() or train_language_models(build)
        except subprocess.CalledProcessError as error:
            print(f"{error.stdout or ''}failed: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
