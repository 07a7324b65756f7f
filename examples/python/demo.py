"""What ``make demo`` runs: a pretrained input layer, then language models in C++ and in Python.

Fails if the input layer differs from transformers', or the Python twin from the C++ program.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BUILD = ROOT / "build" / "examples"


def run(*command: object) -> None:
    """Runs one part and tells its time; where it fails, the demo ends."""
    start = time.perf_counter()
    subprocess.run([str(word) for word in command], check=True)
    print(f"({time.perf_counter() - start:.0f} s)", flush=True)


def build_language_model() -> Path:
    """Builds the C++ program against the installed package, as any other project would."""
    source, build = EXAMPLES / "cpp" / "language_model", BUILD / "language_model"
    command = [sys.executable, "-m", "posembed", "--cmake-dir"]
    package = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    options = ["-G", "Ninja", "--log-level=WARNING", f"-DPosEmbed_DIR={package}"]
    subprocess.run(["cmake", "-S", source, "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build], check=True)
    return build / "language_model"


def main() -> int:
    python, text = sys.executable, sysconfig.get_path("stdlib")
    losses = BUILD / "losses.csv"
    try:
        print("== Real sentences through MiniLM's input layer", flush=True)
        run(python, EXAMPLES / "python" / "minilm_input.py")
        print("\n== A C++ program trains a language model with each position method", flush=True)
        run(build_language_model(), "--text", text, "--losses", losses)
        print("\n== Its Python twin takes the first steps", flush=True)
        twin = EXAMPLES / "python" / "language_model.py"
        run(python, twin, "--text", text, "--compare", losses)
    except subprocess.CalledProcessError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
