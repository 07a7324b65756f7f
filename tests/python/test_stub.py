"""The stub of the bindings is the one that their docstrings give."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_is_not_stale() -> None:
    found = importlib.util.spec_from_file_location("stub", ROOT / "csrc/binding/stub.py")
    assert found is not None
    assert found.loader is not None
    stub = importlib.util.module_from_spec(found)
    found.loader.exec_module(stub)
    assert stub.STUB.read_text(encoding="utf-8") == stub.text(), "run csrc/binding/stub.py"
