"""Compiles the sources that include torch's headers against those of the newest torch.

    python scripts/newest_torch.py build/dev torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl

Only the headers of the wheel are unpacked. Nothing is linked and no code is generated: the compiler
reads each source with its templates, as the build in that folder does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

# What concerns objects and precompiled headers, which are those of the build's torch, and the C++
# standard, which from torch 2.13 on is 20 (cmake/LibTorch.cmake).
DROPPED = re.compile(r" -o \S+| -Winvalid-pch| -std=\S+| -fmacro-prefix-map=\S+")
OLD_HEADERS = re.compile(r" -isystem \S+/torch/include(?:/\S+)?")


def unpacked(wheel: Path, folder: Path, others: tuple[str, ...] = ()) -> Path:
    """The include folder of a wheel of torch, below ``folder``, where other files come too."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.startswith(("torch/include/", *others))]
        packed.extractall(folder, names)
    return folder / "torch" / "include"


def commands(build: Path, include: Path) -> list[list[str]]:
    """A command that checks each source of a build that includes torch's headers."""
    found = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command, replaced = OLD_HEADERS.subn("", DROPPED.sub("", entry["command"]))
        in_library = "posembed_EXPORTS" in command or "posembed_python_EXPORTS" in command
        if replaced == 0 or not in_library or entry["file"].endswith("_pch.hxx.cxx"):
            continue
        new = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
        found.append([*shlex.split(command), *new, "-std=c++20", "-fsyntax-only"])
    return found


def precompile(checks: list[list[str]], folder: Path) -> None:
    """Compiles the library's precompiled header anew and gives it to the sources that use it."""
    header, empty = folder / "cmake_pch.hxx", folder / "empty.cpp"
    users = [command for command in checks if "-include" in command]
    shutil.copy(users[0][users[0].index("-include") + 1], header)
    empty.write_text("")
    for command in users:
        command[command.index("-include") + 1] = str(header)
    words = users[0][:-1]  # without -fsyntax-only
    words[words.index("-c") + 1] = str(empty)
    compiled = Path(f"{header}.gch")
    compiled.unlink(missing_ok=True)  # it would be read
    words[1:1] = ["-x", "c++-header"]
    subprocess.run([*words, "-o", compiled], check=True)


def main() -> int:
    """Returns 1 if a source does not compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="a build folder that CMake configured")
    parser.add_argument("wheel", type=Path, help="a wheel of torch")
    options = parser.parse_args()
    build = options.build.resolve()
    folder = build / "newest-torch"
    checks = commands(build, unpacked(options.wheel, folder))
    precompile(checks, folder)

    def fails(command: list[str]) -> bool:
        return subprocess.run(command, cwd=build, check=False).returncode != 0

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = sum(pool.map(fails, checks))
    print(f"{len(checks)} sources against {options.wheel.name}: {failed} failed")
    return 1 if failed or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
