"""Tests that the faults of tests/faults can be planted, and that the script tells what became of one."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plant", ROOT / "tests" / "faults" / "plant.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plant"] = module  # where dataclasses look their types up
    spec.loader.exec_module(module)
    return module


PLANT = script()


def test_every_fault_can_be_planted() -> None:
    """Its text is in its file once, and its test exists."""
    faults = PLANT.faults()
    assert len({fault.name for fault in faults}) == len(faults) >= 50
    assert [reason for fault in faults if (reason := fault.is_rotten(ROOT))] == []


@pytest.mark.parametrize(
    ("text", "new", "outcome"),
    [
        ("return 1", "return 2", "caught"),
        ("return 1", "return 1 + 0", "missed"),
        ("return 3", "return 2", "expected the text once, found it 0 times"),
        ("return", "pass", "expected the text once, found it 2 times"),
    ],
)
def test_the_script_tells_what_became_of_a_fault(tmp_path: Path, text: str, new: str, outcome: str) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "tests").mkdir()
    source, test = tmp_path / "python" / "one.py", tmp_path / "tests" / "test_one.py"
    source.write_text("def one():\n    return 1\n\ndef two():\n    return 2\n")
    test.write_text("import one\n\ndef test():\n    assert one.one() == 1\n")
    fault = PLANT.Fault("a fault", "python/one.py", text, new, "tests/test_one.py")
    before = source.read_text()
    ((_, found),) = PLANT.outcomes(PLANT.Tree(tmp_path), [fault])
    assert found.endswith(outcome)
    assert source.read_text() == before
