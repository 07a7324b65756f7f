"""Builds the wheel, and editable installs, by CMake.

The package's binary part is what `cmake --install` puts under the prefix posembed/:
lib/libposembed.so, include/, lib/cmake/PosEmbed/ and the module _C. The rules are those of an
install to /usr/local, so both are alike.

torch is missing from pyproject.toml's build requirements on purpose: pip would build against a
fresh copy of its own choice, and a build has to see the torch that it will run with.
So: `pip install --no-build-isolation .`
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


def torch_version() -> str:
    """The torch to build against, '2.11.0'."""
    try:
        return importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        sys.exit(
            f"posembed is built against the torch that it will run with, and {sys.executable} "
            "sees none. Run: python -m pip install torch, "
            "then: python -m pip install --no-build-isolation ."
        )


def tool(name: str) -> str:
    """A program, first of all the one beside the interpreter: environments need no activation."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        sys.exit(f"posembed is built by {name}. Run: {sys.executable} -m pip install {name}")
    return path


class CMakeBuild(build_ext):
    """Configures, builds and installs into the package instead of compiling anything itself."""

    def run(self) -> None:
        """Runs CMake; the build folder stays, so that a second build compiles only changes."""
        build = Path(os.environ.get("POSEMBED_BUILD", ROOT / "build" / f"python-{torch_version()}"))
        python = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        options = [
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPOSEMBED_PYTHON={sys.executable}",
            "-DPOSEMBED_PYTHON_MODULE=ON",
            "-DPOSEMBED_INSTRUCTION_SETS=all",
            "-DPOSEMBED_WARNINGS_AS_ERRORS=OFF",
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
        subprocess.run([tool("cmake"), *map(str, arguments)], check=True)


major, minor, _ = torch_version().split(".", maxsplit=2)
setup(
    version=(ROOT / "VERSION").read_text().strip(),
    ext_modules=[Extension("posembed._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[f"torch=={major}.{minor}.*"],
)
