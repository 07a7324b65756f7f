"""Hooks of `mkdocs build`: formulas, and the notebooks as pages. The rest are plain files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
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

    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_config(config: Any) -> Any:
    """Makes blocks ```math formulas."""
    fences = {"custom_fences": [{"name": "math", "class": "math", "format": formula}]}
    config["mdx_configs"]["pymdownx.superfences"] = fences
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return LINK.sub(r"notebooks/\1.md", markdown)
