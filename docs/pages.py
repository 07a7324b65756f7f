"""Writes the generated parts of the documentation, which readers of the repository see too.

PYTHONPATH=python python docs/pages.py               sections, whole pages, pictures: some seconds
PYTHONPATH=python python docs/pages.py --notebooks   the outputs of the notebooks too: minutes

A section stands between ``<!-- written: KIND SOURCE -->`` and ``<!-- end -->``. KIND is "python" (a
name of posembed and, after it, inherited methods to show), "header" (a file) or "table" (a file of
results and, after it, how many of its cases to show).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import patched_models
import reference
import rotary_conventions

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SECTION = re.compile(r"^<!-- written: (\w+) (.*?) -->\n(.*?)^<!-- end -->$", re.M | re.S)


def header(source: str) -> str:
    """A C++ header as it is."""
    return f"```cpp\n{(ROOT / source).read_text(encoding='utf-8')}```"


def table(source: str) -> str:
    """A file of benchmarks/results without its title; its headings become small ones."""
    path, *count = source.split()
    text = (ROOT / path).read_text(encoding="utf-8").split("\n", 1)[1]
    cases = re.split(r"^##+ ", text, flags=re.M)
    shown = "#### ".join(cases[: 1 + int(count[0])] if count else cases).strip()
    return f"{shown}\n\nThe other cases are in `{path}`." if count else shown


def names(text: str) -> dict[str, tuple[str, ...]]:
    """What a page says of the Python reference: names, and inherited methods of each."""
    found = [source.split() for kind, source, _ in SECTION.findall(text) if kind == "python"]
    return {name: tuple(methods) for name, *methods in found}


def refreshed(text: str) -> str:
    """A page with its sections as they are now."""
    python = reference.Page(names(text))
    kinds = {"python": lambda source: python.text(source.split()[0]), "header": header}
    kinds["table"] = table

    def section(found: re.Match[str]) -> str:
        kind, source, _ = found.groups()
        return f"<!-- written: {kind} {source} -->\n\n{kinds[kind](source)}\n\n<!-- end -->"

    return SECTION.sub(section, text)


def pages() -> dict[Path, str]:
    """Every page with a generated part, as it should be."""
    found = {
        DOCS / "guide/patched_models.md": patched_models.page(),
        DOCS / "guide/rotary_conventions.md": rotary_conventions.page(),
    }
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if "<!-- written: " in text:
            found[path] = refreshed(text)
    return found


def main() -> None:
    """Writes what is stale, and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notebooks", action="store_true", help="run the notebooks too")
    arguments = parser.parse_args()
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))

    sys.path.append(str(ROOT / "benchmarks"))
    import charts
    import pictures

    charted = {charts.CHARTS / name: text.encode() for name, text in charts.charts().items()}
    drawn = pictures.files()
    for path in set(pictures.PICTURES.iterdir()) - drawn.keys():
        path.unlink()
        print(path.relative_to(ROOT))
    for path, content in {**charted, **drawn}.items():
        if pictures.is_stale(path, content):
            path.write_bytes(content)
            print(path.relative_to(ROOT))
    if arguments.notebooks:
        import notebooks

        for path in notebooks.refresh():
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
