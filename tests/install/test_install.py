"""A separate CMake project finds posembed in every supported way, builds and runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import posembed
import pytest
import torch
from support.build_folder import BUILD, FROM_SCRATCH, ROOT, used_alone

# They depend on the files of packaging alone; test_docs.py finds the package in its own way on every change.
of_packaging = pytest.mark.skipif(not FROM_SCRATCH, reason="make test-packaging runs it")
PROJECT = Path(__file__).with_name("project")
# Kept between runs, so that unchanged files are not compiled again.
WORK = ROOT / "build" / f"install-test-{torch.__version__}"
SOURCES = WORK / "sources"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    f"-DPOSEMBED_PYTHON={sys.executable}",
    "-DPOSEMBED_PYTHON_MODULE=ON",
    "-DPOSEMBED_CUDA=OFF",
    "-DPOSEMBED_INSTRUCTION_SETS=native",
)
# One of the kernels, of the operators and of the Python module: each kind has flags of its own.
OBJECTS = (
    "csrc/CMakeFiles/posembed_kernels.dir/sinusoidal/sinusoidal_frequencies.cpp.o",
    "csrc/CMakeFiles/posembed.dir/Unity/unity_posembed_dispatcher_cxx.cxx.o",
    "csrc/binding/CMakeFiles/posembed_python.dir/Unity/unity_posembed_python__cxx.cxx.o",
)


def run(*command: object) -> str:
    """Runs a command; if it fails, its output is the test's message."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build_and_run(way: str, *options: str) -> None:
    """Configures, builds and runs the project."""
    build = WORK / way
    run("cmake", "-S", PROJECT, "-B", build, "-G", "Ninja", "--fresh", *options)
    run("cmake", "--build", build)
    assert run(build / "uses_module") == f"posembed {posembed.__version__} rotated and restored\n"
    assert run(build / "uses_operator") == "found posembed::rotary\n"


@of_packaging
def test_through_the_python_package() -> None:
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    build_and_run("package", f"-DPosEmbed_DIR={folder}")


WITHOUT_TORCH = """
cmake_minimum_required(VERSION 3.24)
project(Stranger LANGUAGES C)
find_package(PosEmbed REQUIRED COMPONENTS kernels)
add_executable(rotate {source})
target_link_libraries(rotate PRIVATE PosEmbed::kernels m)
"""


def test_kernels_are_found_without_torch(tmp_path: Path) -> None:
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    tmp_path.joinpath("CMakeLists.txt").write_text(WITHOUT_TORCH.format(source=ROOT / "examples/c/rotate.c"))
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DPosEmbed_DIR={folder}")
    run("cmake", "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "rotate").startswith("moved by up to 6.")


@of_packaging
def test_through_an_installed_prefix(tmp_path: Path) -> None:
    with used_alone():
        run("cmake", "--install", BUILD, "--prefix", tmp_path)
    build_and_run("prefix", f"-DCMAKE_PREFIX_PATH={tmp_path}")


@of_packaging
@pytest.mark.timeout(2400)  # it compiles all of posembed
def test_through_add_subdirectory() -> None:
    shutil.rmtree(SOURCES, ignore_errors=True)
    built = ("build", ".*", "lib", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, SOURCES, ignore=shutil.ignore_patterns(*built))
    build_and_run("subdirectory", f"-DPOSEMBED_SOURCE={SOURCES}", *OPTIONS)


@of_packaging
@pytest.mark.timeout(1200)
def test_objects_have_the_same_bytes_elsewhere() -> None:
    """So has a wheel: its objects name no folder, whatever the flags of their kind."""
    here = WORK / "here"
    run("cmake", "-S", ROOT, "-B", here, "-G", "Ninja", *OPTIONS)
    run("cmake", "--build", here, "--target", *OBJECTS)
    elsewhere = [Path("posembed", name) for name in OBJECTS]
    run("cmake", "--build", WORK / "subdirectory", "--target", *elsewhere)
    for name, other in zip(OBJECTS, elsewhere, strict=True):
        assert (here / name).read_bytes() == (WORK / "subdirectory" / other).read_bytes(), name


@of_packaging
def test_beside_find_package_torch() -> None:
    if torch.version.cuda is not None and not posembed.build_info()["cuda_version"]:
        pytest.skip("find_package(Torch) needs the CUDA toolkit of a torch with CUDA")
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    build_and_run(
        "beside-torch",
        f"-DPosEmbed_DIR={folder}",
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        "-DFIND_TORCH_TOO=ON",
    )
