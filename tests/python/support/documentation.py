"""Pages of the documentation, and programs of docs/ and other folders as modules."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def program(name: str, folder: Path = DOCS) -> ModuleType:
    """docs/name.py."""
    if folder == DOCS and str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))  # they import each other
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
