"""Builds a wheel for machines without a compiler.

It is for the torch and the Python that run this, or with ``--torches`` for several torches and
every Python, without _C. It runs wherever torch's own wheels run (manylinux_2_28), which auditwheel
checks. It is for the CPU alone, or with ``--cuda`` for GPUs too. ``make wheel``, ``make wheels``
and ``make wheel-all`` call this script.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from newest_torch import unpacked

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"  # sm_80 serves 8.6 and 8.9 too
# What the linker reads of torch's wheel, beside headers.
LIBRARIES = tuple(f"torch/lib/lib{name}.so" for name in ("c10", "c10_cuda", "torch", "torch_cpu"))
# torch's wheel brings them.
EXCLUDED = ("libtorch*.so", "libc10*.so", "libgomp.so.1")
# auditwheel knows the platforms of the machine on which it runs: here, the one of the wheel.
AUDITWHEEL = """
import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())
"""


def build(folder: Path, **environment: str) -> Path:
    """Builds the wheel into an empty folder; setup.py names the variables that it reads."""
    for former in (ROOT / "build").glob("lib*"):  # setuptools would pack modules of former builds
        shutil.rmtree(former)
    options = f"-DPOSEMBED_MANYLINUX=ON {environment.pop('CMAKE_ARGS', '')}"
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation"]
    subprocess.run(
        [*command, "--no-deps", "--no-index", "--wheel-dir", folder, ROOT],
        check=True,
        env=os.environ | environment | {"CMAKE_ARGS": options.strip()},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def torch_folder(version: str) -> Path:
    """The folder of a torch: the installed one, or headers and libraries of a downloaded wheel."""
    if f"{importlib.metadata.version('torch')}.".startswith(f"{version}."):
        return Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    folder = ROOT / "build" / "torches" / sysconfig.get_platform() / version
    if not (folder / "torch").is_dir():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        name = f"torch=={version}" + ".*" * (version.count(".") == 1)
        subprocess.run([*pip, "--dest", folder, name], check=True)
        (wheel,) = folder.glob("*.whl")
        unpacked(wheel, folder, LIBRARIES)
        wheel.unlink()
    return folder / "torch"


def repair(wheel: Path, output: Path) -> Path:
    """Checks the wheel and copies it to the output folder under its platform's name."""
    machine = wheel.stem.rpartition("linux_")[2]
    platform = "manylinux_2_28_" + machine
    excluded = [word for library in EXCLUDED for word in ("--exclude", library)]
    command = [sys.executable, "-c", AUDITWHEEL, machine, "repair", "--plat", platform, *excluded]
    subprocess.run([*command, "--wheel-dir", output, wheel], check=True)
    name = wheel.name.rpartition("-")[0]
    (repaired,) = output.glob(f"{name}-*{platform}.whl")
    return repaired


def main() -> int:
    """Builds and checks the wheel that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help=f"CUDA kernels for {ARCHITECTURES}")
    parser.add_argument(
        "--torches", nargs="+", default=[], metavar="2.15", help="for these torches"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheel")
    arguments = parser.parse_args()
    if arguments.cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    options = [
        f"-DPOSEMBED_CUDA={'ON' if arguments.cuda else 'OFF'}",
        os.environ.get("CMAKE_ARGS", ""),
    ]
    torches = [f"{'.'.join(v.split('.')[:2])}={torch_folder(v)}" for v in arguments.torches]
    environment = {"CMAKE_ARGS": " ".join(options), "POSEMBED_TORCHES": os.pathsep.join(torches)}
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder), **environment)
        print(repair(wheel, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
