"""Tests that unsupported setups fail with one sentence that names the fault and the remedy."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import posembed
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(posembed.__file__).parent
NEXT_MINOR = "2.{}.0".format(int(torch.__version__.split(".")[1]) + 1)


def run(*command: object, **environment: object) -> tuple[int, str]:
    """Exit status and output of a command; line breaks become spaces, as CMake wraps messages."""
    result = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )
    return result.returncode, " ".join(result.stdout.split())


# Choosing CUDA: CMake's script mode runs the choice without a compiler.


def fake_nvcc(folder: Path, release: str, known: str = "") -> Path:
    nvcc = folder / "nvcc"
    version = f"echo 'Cuda compilation tools, release {release}, V{release}.1'"
    nvcc.write_text(f"#!/bin/sh\nif [ $1 = --list-gpu-arch ]; then echo {known}; else {version}; fi\n")
    nvcc.chmod(0o755)
    return nvcc


def fake_nvidia_smi(folder: Path, gpus: list[str]) -> Path:
    """A folder with a program that names the compute capabilities of these GPUs."""
    programs = folder / "bin"
    programs.mkdir()
    listing = programs / "nvidia-smi"
    status = 0 if gpus else 9
    listing.write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(gpus)}\nexit {status}\n")
    listing.chmod(0o755)
    return programs


def choose_cuda(folder: Path, gpus: list[str] | None = None, **variables: object) -> tuple[int, str]:
    """The decision of cmake/Cuda.cmake for these variables, where these GPUs are seen."""
    values = {
        "POSEMBED_CUDA": "AUTO",
        "POSEMBED_TORCH_ROOT": "/torch",
        "POSEMBED_TORCH_VERSION": "2.11.0",
        "POSEMBED_TORCH_CUDA_MAJOR": "13",
        **variables,
    }
    script = folder / "choose.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.24)\n"
        f'include("{ROOT}/cmake/Cuda.cmake")\n'
        "posembed_choose_cuda()\n"
        'message("CUDA is ${POSEMBED_WITH_CUDA} for [${CMAKE_CUDA_ARCHITECTURES}]")\n'
    )
    programs = fake_nvidia_smi(folder, ["9.0"] if gpus is None else gpus)
    environment = {
        "TORCH_CUDA_ARCH_LIST": values.pop("TORCH_CUDA_ARCH_LIST", ""),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    definitions = [f"-D{name}={value}" for name, value in values.items()]
    return run("cmake", *definitions, "-P", script, **environment)


@pytest.mark.parametrize(
    ("gpus", "architectures"), [(["9.0"], "90-real"), (["8.0", "12.0", "8.0"], "80-real;120-real")]
)
def test_kernels_are_built_for_the_gpus_seen(tmp_path: Path, gpus: list[str], architectures: str) -> None:
    nvcc = fake_nvcc(tmp_path, "13.1")
    status, output = choose_cuda(tmp_path, gpus, CMAKE_CUDA_COMPILER=nvcc)
    assert status == 0
    assert "posembed: CUDA 13.1 kernels for" in output
    assert output.endswith(f"CUDA is ON for [{architectures}]")


def test_without_a_gpu_the_build_is_for_the_cpu(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "13.1")
    status, output = choose_cuda(tmp_path, [], CMAKE_CUDA_COMPILER=nvcc)
    assert status == 0
    assert "CPU only: no GPU is seen; -DPOSEMBED_CUDA=ON builds CUDA kernels all the same" in output
    assert output.endswith("CUDA is OFF for []")


@pytest.mark.parametrize(
    ("release", "architectures"),
    [("13.1", "80-real;90-real;100-real;100-virtual"), ("12.6", "80-real;90-real;90-virtual")],
)
def test_cuda_on_needs_no_gpu(tmp_path: Path, release: str, architectures: str) -> None:
    status, output = choose_cuda(
        tmp_path,
        [],
        POSEMBED_CUDA="ON",
        POSEMBED_TORCH_CUDA_MAJOR=release[:2],
        CMAKE_CUDA_COMPILER=fake_nvcc(tmp_path, release),
    )
    assert status == 0
    assert output.endswith(f"CUDA is ON for [{architectures}]")


def test_a_missing_toolkit_gives_a_cpu_build(tmp_path: Path) -> None:
    status, output = choose_cuda(tmp_path, CMAKE_CUDA_COMPILER=tmp_path / "nvcc")
    assert status == 0
    assert "CPU only: torch 2.11.0 in /torch has CUDA 13, but no CUDA toolkit was found" in output
    assert output.endswith("CUDA is OFF for []")


def test_a_newer_major_version_gives_a_cpu_build_and_a_warning(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0")
    status, output = choose_cuda(tmp_path, POSEMBED_TORCH_CUDA_MAJOR="12", CMAKE_CUDA_COMPILER=nvcc)
    assert status == 0
    assert "CMake Warning" in output
    assert f"torch 2.11.0 in /torch has CUDA 12, but {nvcc} is CUDA 13.0; set CUDACXX" in output
    assert output.endswith("CUDA is OFF for []")


def test_an_older_major_version_serves(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "12.8")
    status, output = choose_cuda(tmp_path, POSEMBED_TORCH_CUDA_MAJOR="13", CMAKE_CUDA_COMPILER=nvcc)
    assert status == 0
    assert output.endswith("CUDA is ON for [90-real]")


@pytest.mark.parametrize(
    ("release", "torch_cuda", "reason"),
    [("13.0", "12", "is CUDA 13.0"), ("13.0", "", "has no CUDA"), ("", "13", "no CUDA toolkit was found")],
)
def test_cuda_on_insists(tmp_path: Path, release: str, torch_cuda: str, reason: str) -> None:
    status, output = choose_cuda(
        tmp_path,
        POSEMBED_CUDA="ON",
        POSEMBED_TORCH_CUDA_MAJOR=torch_cuda,
        CMAKE_CUDA_COMPILER=fake_nvcc(tmp_path, release),
    )
    assert status != 0
    assert "POSEMBED_CUDA=ON cannot be met" in output
    assert reason in output


@pytest.mark.parametrize(
    ("asked", "architectures"),
    [
        ("9.0", "90-real"),
        ("8.0;9.0a 10.0+PTX", "80-real;90a-real;100-real;100-virtual"),
        ("Ampere, Hopper", "80-real;86-real;86-virtual;90-real;90-virtual"),
        ("native", "native"),
    ],
)
def test_architectures_are_written_as_torch_writes_them(tmp_path: Path, asked: str, architectures: str) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0")
    status, output = choose_cuda(tmp_path, [], CMAKE_CUDA_COMPILER=nvcc, TORCH_CUDA_ARCH_LIST=asked)
    assert status == 0
    assert output.endswith(f"CUDA is ON for [{architectures}]")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0")
    status, output = choose_cuda(tmp_path, CMAKE_CUDA_COMPILER=nvcc, TORCH_CUDA_ARCH_LIST="sm_90")
    assert status != 0
    assert "'sm_90' is no architecture; write for example '8.0;9.0;10.0+PTX'" in output


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("8.0;12.0+PTX", "does not know sm_120; CUDA 12.8 is the first that does: set CUDACXX to its nvcc"),
        ("10.3a", "does not know sm_103; CUDA 12.9 is the first that does"),
        ("5.0", "does not know sm_50. It knows sm_80 sm_90."),
    ],
)
def test_a_toolkit_without_an_architecture_is_refused(tmp_path: Path, asked: str, words: str) -> None:
    nvcc = fake_nvcc(tmp_path, "12.6", "compute_80 compute_90")
    variables = {"CMAKE_CUDA_COMPILER": nvcc, "POSEMBED_TORCH_CUDA_MAJOR": "12"}
    status, output = choose_cuda(tmp_path, [], TORCH_CUDA_ARCH_LIST=asked, **variables)
    assert status != 0
    assert words in output


def test_a_toolkit_that_knows_the_architectures_is_used(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0", "compute_80 compute_90 compute_120")
    status, output = choose_cuda(tmp_path, [], CMAKE_CUDA_COMPILER=nvcc, TORCH_CUDA_ARCH_LIST="9.0a;12.0+PTX")
    assert status == 0
    assert output.endswith("CUDA is ON for [90a-real;120-real;120-virtual]")


# Finding torch.


@pytest.fixture
def python_without_torch(tmp_path: Path) -> Path:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


def test_cmake_without_torch(tmp_path: Path, python_without_torch: Path) -> None:
    status, output = run(
        *("cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja"), f"-DPOSEMBED_PYTHON={python_without_torch}"
    )
    assert status != 0
    assert "posembed found no torch. Install it into a Python and name that Python" in output


HIDE_TORCH = (
    "import importlib.metadata as m, runpy\n"
    "def missing(name): raise m.PackageNotFoundError(name)\n"
    "m.version = missing\n"
    f"runpy.run_path({str(ROOT / 'setup.py')!r})"
)


def test_setup_in_isolation_names_the_flag() -> None:
    isolate = "import sys; sys.path.append('pip-build-env-abc/overlay')\n"
    status, output = run(sys.executable, "-c", isolate + HIDE_TORCH)
    assert status != 0
    assert "build isolation hides. Run: python -m pip install -v --no-build-isolation ." in output


def test_setup_without_torch() -> None:
    status, output = run(sys.executable, "-c", HIDE_TORCH)
    assert status != 0
    assert "posembed is built with setuptools>=77,<82, torch" in output
    assert "Run: python -m pip install 'setuptools>=77,<82' torch, then: " in output
    assert output.endswith("python -m pip install --no-build-isolation .")


def test_find_package_refuses_another_torch(tmp_path: Path) -> None:
    """Finds a folder like LibTorch of the next minor version first, and refuses it."""
    version = tmp_path / "include" / "torch" / "headeronly" / "version.h"
    version.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), NEXT_MINOR.split("."), strict=True)
    version.write_text("".join(f"#define TORCH_VERSION_{name} {n}\n" for name, n in numbers))
    config = tmp_path / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    config.parent.mkdir(parents=True)
    config.touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").touch()

    status, output = run(
        *("cmake", "-S", ROOT / "tests/install/project", "-B", tmp_path / "build", "-G", "Ninja"),
        f"-DPosEmbed_DIR={PACKAGE}/lib/cmake/PosEmbed",
        f"-DCMAKE_PREFIX_PATH={tmp_path}",
    )
    assert status != 0
    built_for = ".".join(torch.__version__.split(".")[:2])
    assert f"This posembed was built for torch {built_for}, but torch {NEXT_MINOR} was" in output


# Loading.


FAKE_TORCH = """
class ops:
    def load_library(path):
        raise OSError("opened " + path)

