"""How long posembed.h takes to compile beside the headers of torch that it needs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("POSEMBED_BUILD", ROOT / "build" / "dev"))
TORCH = (
    "arg",
    "nn/cloneable",
    "nn/modules/container/any",
    "nn/modules/linear",
    "nn/pimpl",
    "types",
)


def compile_command() -> list[str]:
    """The compiler and the include directories of a program, from the build of the tests."""
    path = BUILD / "compile_commands.json"
    if not path.is_file():
        pytest.skip("needs the folder of a build")
    commands = [entry["command"] for entry in json.loads(path.read_text())]
    command = next((text for text in commands if "test_modules" in text), None)
    if command is None:
        pytest.skip("needs a build with tests")
    compiler, *words = shlex.split(command)
    kept = [compiler, "-std=c++17"]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        kept += [word] if word.startswith("-I") else []
        kept += [word, after] if word == "-isystem" else []
    return kept


def seconds_for(command: list[str], includes: str, path: Path) -> float:
    path.write_text(includes + "int main() {}\n")
    start = time.perf_counter()
    subprocess.run([*command, "-fsyntax-only", path], check=True)
    return time.perf_counter() - start


def test_time_to_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No assertion about time, which other work on the machine changes."""
    command = compile_command()
    torch = "".join(f"#include <torch/{name}.h>\n" for name in TORCH)
    alone = seconds_for(command, torch, tmp_path / "alone.cpp")
    ours = seconds_for(command, "#include <posembed/posembed.h>\n", tmp_path / "ours.cpp")
    with capsys.disabled():
        print(f"\nposembed.h {ours:.1f} s, torch's headers {alone:.1f} s: {ours / alone:.2f}")
