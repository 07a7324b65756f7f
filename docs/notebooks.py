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
DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
INLINE = "module://matplotlib_inline.backend_inline"


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
    client.execute(env={**os.environ, "MPLBACKEND": INLINE})
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without progress bars and warnings
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for data in (output["data"] for output in cell.outputs if "data" in output):
                if "image/png" in data:
                    small = pictures.small_png(base64.b64decode(data["image/png"]))
                    data["image/png"] = base64.b64encode(small).decode()
    return notebook


def text_of(output: Any) -> str:
    """The text of an output without numbers, which differ between machines."""
    if "image/png" in output.get("data", {}):
        return "picture"
    text = output.get("text", output.get("data", {}).get("text/plain", ""))
    return re.sub(r"[-\d.,e+ ]*\d[-\d.,e+ ]*", " 0 ", text)


def shown(notebook: Any) -> list[tuple[str, str]]:
    """Each cell and what it shows; lines printed apart are separate outputs at times."""
    cells = notebook.cells
    return [(cell.source, "".join(map(text_of, cell.get("outputs", [])))) for cell in cells]


def alike(one: Any, other: Any) -> bool:
    """Whether cells show the same but for decimals, which other processors round otherwise."""
    texts = [repr(shown(notebook)) for notebook in (one, other)]
    if DECIMAL.sub("", texts[0]) != DECIMAL.sub("", texts[1]):
        return False
    pairs = zip(*(map(float, DECIMAL.findall(text)) for text in texts), strict=True)
    return all(math.isclose(a, b, rel_tol=0.05, abs_tol=0.05) for a, b in pairs)


def refresh() -> list[Path]:
    """Runs every notebook; writes those that show something else than they keep."""
    written = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = execute(path)
        if not alike(notebook, nbformat.read(path, as_version=4)):
            nbformat.write(notebook, path)
            written.append(path)
    return written
