"""Tests that the notebooks' outputs are those of their text; the docs stage of CI runs them."""

import base64
import copy
import io
import json
import re
from pathlib import Path

import pytest
from support.documentation import program

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

# Expected outputs that the text relies on, and pictures.
SHOWN = {
    "tokens_to_positions": (
        8,
        [
            "church             2     0.301    0.038 0.000 0.014 0.000",
            "'this' is id 2023; zeros before: 2023, after: 28498",
            "one-hot @ W equals row 2023: True",
            "king - man + woman: queen",
            "'cat' stands at 2 and 6",
            "same vector with positions:   False",
            "19.869      9.9               10",
            "16 heads: 0.7071 0.5 ",
        ],
    ),
    "long_context": (
        5,
        [
            "1,000,003           2.2e-02    4.7e-08",
            "[255.0, 256.0, 256.0, 258.0, 260.0, 260.0]",
            "TypeError: positions: expected int32, int64, float32 or float64, got bfloat16",
            "same cosines as torch.cos(position * theta): True",
            "within 8,192 positions: 35",
            "linear              11.31  11.31  11.31  11.30  11.25",
        ],
    ),
    "photograph_to_patches": (
        7,
        [
            "rows and columns of patches: (37, 32)",
            "shuffled, without positions: same results True",
            "shuffled, with positions: same results False",
            "mean similarity of neighbours more than that of distant patches: True",
            "colours of 1184 patches from a table of 36 rows",
        ],
    ),
    "extrapolation": (5, ["windows to train on, 32,768 bytes to be judged on"]),
}


def losses(text: str) -> dict[str, list[float]]:
    """The rows that extrapolation prints: a name and three losses."""
    rows = re.findall(r"^(\w+(?:, 4)?) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)$", text, re.MULTILINE)
    return {name: [float(loss) for loss in row] for name, *row in rows}


def check_losses(at: dict[str, list[float]]) -> None:
    """Checks the text's claims: at the trained length, twice and four times as long."""
    assert at["rope"][0] < min(at["alibi"][0], at["sinusoidal"][0])
    assert at["sinusoidal"][2] > at["sinusoidal"][0] + 0.2
    assert at["rope"][2] > at["rope"][0] + 0.1
    assert abs(at["alibi"][2] - at["alibi"][0]) < 0.05
    assert at["unscaled"] == at["rope"]
    assert at["NTK, 4"][2] < at["rope"][2]
    assert at["rope"][0] < at["NTK, 4"][0] < at["rope"][0] + 0.2
    assert at["linear, 4"][0] > at["rope"][0] + 0.1


def test_pictures_are_clear() -> None:
    """They stand on light and on dark pages."""
    image = pytest.importorskip("PIL.Image")
    for path in NOTEBOOKS:
        outputs = [o for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", [])]
        drawn = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
        for picture in drawn:
            with image.open(io.BytesIO(base64.b64decode(picture))) as opened:
                assert opened.convert("RGBA").getpixel((0, 0))[3] == 0, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_what_its_text_says(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    pictures, expected = SHOWN[path.stem]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    assert {output.get("name") for output in outputs} <= {"stdout", None}
    text = "".join("".join(o["text"]) for o in outputs if o.get("name") == "stdout")
    for fragment in expected:
        assert fragment in text, text
    if path.stem == "extrapolation":
        check_losses(losses(text))
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]


def test_a_run_that_shows_something_else_is_kept() -> None:
    """Decimals may differ by rounding: other processors train to other last digits."""
    for name in ("nbformat", "matplotlib"):
        pytest.importorskip(name)
    notebooks = program("notebooks")
    kept = notebooks.nbformat.read(NOTEBOOKS[0], as_version=4)
    shown = next(o for c in kept.cells for o in c.get("outputs", []) if o.get("name") == "stdout")
    for before, after, alike in (
        ("a 1.00", "a  1.01", True),
        ("a 1.00", "a 1.20", False),
        ("a 1.00", "b 1.00", False),
        ("1,000", "1,001", False),
        ("1.5e-08", "-3e-08", True),
        ("", "1.00", False),
    ):
        shown.text = before
        changed = copy.deepcopy(kept)
        shown.text = after
        assert notebooks.alike(kept, changed) == alike, after
    changed.cells[0].source += " "
    assert not notebooks.alike(changed, kept)


def test_the_longer_run_is_that_of_the_documentation() -> None:
    pytest.importorskip("matplotlib")
    losses, lengths = program("pictures").extrapolation()
    assert lengths == [64, 128, 256]
    cells = json.loads((NOTEBOOKS[0].parent / "extrapolation.ipynb").read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if cell["id"] == "demo-table"]
    names: dict[str, object] = {}
    exec(source.partition("pe.plot")[0], names)
    assert list(names["demo"].values()) == list(losses.values())
