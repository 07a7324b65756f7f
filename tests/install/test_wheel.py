"""Tests the wheel's contents and requirements, and that it has no paths of the build machine."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import posembed
import pytest
import torch
from support.build_folder import BUILD, ROOT, used_alone


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Builds the wheel in the folder of the tests' build, so that nothing is compiled again."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder)]
    flags = {"POSEMBED_BUILD": str(BUILD), "CMAKE_ARGS": "-DPOSEMBED_WARNINGS_AS_ERRORS=ON"}
    with used_alone():
        result = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)],
            capture_output=True,
            text=True,
            env=os.environ | flags,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = folder.glob(f"posembed-{posembed.__version__}-*.whl")
    return zipfile.ZipFile(file)


def test_it_is_a_python_package_and_a_cpp_package(wheel: zipfile.ZipFile) -> None:
    assert {
        "posembed/__init__.py",
        "posembed/_C.pyi",
        "posembed/include/posembed/rotary.h",
        "posembed/include/posembed/version.h",
        "posembed/lib/cmake/PosEmbed/LibTorch.cmake",
        "posembed/lib/cmake/PosEmbed/PosEmbedConfig.cmake",
        "posembed/lib/libposembed.so",
        "posembed/py.typed",
    } <= set(wheel.namelist())
    assert any(name.startswith("posembed/_C.cpython-") for name in wheel.namelist())


def test_it_needs_the_torch_it_was_built_for(wheel: zipfile.ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*\n" in wheel.read(metadata).decode()


def test_it_finds_torch_beside_itself_and_nowhere_else(wheel: zipfile.ZipFile) -> None:
    library = wheel.read("posembed/lib/libposembed.so")
    assert b"\0$ORIGIN/../../torch/lib\0" in library
    home = str(Path(torch.__file__).parent).encode()
    texts = [name for name in wheel.namelist() if not name.endswith(".so")]
    assert [name for name in texts if home in wheel.read(name)] == []
