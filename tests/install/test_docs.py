"""The C++ fragments of the documentation compile, link and run in a separate CMake project."""

import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / f"docs-test-{torch.__version__}"
HEADERS = ["posembed/posembed.h", "cstdio", "fstream", "iostream", "string"]
PROJECT = """cmake_minimum_required(VERSION 3.24)
project(Fragments LANGUAGES CXX)
find_package(PosEmbed REQUIRED)
add_executable(fragments main.cpp)
target_link_libraries(fragments PRIVATE PosEmbed::posembed)
"""


def fragments() -> list[str]:
    """The C++ blocks of the documentation that are not whole programs."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        code = re.findall(r"```cpp\n(.*?)```", page.read_text(), re.DOTALL)
        found += [part for part in code if "int main" not in part and "--8<--" not in part]
    return found


def program(parts: list[str]) -> str:
    functions = "".join(f"void part_{i}() {{\n{code}}}\n" for i, code in enumerate(parts))
    calls = "".join(f"  part_{i}();\n" for i in range(len(parts)))
    includes = "".join(f"#include <{header}>\n" for header in HEADERS)
    return f"{includes}{functions}int main() {{\n{calls}}}\n"


def write(path: Path, text: str) -> None:
    """Writes a file only if its text changes, so that unchanged files are not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def run(*command: object) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_fragments_run() -> None:
    parts = fragments()
    assert len(parts) >= 3
    WORK.mkdir(parents=True, exist_ok=True)
    write(WORK / "CMakeLists.txt", PROJECT)
    write(WORK / "main.cpp", program(parts))
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    build = WORK / "build"
    run("cmake", "-S", WORK, "-B", build, "-G", "Ninja", f"-DPosEmbed_DIR={folder}")
    run("cmake", "--build", build)
    run(build / "fragments")
