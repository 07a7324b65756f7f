"""The programs of docs/start/nanogpt.md: its diffs apply and reach the losses of its table."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs/start/nanogpt.md").read_text(encoding="utf-8")
TOLERANCE = 0.05  # of the versions and processors that the page speaks of


def applied(program: str, diff: str) -> str:
    """The program with each hunk's old lines, which it has once, replaced by the new ones."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert program.count(old) == 1, hunk
        program = program.replace(old, new)
    return program


def loss(program: str, name: str) -> float:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, name, "exec"), {"__name__": "__main__"})
    found = re.fullmatch(r"(\d\.\d\d) nats per byte\n", printed.getvalue())
    assert found is not None
    return float(found[1])


def programs() -> dict[str, str]:
    """Each program of the page, in the order of its table."""
    (plain,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    learned, sinusoidal, rope, alibi, packed = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    found = {"plain": plain, "learned": applied(plain, learned)}
    found["sinusoidal"] = applied(plain, sinusoidal)
    found["rope"] = applied(plain, rope)
    found["alibi"] = applied(plain, alibi)
    found["packed"] = applied(found["rope"], packed)
    return found


def test_every_program_runs() -> None:
    """For two of its 200 steps; the stage `programs` of CI compares the losses."""
    for name, program in programs().items():
        assert program.count("range(200)") == 1
        assert loss(program.replace("range(200)", "range(2)").replace("(model, 256)", "(model, 2)"), name) > 2


@pytest.mark.program
def test_losses_are_those_of_the_page() -> None:
    table = [float(cell) for cell in re.findall(r"\| (\d\.\d\d) \|$", PAGE, re.MULTILINE)]
    found = {name: loss(program, name) for name, program in programs().items()}
    assert len(table) == len(found) == 6
    for (name, value), stated in zip(found.items(), table, strict=True):
        assert abs(value - stated) < TOLERANCE, (name, found)
    assert max(found["rope"], found["packed"]) < found["alibi"] < found["sinusoidal"]
    assert found["sinusoidal"] < found["learned"] < found["plain"]
