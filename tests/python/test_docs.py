"""Tests that the documentation's examples run, and that the reference has all public names."""

import json
import re
from xml.etree import ElementTree

import posembed
import pytest
from support.documentation import DOCS, ROOT, blocks, program

PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
ELSEWHERE = ("reference/python.md", "start/nanogpt.md")  # other tests run them


@pytest.mark.parametrize(
    "page", [page for page in ("../README.md", *PAGES) if page not in ELSEWHERE and blocks(DOCS / page, "python")]
)
def test_python_blocks_run(page: str) -> None:
    """Runs the blocks in order."""
    if page == "../README.md":
        pytest.importorskip("transformers")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, code in enumerate(blocks(DOCS / page, "python")):
        exec(compile(code, f"docs/{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", ["README.md", "docs/start/cpp.md"])
def test_the_cpp_program_is_the_quickstart_example(page: str) -> None:
    """tests/install builds and runs that program, and the blocks that are parts of one."""
    programs = [code for code in blocks(ROOT / page, "cpp") if "int main" in code]
    assert programs == [(ROOT / "examples/cpp/quickstart/main.cpp").read_text()]


def test_python_reference_has_every_public_name() -> None:
    text = (DOCS / "reference/python.md").read_text()
    shown = set(re.findall(r"^<!-- written: python posembed\.(\w+)", text, re.MULTILINE))
    modules = {name.__name__ for name in vars(posembed).values() if hasattr(name, "__path__")}
    in_modules = set(dir(posembed.scaling)) | {"cpp"} | modules
    assert set(posembed.__all__) - shown - in_modules == set()


def test_cpp_reference_has_every_header() -> None:
    text = (DOCS / "reference/cpp.md").read_text()
    headers = {path.name for path in (ROOT / "csrc/include/posembed").glob("*.h")}
    written = r"^<!-- written: header csrc/include/posembed/(.*) -->$"
    shown = set(re.findall(written, text, re.MULTILINE))
    assert shown == headers - {"posembed.h", "export.h"}


def test_code_fits_the_page() -> None:
    """A page shows 80 columns. ruff.toml beside the pages wraps Python; the rest is by hand."""
    fence = re.compile(r"^ *```[^`\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    own = [page for page in PAGES if not page.startswith("reference/")]  # sources have 100
    code = {page: fence.findall((DOCS / page).read_text(encoding="utf-8")) for page in own}
    for page in (ROOT / "README.md", ROOT / "hub" / "README.md"):
        code[str(page)] = fence.findall(page.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code[path.name] = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    wide = [(page, line) for page, blocks in code.items() for line in "\n".join(blocks).splitlines() if len(line) > 80]
    assert wide == []
    assert {"start/cpp.md", "start/install.md", "families/rotary.md"} <= code.keys()


def test_formulas_are_known_to_the_converter() -> None:
    """docs/hooks.py makes MathML of them; unknown commands stay as text or break the XML."""
    from latex2mathml.converter import convert

    formulas = [(page, formula) for page in PAGES for formula in blocks(DOCS / page, "math")]
    assert formulas
    for page, formula in formulas:
        text = "".join(ElementTree.fromstring(convert(formula)).itertext())
        assert not set(text) & set("\\&{}"), (page, formula)


def test_cosines_of_the_derivation() -> None:
    """The page's table of cos θ against cos 3θ."""
    text = (DOCS / "families/rotary_derivation.md").read_text(encoding="utf-8").replace("\u2212", "-")
    rows = re.findall(r"^\| (\d) \|(.*) \|$", text, re.MULTILINE)
    theta = posembed.RotarySpec(16).frequencies()
    for pair, cells in rows:
        speed = theta[int(pair)]
        near, far = speed.cos().item(), (3 * speed).cos().item()
        found = [float(cell) for cell in cells.split("|")]
        assert found == pytest.approx([speed.item(), near, far, near - far], abs=6e-5)
    assert len(rows) == 5


def test_functions_in_formulas_stand_apart() -> None:
    """Set without a space, "a cos" is read as another function."""
    pytest.importorskip("latex2mathml")
    options = {"language": "math", "class_name": "math", "options": {}, "md": None}
    text = program("hooks").formula(r"a' = a \cos x + 2\sin x", **options)
    assert re.findall(r"<mspace[^>]*/><mi>(\w+)</mi>", text) == ["cos", "sin"]
    assert "msup" not in text


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"(?:- |: )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    assert listed == {*PAGES, *notebooks}
    # Readers of the repository have no navigation but the overview.
    overview = set(re.findall(r"\]\((?!\.\.)([\w/]+\.md)[#)]", (DOCS / "index.md").read_text()))
    assert overview == {*PAGES} - {"index.md"}
