"""Tests a wheel in new environments, each with a torch and a Python of its own.

    python scripts/test_wheel.py dist/posembed-*.whl --torches 2.11 2.15 --pythons python3.12

In each: ``pip install`` of torch and the wheel, ``python -m posembed check``, the C++ quickstart,
and the bits of modules beside those of the posembed that this interpreter imports. Environments are
in build/test-wheel, take some GB, and are removed. ``make test-wheel`` calls this script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "test-wheel"
QUICKSTART = ROOT / "examples/cpp/quickstart"
PIP = ("-m", "pip", "install", "--quiet", "--only-binary", ":all:")
# Prints a hash of the results and gradients of modules, whose inputs no version of torch changes.
BITS = """
import hashlib
import posembed as pe
import torch

def numbers(*shape):
    return (torch.arange(torch.Size(shape).numel()) * 37 % 101 / 64 - 0.75).view(shape)

found, ids = hashlib.sha256(), torch.arange(24).view(2, 12) * 7 % 50
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    query = numbers(2, 12, 4, 64).to(dtype).requires_grad_()
    token = pe.TokenEmbedding(50, 64).to(dtype)
    with torch.no_grad():
        token.weight.copy_(numbers(50, 64))
    results = [pe.RotaryEmbedding(64)(query, offset=100), token(ids)]
    torch.autograd.backward(results, [numbers(*each.shape).to(dtype) for each in results])
    results += [query.grad, token.weight.grad, pe.ALiBi(4)(12, dtype=dtype)]
    results.append(pe.SinusoidalPositionalEmbedding(64)(numbers(2, 12, 64).to(dtype)))
    for each in results:
        found.update(bytes(each.detach().contiguous().view(torch.uint8).flatten().tolist()))
print(found.hexdigest())
"""


def run(*command: object, **environment: str) -> str:
    """What a command prints; if it fails, its output is the message."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, env=inherited | environment, cwd=WORK
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)[:200]}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment(folder: Path, torch: str, interpreter: str) -> Path:
    """The interpreter of a new environment with this torch."""
    run(interpreter, "-m", "venv", folder)
    name = f"torch=={torch}" + ".*" * (torch.count(".") == 1)
    run(folder / "bin" / "python", *PIP, name, "numpy")
    return folder / "bin" / "python"


def check(python: Path, wheel: Path, bits: str) -> str:
    """Tries the wheel in an environment and tells what was found."""
    began = time.monotonic()
    run(python, *PIP, "--no-index", "--no-deps", wheel)  # what it requires is there
    seconds = time.monotonic() - began
    run(python, "-m", "posembed", "check")
    if run(python, "-c", BITS) != bits:
        raise RuntimeError("modules have other bits than those of the source build")
    package = run(python, "-m", "posembed", "--cmake-dir").strip()
    with tempfile.TemporaryDirectory() as build:
        options = [f"-DPosEmbed_DIR={package}", f"-DPOSEMBED_PYTHON={python}"]
        run("cmake", "-S", QUICKSTART, "-B", build, "-G", "Ninja", *options)
        run("cmake", "--build", build)
        if not run(Path(build) / "quickstart").startswith("[2, 128, 768]"):
            raise RuntimeError("the quickstart prints something else")
    versions = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
    return f"torch, Python {run(python, '-c', versions).strip()}: installed in {seconds:.1f} s"


def main() -> int:
    """Returns 1 if the wheel fails in an environment, or if there was none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torches", nargs="+", required=True)
    parser.add_argument("--pythons", nargs="+", required=True)
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    source = os.environ.get("PYTHONPATH", "")
    bits = run(sys.executable, "-c", BITS, PYTHONPATH=source)
    outcomes = []
    for torch in arguments.torches:
        for interpreter in filter(shutil.which, arguments.pythons):
            folder = WORK / f"torch{torch}-{Path(interpreter).name}"
            shutil.rmtree(folder, ignore_errors=True)
            outcomes.append(True)
            try:
                python = environment(folder, torch, interpreter)
                print(check(python, arguments.wheel.resolve(), bits), flush=True)
            except RuntimeError as error:
                if f"No matching distribution found for torch=={torch}" in str(error):
                    outcomes.pop()
                    print(f"torch {torch}, {interpreter}: not on the index", flush=True)
                else:
                    outcomes[-1] = False
                    print(f"torch {torch}, {interpreter}: FAILED\n{error}", flush=True)
            shutil.rmtree(folder)
    size = arguments.wheel.stat().st_size / 1e6
    print(f"{arguments.wheel.name}, {size:.1f} MB: {sum(outcomes)} of {len(outcomes)} passed")
    return 0 if outcomes and all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
