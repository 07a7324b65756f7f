"""Hooks of `mkdocs build`: they draw the pictures with posembed and run the notebooks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"
NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
INLINE = "module://matplotlib_inline.backend_inline"


def extrapolation() -> tuple[dict[str, list[float | None]], list[int]]:
    """The table of losses in families/index.md: of each method, and the lengths."""
    page = (Path(__file__).parent / "families" / "index.md").read_text(encoding="utf-8")
    lines = page[page.index("| positions |") :].split("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    losses = {
        method: [None if cell == "no rows" else float(cell) for cell in cells]
        for method, *cells in rows
    }
    return losses, [int(length) for length in head[1:]]


def draw(folder: Path) -> None:
    """Every picture that the pages show."""
    import matplotlib

    matplotlib.use("Agg")
    import posembed as pe

    llama = {f"base {base:,}": pe.RotarySpec(256, base=float(base)) for base in (10_000, 500_000)}
    pictures = {
        "heat_map": pe.plot.heat_map(pe.SinusoidalSpec(512)),
        "shift_matrix": pe.plot.shift_matrix(pe.SinusoidalSpec(32), 7),
        "similarity_map": pe.plot.similarity_map(
            pe.SinusoidalPositionalEmbedding(64, preset="mae"), (7, 7)
        ),
        "binary_codes": pe.plot.binary_codes(100),
        "component_scores": pe.plot.component_scores(pe.RotarySpec(256), 128),
        "wavelengths": pe.plot.wavelengths(llama),
        "scores_by_distance": pe.plot.scores_by_distance(llama, 512),
        "scores_far": pe.plot.scores_by_distance(llama, 65_535, log=True),
        "angle_error": pe.plot.angle_error(pe.RotarySpec(128, base=500000.0)),
        "extrapolation": pe.plot.extrapolation(*extrapolation()),
        "alibi_bias": pe.plot.alibi_bias(pe.ALiBi(8), 32),
    }
    folder.mkdir(exist_ok=True)
    for name, axes in pictures.items():
        axes.figure.savefig(folder / f"{name}.png")


def execute(path: Path) -> Any:
    """The notebook with its outputs, run in its own folder as Jupyter runs it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    client.execute(env={**os.environ, "MPLBACKEND": INLINE})
    return notebook


def without_noise(notebook: Any) -> Any:
    """The notebook without progress bars and warnings."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The notebook, run, as Markdown, and its pictures by their paths beside it."""
    from nbconvert import MarkdownExporter

    where = {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
    notebook = without_noise(execute(path))
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources=where)
    return text.replace("![png]", "![Picture]"), resources["outputs"]


def on_files(files: Any, config: Any) -> Any:
    """Notebooks become pages: notebooks/name.md."""
    from mkdocs.structure.files import File

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_pre_build(config: Any) -> None:
    """Pictures first: pages link to them."""
    draw(PICTURES)
