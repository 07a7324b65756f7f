"""Builds the wheel, and editable installs, by CMake.

The package's binary part is what `cmake --install` puts under the prefix posembed/:
lib/libposembed.so, include/, lib/cmake/PosEmbed/ and the module _C. The rules are those of an
install to /usr/local, so both are alike.

torch is missing from pyproject.toml's build requirements on purpose: pip would build against a
fresh copy of its own choice, and a build has to see the torch that it will run with.
So: `pip install --no-build-isolation .`

Environment variables: POSEMBED_BUILD, the build folder, and CMAKE_ARGS, options for CMake.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


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
    if version_of("torch") is None:
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
        python = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        options = [
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            f"-DPOSEMBED_PYTHON={sys.executable}",
            "-DPOSEMBED_PYTHON_MODULE=ON",
            "-DPOSEMBED_INSTRUCTION_SETS=all",
            f"-DPOSEMBED_RELOCATABLE={'OFF' if self.inplace else 'ON'}",
            "-DCMAKE_INSTALL_LIBDIR=lib",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        self.cmake("-S", ROOT, "-B", build, "-G", "Ninja", *options)
        self.cmake("--build", build, "--target", "posembed", "posembed_python")
        self.cmake("--install", build, "--prefix", python / "posembed", "--strip")

    @staticmethod
    def cmake(*arguments: str | Path) -> None:
        """Runs CMake and stops where it fails."""
        subprocess.run([program("cmake"), *map(str, arguments)], check=True)


check_requirements()
TORCH = importlib.metadata.version("torch").split("+")[0]  # '2.11.0'
major, minor, _ = TORCH.split(".", maxsplit=2)
setup(
    version=(ROOT / "VERSION").read_text().strip(),
    ext_modules=[Extension("posembed._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[f"torch=={major}.{minor}.*"],
)
