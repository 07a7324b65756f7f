"""Hooks of `mkdocs build`: formulas, notebooks as pages, hover texts. The rest are plain files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
GLOSSARY = Path(__file__).resolve().parent / "glossary.md"
COMMON = ("query, key, value", "score", "base", "packed", "offset")  # words of every sentence
FUNCTION = re.compile(r"(?<=[\w}]) *(?=\\(?:cos|sin|log|exp)\b)")
LINK = re.compile(r"\.\./examples/notebooks/(\w+)\.ipynb")


def on_files(files: Any, config: Any) -> Any:
    """Notebooks become pages with their pictures: notebooks/name.md."""
    import nbformat
    from mkdocs.structure.files import File
    from nbconvert import MarkdownExporter

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        where = {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
        notebook = nbformat.read(path, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(notebook, resources=where)
        text = text.replace("![png]", "![Picture]")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def formula(
    source: str, language: str, class_name: str, options: Any, md: Any, **other: Any
) -> str:
    """A block ```math as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    # A thin space keeps "a cos" from being "acos"; a prime that is raised twice leaves its line.
    source = FUNCTION.sub(r" \\, ", source).replace("'", "\u2032")
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: Any) -> Any:
    """Makes blocks ```math formulas."""
    fences = {"custom_fences": [{"name": "math", "class": "math", "format": formula}]}
    config["mdx_configs"]["pymdownx.superfences"] = fences
    return config


def hover_texts() -> str:
    """The glossary's terms with the first sentence of each, as the abbr extension reads them."""
    text = GLOSSARY.read_text(encoding="utf-8")
    found = re.findall(r"^## ([^\n]+)\n(.+?)\.(?=\s)", text, re.MULTILINE | re.DOTALL)
    meanings = {word: " ".join(meaning.replace("`", "").split()) for word, meaning in found}
    return "\n".join(f"*[{word}]: {meanings[word]}." for word in meanings if word not in COMMON)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to notebooks lead to their pages; words of the glossary explain themselves."""
    markdown = LINK.sub(r"notebooks/\1.md", markdown)
    if page.file.src_uri.startswith(("glossary", "reference/", "notebooks/")):
        return markdown
    return f"{markdown}\n\n{hover_texts()}\n"
