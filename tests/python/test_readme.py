"""Tests that every example of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_blocks_run() -> None:
    """Runs the blocks in order."""
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)


def test_cpp_block_is_the_quickstart_example() -> None:
    """tests/install builds and runs that program."""
    assert blocks("cpp") == [(ROOT / "examples/cpp/quickstart/main.cpp").read_text()]
