"""Hooks of `mkdocs build`: pictures, drawn for a light and a dark page, formulas, and notebooks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"
NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
INLINE = "module://matplotlib_inline.backend_inline"
DARK = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": "#e2e4e9",
    "axes.labelcolor": "#e2e4e9",
    "axes.edgecolor": "#a6a9b6",
    "xtick.color": "#a6a9b6",
    "ytick.color": "#a6a9b6",
    "legend.facecolor": "#1e2129",
}
PICTURE = re.compile(r"!\[([^\]]*)\]\(((?:\.\./)*pictures/\w+)\.png\)")


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


def drawn() -> dict[str, Any]:
    """Every picture that the pages show, by name."""
    sys.path.insert(0, str(Path(__file__).parent))  # mkdocs drops what hooks add as they load
    import diagrams
    import posembed as pe

    llama = {f"base {base:,}": pe.RotarySpec(256, base=float(base)) for base in (10_000, 500_000)}
    pair_axes = pe.plot.side_by_side([1, 1], height=3.9)
    for pair, axes in zip((0, 4), pair_axes, strict=True):
        pe.plot.rotated_pair(pe.RotarySpec(64), pair, axes=axes)
    return {
        "rotated_pair": pair_axes[0],
        "pairs": diagrams.pairs(),
        "layouts": diagrams.layouts(),
        "packed": diagrams.packed(),
        "paged": diagrams.paged(),
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


def draw(folder: Path) -> None:
    """Saves every picture in two forms: name.png and name_dark.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    for ending, style in (("", {}), ("_dark", DARK)):
        with matplotlib.rc_context(style):
            for name, axes in drawn().items():
                axes.figure.savefig(folder / f"{name}{ending}.png")
        pyplot.close("all")


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
    """Shows the form of each picture that fits the page's colours."""
    both = r"![\1](\2.png#only-light)![\1](\2_dark.png#only-dark)"
    return PICTURE.sub(both, markdown)


def on_pre_build(config: Any) -> None:
    """Pictures first: pages link to them."""
    draw(PICTURES)
