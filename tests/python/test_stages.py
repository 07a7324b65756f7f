"""scripts/stages.py: which stages of CI run, and what their table and their last line say."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.build_folder import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import stages


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a pin, an input and a stage that notes each of its runs."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "Makefile").write_text("noted:\n\techo once >> runs\n\ttest ! -e broken\n")
    (tmp_path / "input.h").write_text("1")
    (tmp_path / "pin.txt").write_text("1")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "STAMPS", tmp_path / ".ci" / "stamps")
    monkeypatch.setattr(stages, "PINS", ("pin.txt",))
    monkeypatch.setitem(stages.STAGES, "noted", stages.Stage("noted", 60, "notes", ("*.h",)))
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


def runs(repository: Path) -> int:
    stages.run("noted", always=False)
    return len((repository / "runs").read_text().splitlines())


def test_a_stage_runs_when_an_input_or_a_pin_has_changed(repository: Path) -> None:
    assert runs(repository) == 1
    assert runs(repository) == 1
    for name, expected in (("input.h", 2), ("pin.txt", 3), ("new.h", 4)):
        (repository / name).write_text("2")
        assert runs(repository) == expected, name
        assert runs(repository) == expected, name
    (repository / "other.py").write_text("2")
    assert runs(repository) == 4


def test_a_stage_that_failed_runs_again(repository: Path) -> None:
    (repository / "broken").touch()
    assert stages.run("noted", always=False)[0] == "failed"
    (repository / "broken").unlink()
    assert stages.run("noted", always=False)[0] == "passed"
    assert stages.run("noted", always=False)[0] == "unchanged"
    assert stages.run("noted", always=True)[0] == "passed"


def test_a_stage_that_writes_an_input_fails(repository: Path) -> None:
    """As the documentation's does, if a page or a notebook is stale."""
    makefile = repository / "Makefile"
    makefile.write_text(makefile.read_text() + "\techo 2 > input.h\n")
    assert stages.run("noted", always=False)[0] == "failed"
    assert stages.run("noted", always=False)[0] == "passed"
    assert stages.run("noted", always=False)[0] == "unchanged"


def test_versions_of_tools_are_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stages.STAGES["machine-code"]
    without = dataclasses.replace(stage, tools=())
    assert stages.hash_of_inputs(stage) == stages.hash_of_inputs(stage)
    before = stages.hash_of_inputs(dataclasses.replace(without, tools=("git",)))
    assert before != stages.hash_of_inputs(without)


def test_every_stage_is_a_target_and_has_inputs_and_a_documented_budget() -> None:
    makefile = (ROOT / "Makefile").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for name, stage in stages.STAGES.items():
        assert re.search(rf"^([\w-]+ )*{stage.target}( [\w-]+)*:", makefile, re.MULTILINE), name
        assert f"| {name} | {stage.budget} |" in contributing
        if stage.inputs:
            files = stages.output_of("git", "ls-files", "--", *stage.inputs)
            assert files.count(b"\n") > 3, name


def test_the_stage_of_programs_has_every_test_that_is_marked() -> None:
    tests, mark = [*(ROOT / "tests").rglob("test_*.py")], re.compile(r"\bmark\.program\b")
    marked = {str(path.relative_to(ROOT)) for path in tests if mark.search(path.read_text())}
    assert marked == set(stages.LISTS["programs"].split()) <= set(stages.STAGES["programs"].inputs)


def test_the_table_warns_above_a_budget() -> None:
    text = stages.table([("lint", "passed", 1.0), ("docs", "passed", 1e4)])
    assert "WARNING" not in text.splitlines()[1]
    assert "WARNING" in text.splitlines()[2]


def test_the_last_line_counts_and_gives_reasons(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase/><testcase><failure/></testcase>"
        '<testcase><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    assert stages.summary(tmp_path) == "1 passed, 1 failed, 1 skipped (1 no GPU)"
