"""Loads libposembed.so, which registers the operators, or explains why that fails.

A build is for one minor version of torch, because it is compiled against torch's C++ classes. With
another version it would crash or give wrong results, so versions are compared first. A build from
source is in lib; a wheel has a build for each torch, in lib/torch2.11, lib/torch2.13, ...
"""

import importlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent


def _minor(version: str) -> str:
    """'2.11.0+cu130' -> '2.11'."""
    return ".".join(version.split(".")[:2])


def _library(lib: Path, torch_version: str) -> Path:
    """The library for a torch, whether or not there is one."""
    own = lib / "libposembed.so"
    held = own if own.is_file() else lib / f"torch{_minor(torch_version)}" / own.name
    return held if held.is_file() else own


LIBRARY = _library(PACKAGE / "lib", torch.__version__)

_INSTALL = "python -m pip install --no-build-isolation --no-deps --force-reinstall ."
_BUILD = f"In posembed's source folder run: {_INSTALL}"
_BUILD_FOR_ALL = (
    "In posembed's source folder run: make build CMAKE_ARGS=-DPOSEMBED_INSTRUCTION_SETS=all, "
    f"or: {_INSTALL}"
)


def load() -> None:
    """Loads the library.

    Raises:
        ImportError: The library is missing, was built for another minor version of torch or another
            processor, or cannot be opened.
    """
    if not LIBRARY.is_file():
        if held := _torches():
            raise ImportError(
                f"This wheel of posembed is for torch {', '.join(held)}, but torch "
                f"{torch.__version__} is installed. Install one of these (python -m pip install "
                f"'torch=={held[-1]}.*'), or build posembed for this one. {_BUILD}"
            )
        raise ImportError(f"posembed is not built: {LIBRARY} is missing. {_BUILD}")
    built_for: str = json.loads((LIBRARY.parent / "build.json").read_text())["torch_version"]
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"This posembed was built for torch {_minor(built_for)}, but torch {torch.__version__} "
            f"is installed. Install the torch that it was built for (python -m pip install "
            f"torch=={built_for}), or build posembed for this one. {_BUILD}"
        )
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"{LIBRARY} was built for torch {built_for} and cannot be loaded beside torch "
            f"{torch.__version__}: {error.__cause__ or error}. {_BUILD}"
        ) from error
    build = json.loads(torch.ops.posembed.build_info.default())
    if build["instruction_set"] == "none":
        raise ImportError(
            f"This posembed was built for processors with {build['instruction_sets'][0]}, which "
            f"this one lacks. Build it for all processors. {_BUILD_FOR_ALL}"
        )


def _torches() -> list[str]:
    """The torches that a wheel has builds for, such as "2.11", in order."""
    found = (file.parent.name for file in LIBRARY.parent.glob("torch*/libposembed.so"))
    held = [name.removeprefix("torch") for name in found]
    return sorted(held, key=lambda version: [*map(int, version.split("."))])


def bindings() -> Any:
    """The module _C: the C++ modules, for one version of Python.

    Raises:
        ImportError: There is none for this Python. All but posembed.cpp works without it.
    """
    try:
        return importlib.import_module("posembed._C")
    except ModuleNotFoundError as error:
        python = ".".join(platform.python_version_tuple()[:2])
        raise ImportError(
            f"posembed.cpp needs posembed._C, which this build lacks for Python {python}; a build "
            f"from source has it. {_BUILD}"
        ) from error
