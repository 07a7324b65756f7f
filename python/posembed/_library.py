"""Loads libposembed.so, which registers the operators, or explains why that fails.

A build is for one minor version of torch, because it is compiled against torch's C++ classes. With
another version it would crash or give wrong results, so versions are compared first.
"""

import importlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "lib" / "libposembed.so"

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
            f"{torch.__version__}: {error}. {_BUILD}"
        ) from error
    build = json.loads(torch.ops.posembed.build_info.default())
    if build["instruction_set"] == "none":
        raise ImportError(
            f"This posembed was built for processors with {build['instruction_sets'][0]}, which "
            f"this one lacks. Build it for all processors. {_BUILD_FOR_ALL}"
        )


def bindings() -> Any:
    """The module _C: C++ modules and file readers, for one version of Python.

    Raises:
        ImportError: There is none for this Python. Operators and modules work without it.
    """
    try:
        return importlib.import_module("posembed._C")
    except ModuleNotFoundError as error:
        python = ".".join(platform.python_version_tuple()[:2])
        raise ImportError(
            f"posembed.cpp and posembed.pretrained need posembed._C, which this build lacks for "
            f"Python {python}. {_BUILD}"
        ) from error


def _minor(version: str) -> str:
    """'2.11.0+cu130' -> '2.11'."""
    return ".".join(version.split(".")[:2])
