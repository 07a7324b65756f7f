"""A separate CMake project finds posembed in every supported way, builds and runs."""

import subprocess
import sys
from pathlib import Path

import posembed
import pytest
import torch
from support.build_folder import BUILD, FROM_SCRATCH, ROOT, used_alone

# Other ways than the package's own depend on the files of packaging alone.
of_packaging = pytest.mark.skipif(not FROM_SCRATCH, reason="make test-packaging runs it")
PROJECT = Path(__file__).with_name("project")
# Kept between runs, so that unchanged files are not compiled again.
WORK = ROOT / "build" / f"install-test-{torch.__version__}"


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


def test_through_the_python_package() -> None:
    folder = run(sys.executable, "-m", "posembed", "--cmake-dir").strip()
    build_and_run("package", f"-DPosEmbed_DIR={folder}")


@of_packaging
def test_through_an_installed_prefix(tmp_path: Path) -> None:
    with used_alone():
        run("cmake", "--install", BUILD, "--prefix", tmp_path)
    build_and_run("prefix", f"-DCMAKE_PREFIX_PATH={tmp_path}")


@of_packaging
@pytest.mark.timeout(2400)  # it compiles all of posembed
def test_through_add_subdirectory() -> None:
    build_and_run(
        "subdirectory",
        f"-DPOSEMBED_SOURCE={ROOT}",
        f"-DPOSEMBED_PYTHON={sys.executable}",
        "-DPOSEMBED_CUDA=OFF",
        "-DPOSEMBED_INSTRUCTION_SETS=native",
    )


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
