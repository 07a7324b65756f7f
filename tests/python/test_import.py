"""Tests that ``import posembed`` loads only what models need and shows only public names."""

from __future__ import annotations

import subprocess
import sys

import posembed

PROGRAM = """
import sys

import torch

before = set(sys.modules)
import posembed

print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
print("torch._dynamo" in set(sys.modules) - before)
"""


def test_import_loads_neither_the_compiler_nor_optional_packages() -> None:
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    packages, compiler = printed.splitlines()
    assert "posembed" in packages.split()
    assert not {"transformers", "matplotlib", "sklearn", "tqdm", "safetensors"} & set(
        packages.split()
    )
    assert compiler == "False"


def test_dir_shows_what_users_are_meant_to_find() -> None:
    shown = {name for name in dir(posembed) if not name.startswith("__")}
    assert shown == {*posembed.__all__, "scaling", "analysis", "cpp", "data", "plot"}
    assert "__version__" in dir(posembed)
    assert all(hasattr(posembed, name) for name in shown)
