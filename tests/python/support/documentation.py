"""The programs of docs/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[3] / "docs"


def program(name: str) -> ModuleType:
    """docs/name.py."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))  # they import each other
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
