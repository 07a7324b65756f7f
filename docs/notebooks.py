"""Runs the notebooks and keeps their outputs, which readers of the repository and the site see."""

from __future__ import annotations

import base64
import math
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pictures

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
STYLE = Path(__file__).with_name("notebooks.mplstyle")
DRAWING = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "MATPLOTLIBRC": str(STYLE)}


def execute(path: Path) -> Any:
    """The notebook with its outputs, run in its own folder as Jupyter runs it."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    client.execute(env={**os.environ, **DRAWING})
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without progress bars and warnings
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for data in (output["data"] for output in cell.outputs if "data" in output):
                if "image/png" in data:
                    small = pictures.small_png(base64.b64decode(data["image/png"]))
                    data["image/png"] = base64.b64encode(small).decode()
    return notebook


def shown(cell: Any) -> str:
    """What a cell shows; lines printed apart are separate outputs at times."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        picture = "image/png" in data
        texts.append("picture" if picture else output.get("text", data.get("text/plain", "")))
    return re.sub(" +", " ", "".join(texts))


def near(one: str, other: str) -> bool:
    """Whether numbers are equal or, with decimals, differ by rounding."""
    if one == other or not re.search(r"[.e]", one + other):
        return one == other
    return math.isclose(
        *(float(x.replace(",", "")) for x in (one, other)), rel_tol=0.05, abs_tol=0.05
    )


def alike(one: Any, other: Any) -> bool:
    """Whether cells show the same but for decimals, which other processors round otherwise."""
    if [cell.source for cell in one.cells] != [cell.source for cell in other.cells]:
        return False
    texts = ["\n".join(map(shown, notebook.cells)) for notebook in (one, other)]
    words, numbers = zip(
        *((NUMBER.sub("0", text), NUMBER.findall(text)) for text in texts), strict=True
    )
    return words[0] == words[1] and all(map(near, *numbers))


def refresh() -> list[Path]:
    """Runs every notebook; writes those that show something else than they keep."""
    written = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = execute(path)
        if not alike(notebook, nbformat.read(path, as_version=4)):
            nbformat.write(notebook, path)
            written.append(path)
    return written
