"""Figures and charts of the README are those of benchmarks/results; test_docs.py runs its code."""

import inspect
import json
import re
from types import ModuleType

import pytest
from support.documentation import ROOT, program

README, BENCHMARKS = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "benchmarks"


@pytest.fixture(scope="module")
def charts() -> ModuleType:
    pytest.importorskip("matplotlib")
    return program("charts", BENCHMARKS)


def test_counts_of_patched_models_are_those_on_record() -> None:
    """README: how many classes of each library ``patch`` reaches, and in which version."""
    record = json.loads((ROOT / "docs/patched_models.json").read_text(encoding="utf-8"))
    classes = record["transformers"]["classes"]
    counts = {"transformers": (classes["patched"], classes["that rotate"])}
    for library in ("diffusers", "timm"):
        states = [state for state, _ in record[library]["models"].values()]
        rotate = [state for state in states if state != "does not rotate"]
        counts[library] = rotate.count("patched"), len(rotate)
    pattern = r"(\d+) of (?:the )?(\d+)(?: model classes)? of (transformers|diffusers|timm) ([\d.]+\d)"
    found = {name: (int(x), int(y)) for x, y, name, _ in re.findall(pattern, README)}
    assert found == counts
    for _, _, name, version in re.findall(pattern, README):
        assert f"{record[name]['version']}.".startswith(f"{version}.")


def figures(reason: str) -> list[str]:
    """The numbers of one of the reasons, in their order; links and code left out."""
    text = re.search(rf"^- \*\*{reason}\.\*\*(.*?)(?=^- |^$)", README, re.MULTILINE | re.DOTALL)
    assert text is not None
    prose = re.sub(r"\]\(.*?\)|`.*?`|2³¹|float32|bfloat16|H200|\[[\d, +]+\]", "", text[1])
    return re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", prose)


def shapes(reason: str) -> list[str]:
    """The shapes of one of the reasons, as benchmarks write them."""
    text = re.search(rf"^- \*\*{reason}\.\*\*(.*?)(?=^- |^$)", README, re.MULTILINE | re.DOTALL)
    assert text is not None
    found = re.findall(r"\[\d[\d, +]*\]", text[1])
    return [re.sub(r"(\d),(\d{3})\b", r"\1\2", shape).replace(" ", "") for shape in found]


def test_figures_of_the_rotary_embedding(charts: ModuleType) -> None:
    row = charts.calls("rotary_calls_cpu.md", charts.ROTARY.format("bfloat16"))
    times = [f"{float(row[call]):.1f}" for call in ("transformers", "transformers, compiled")]
    assert figures("Fast") == [f"{charts.milliseconds(row, 'posembed'):.1f}", *times]
    assert charts.ROTARY.split()[2] in shapes("Fast")
    assert float(row["fastest copy"]) >= 1.0  # "as long as a copy of the same bytes"


def recorded(name: str, case: str) -> list[float]:
    """The numbers of a case in a table of benchmarks/results, in their order."""
    text = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(case)} \|(.*)$", text, re.MULTILINE)
    assert row is not None
    return [float(number) for number in re.findall(r"\d+\.\d+", row[1])]


def test_figures_of_a_gpu() -> None:
    copy, rotary = recorded("cuda_h200.md", "rotary half [4,8192,32+8,128]")[:2]
    assert 0.99 < rotary / copy < 1.01  # "as long as copying the same bytes"
    bert = recorded("cuda_h200.md", "input_embedding, BERT [128,512,768]")
    softmax = recorded("cuda_h200.md", "alibi softmax [1,32,4096,4096]")
    text = (ROOT / "benchmarks" / "results" / "transformers_h200.md").read_text(encoding="utf-8")
    models = sorted(re.findall(r"(\d\.\d+) \|$", text, re.MULTILINE))
    compiled = recorded("cuda_h200.md", "rotary half [4,8192,32+8,128]")[-1]
    tokens = [recorded("cuda_h200.md", f"rotary decode [{n},1,32+8,128]")[-1] for n in (1, 32)]
    measured = [f"{rotary:.0f}", f"{bert[1]:.0f}", f"{bert[-1]:.1f}"]
    measured += [f"{softmax[1]:.0f}", f"{softmax[-1]:.1f}", f"{compiled:.2f}", "1", "32"]
    measured += [*map(str, tokens), models[0], models[-1]]
    assert figures("On GPUs too") == measured
    cases = ("[4,8192,32+8,128]", "[128,512,768]", "[1,32,4096,4096]")
    assert shapes("On GPUs too") == [*cases]


def test_figures_of_the_angles(charts: ModuleType) -> None:
    theirs = charts.readable(charts.float32_errors()[charts.MARKED])
    ours = charts.readable(charts.largest_error())
    base = inspect.signature(charts.float32_errors).parameters["base"].default.split()[1]
    assert figures("Exact") == [ours, theirs, "131,072", base]


def test_figures_of_the_input_layer(charts: ModuleType) -> None:
    case = "input: token + position + LayerNorm forward and backward [8,1024,768] float32"
    row = charts.calls("input_cpu.md", case)
    times = [f"{float(row[call]):.1f}" for call in ("eager", "compiled")]
    assert figures("Trains") == [f"{charts.milliseconds(row, 'posembed'):.1f}", *times]
    assert shapes("Trains") == ["[8,1024,768]"]


def shown(chart: str) -> list[str]:
    """The words and numbers of an SVG, and the data that it is drawn from."""
    return re.findall(r"<(?:text|dc:description)[^>]*>([^<]*)<", chart)


def test_committed_charts_are_those_of_the_results(charts: ModuleType) -> None:
    """Another version of matplotlib may place lines elsewhere, but shows the same numbers."""
    made = charts.charts()
    assert {path.name for path in charts.CHARTS.iterdir()} == set(made)
    for name, chart in made.items():
        assert len(shown(chart)) > 8
        committed = (charts.CHARTS / name).read_text(encoding="utf-8")
        assert shown(committed) == shown(chart), "run python benchmarks/charts.py"


def test_charts_are_the_same_every_time(charts: ModuleType) -> None:
    assert charts.charts() == charts.charts()


def test_errors_of_float32_angles_are_those_on_record(charts: ModuleType) -> None:
    angle_error = program("angle_error", BENCHMARKS)
    counts = [count for count in angle_error.POSITIONS if count <= 2**15]
    for base in angle_error.BASES:
        recorded = charts.float32_errors(f"base {base:,}")
        assert list(recorded) == list(angle_error.POSITIONS)
        found = angle_error.errors(base, counts)
        assert found == pytest.approx([recorded[count] for count in counts], rel=5e-3)
