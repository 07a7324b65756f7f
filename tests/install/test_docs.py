"""The C++ fragments of the documentation compile, link and run in a separate CMake project."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/cpp/checkpoint"
EXPORTED = ROOT / "examples/cpp/exported"
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
    run(build_project(WORK, WORK / "build") / "fragments")


def build_project(source: Path, build: Path) -> Path:
    """Builds a project that finds this posembed; returns the folder of its programs."""
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DPosEmbed_DIR={folder}")
    run("cmake", "--build", build)
    return build


def test_the_example_reads_folders(tmp_path: Path) -> None:
    """tests/cpp/configuration compares numbers; here the program runs."""
    program = build_project(EXAMPLE, WORK / "checkpoint") / "checkpoint"
    config = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = "layer 0: 64, base=500000\nlayer 1: 64, base=500000\n"
    assert run(program, "rotary", tmp_path) == expected
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tables = {"wte.weight": torch.ones(30, 4), "wpe.weight": torch.ones(9, 4)}
    save_file(tables, tmp_path / "model.safetensors")
    assert run(program, "input", tmp_path).endswith("[2, 8] -> [2, 8, 4]\n")
    failed = subprocess.run([program, "rotary", tmp_path], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("checkpoint: num_hidden_layers: missing in the configuration")


def test_the_example_runs_exported_models(tmp_path: Path) -> None:
    """Python, the C++ program and ONNX Runtime give the same token and logit."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    package, onnx = tmp_path / "model.pt2", tmp_path / "model.onnx"
    script = ROOT / "examples/python/export_model.py"
    token, logit = run(sys.executable, script, package, onnx).split()[-2:]
    program = build_project(EXPORTED, WORK / "exported") / "exported"
    found = run(program, package, 5, 17, 3).split()
    assert found[0] == token
    assert float(found[1]) == pytest.approx(float(logit), abs=1e-3)
    session = runtime.InferenceSession(onnx)
    ids = np.array([[5, 17, 3]])
    logits = session.run(None, {session.get_inputs()[0].name: ids})[0][0, -1]
    assert logits.argmax() == int(token)
    assert logits.max() == pytest.approx(float(logit), abs=1e-3)
    failed = subprocess.run([program, tmp_path, "5", "17"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("exported: ")
