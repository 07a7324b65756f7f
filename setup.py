"""Builds the wheel, and editable installs, by CMake.

The package's binary part is what `cmake --install` puts under the prefix posembed/:
lib/libposembed.so, include/, lib/cmake/PosEmbed/ and the module _C. The rules are those of an
install to /usr/local, so both are alike.

torch is missing from pyproject.toml's build requirements on purpose: pip would build against a
fresh copy of its own choice, and a build has to see the torch that it will run with.
So: `pip install --no-build-isolation .`

Environment variables: POSEMBED_BUILD, the build folder; CMAKE_ARGS, options for CMake; and
POSEMBED_TORCHES, such as "2.11=/a/torch:2.15=/b/torch", for a wheel that holds a library for each
of these torches and no _C, so that it fits every Python (make wheel-all).
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TORCHES = dict(
    pair.split("=", 1) for pair in os.environ.get("POSEMBED_TORCHES", "").split(os.pathsep) if pair
)


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def program(name: str) -> str | None:
    """A program, first of all the one beside the interpreter: environments need no activation."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def check_requirements() -> None:
    """Ends the build in one sentence that names everything missing, and the command to run."""
    missing = [name for name in ("cmake", "ninja") if program(name) is None]
    if int((version_of("setuptools") or "0").split(".")[0]) < 77:
        missing.append("setuptools>=77,<82")
    if not TORCHES and version_of("torch") is None:
        missing.append("torch")
    if missing and any("pip-build-env" in folder for folder in sys.path):
        sys.exit(
            "posembed must be built with the torch that it will run with, which pip's build "
            "isolation hides. Run: python -m pip install -v --no-build-isolation ."
        )
    if missing:
        sys.exit(
            f"posembed is built with {', '.join(missing)} of the environment that it is installed "
            f"into, and {sys.executable} sees none. Run: python -m pip install "
            f"{' '.join(repr(name) if '<' in name else name for name in missing)}, "
            "then: python -m pip install --no-build-isolation ."
        )


class CMakeBuild(build_ext):
    """Configures, builds and installs into the package instead of compiling anything itself."""

    def run(self) -> None:
        """Runs CMake; the build folder stays, so that a second build compiles only changes."""
        build = Path(os.environ.get("POSEMBED_BUILD", ROOT / "build" / f"python-{TORCH}"))
        if not TORCHES:
            options = ["-DPOSEMBED_PYTHON_MODULE=ON", "-DCMAKE_INSTALL_LIBDIR=lib"]
            self.build_library(build, ["posembed", "posembed_python"], options)
        for minor, torch in TORCHES.items():  # kernels, which know no torch, are compiled once
            lib = f"-DCMAKE_INSTALL_LIBDIR=lib/torch{minor}"
            options = ["-DPOSEMBED_PYTHON_MODULE=OFF", f"-DPOSEMBED_TORCH={torch}", lib]
            self.build_library(build, ["posembed"], options)

    def build_library(self, build: Path, targets: list[str], options: list[str]) -> None:
        """Builds for one torch."""
        python = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        common = [
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            f"-DPOSEMBED_PYTHON={sys.executable}",
            "-DPOSEMBED_INSTRUCTION_SETS=all",
            f"-DPOSEMBED_RELOCATABLE={'OFF' if self.inplace else 'ON'}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        self.cmake("-S", ROOT, "-B", build, "-G", "Ninja", *options, *common)
        self.cmake("--build", build, "--target", *targets)
        self.cmake("--install", build, "--prefix", python / "posembed", "--strip")

    @staticmethod
    def cmake(*arguments: str | Path) -> None:
        """Runs CMake and stops where it fails."""
        subprocess.run([program("cmake"), *map(str, arguments)], check=True)


class Wheel(bdist_wheel):
    """A wheel without _C fits every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, its ABI, and the platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if TORCHES else (python, abi, platform)


check_requirements()
TORCH = (version_of("torch") or "").split("+")[0]  # '2.11.0'
REQUIRED = "torch>=2.11" if TORCHES else f"torch=={'.'.join(TORCH.split('.')[:2])}.*"
setup(
    version=(ROOT / "VERSION").read_text().strip(),
    ext_modules=[Extension("posembed._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
    install_requires=[REQUIRED],
)