__version__ = '{}'
"""
# What a wheel for several torches holds.
HELD = {"lib/torch2.9": "2.9.1", "lib/torch2.11": "2.11.0", "lib/torch2.15": "2.15.0"}


def import_copy(
    folder: Path, built_for: dict[str, str], library: bytes = b"", torch_version: str = "", kernels: bytes = b""
) -> str:
    """The error from importing a copy of the package with this torch and these libraries.

    The torch that each was built for is given by the library's folder. A torch by version alone
    cannot open any, and says so.
    """
    copy = folder / "posembed"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("lib", "include", "*.so"))
    for name, version in built_for.items():
        (copy / name).mkdir(parents=True)
        (copy / name / "libposembed.so").write_bytes(library)
        (copy / name / "libposembed_kernels.so").write_bytes(kernels)
        (copy / name / "build.json").write_text(json.dumps({"torch_version": version}))
    if torch_version:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(FAKE_TORCH.format(torch_version))
    status, output = run(sys.executable, "-c", "import posembed", PYTHONPATH=folder)
    assert status != 0
    return output.partition("ImportError: ")[2]


def test_loading_beside_another_torch(tmp_path: Path) -> None:
    error = import_copy(tmp_path, {"lib": "2.11.0"}, torch_version="2.12.1+cu130")
    assert error == (
        "This posembed was built for torch 2.11, but torch 2.12.1+cu130 is installed. Install the "
        "torch that it was built for (python -m pip install torch==2.11.0), or build posembed for "
        "this one. In posembed's source folder run: "
        "python -m pip install --no-build-isolation --no-deps --force-reinstall ."
    )


def test_loading_without_a_library(tmp_path: Path) -> None:
    error = import_copy(tmp_path, {})
    assert error.startswith(f"posembed is not built: {tmp_path}/posembed/lib/libposembed.so is")
    assert error.endswith("pip install --no-build-isolation --no-deps --force-reinstall .")


def test_loading_a_library_that_cannot_be_opened(tmp_path: Path) -> None:
    version = torch.__version__
    error = import_copy(tmp_path, {"lib": version}, b"no library")
    assert f"libposembed.so was built for torch {version} and cannot be loaded beside torch" in error


def test_kernels_of_another_build(tmp_path: Path) -> None:
    library, kernels = ((PACKAGE / "lib" / f"lib{name}.so").read_bytes() for name in ("posembed", "posembed_kernels"))
    (version,) = {*re.findall(rb"POSEMBED_\d[.\d]+_[0-9a-f]{12}", kernels)}
    other = version[:-12] + version[-12:].translate(bytes.maketrans(b"0123456789abcdef", b"123456789abcdef0"))
    error = import_copy(tmp_path, {"lib": torch.__version__}, library, kernels=kernels.replace(version, other))
    assert f"libposembed_kernels.so: version `{version.decode()}' not found" in error
    assert "posembed's source folder run" in error


@pytest.mark.parametrize("version", ["2.10.0", "2.13.1+cpu", "2.16.0a0+git1"])
def test_a_wheel_refuses_a_torch_that_it_does_not_hold(tmp_path: Path, version: str) -> None:
    error = import_copy(tmp_path, HELD, torch_version=version)
    assert error.startswith(f"This wheel of posembed is for torch 2.9, 2.11, 2.15, but torch {version} is")
    assert "python -m pip install 'torch==2.15.*'" in error
    assert error.endswith("pip install --no-build-isolation --no-deps --force-reinstall .")


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.1"])
def test_a_wheel_chooses_the_library_by_torch(tmp_path: Path, version: str) -> None:
    minor = ".".join(version.split(".")[:2])
    error = import_copy(tmp_path, HELD, torch_version=version)
    assert f"opened {tmp_path}/posembed/lib/torch{minor}/libposembed.so" in error


def test_a_build_from_source_comes_before_those_of_a_wheel(tmp_path: Path) -> None:
    error = import_copy(tmp_path, {"lib": "2.11.0", **HELD}, torch_version="2.11.1")
    assert f"opened {tmp_path}/posembed/lib/libposembed.so" in error


def test_a_library_in_the_wrong_folder_is_refused(tmp_path: Path) -> None:
    error = import_copy(tmp_path, {"lib/torch2.15": "2.11.0"}, torch_version="2.15.0")
    assert error.startswith("This posembed was built for torch 2.11, but torch 2.15.0 is installed")
