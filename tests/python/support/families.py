"""The families of embeddings: the folders that have operators."""

import importlib
from pathlib import Path

from support.case import OperatorCase

CSRC = Path(__file__).resolve().parents[3] / "csrc"
FAMILIES = tuple(sorted(path.parent.name for path in CSRC.glob("*/*_operator.cpp")))


def cases() -> list[OperatorCase]:
    """The shared cases of all operators."""
    modules = (importlib.import_module(f"support.{family}") for family in FAMILIES)
    return [case for module in modules for case in module.CASES]
