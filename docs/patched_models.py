"""Writes patched_models.md from patched_models.json, what the walks over three libraries found.

docs/pages.py calls it. tests/python/support/transformers_walk.py and stacks_walk.py print the
data.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("patched_models.json")
HEAD = """\
# Which models `patch` reaches

`docs/patched_models.py` writes this page from `docs/patched_models.json`, the results of a walk
over every model class. [The guide](transformers.md) says what `patch` does.
"""
TRANSFORMERS = """\
## transformers {version}

Every model class is built and patched. One class of each family also runs, if it can be made small
from its configuration.

{classes}

The one whose kernel never runs is CLVP's decoder, which rotates nothing by default. Families are
patched by what they compute. "First half tables" read the first half of tables that repeat each
value; "half tables" have each value once. "Float32" means that 16-bit queries are rotated in
float32 and rounded once.

{rotations}

{left}

### All families

{families}
"""
STACK = """\
## {name} {version}

{text} Of {rotating} classes that rotate, {patched} are patched: the kernel runs in every call, with
the model's bits in bfloat16 and float32, except the last bit of complex products in float32.

{table}
"""
TEXTS = {
    "diffusers": "The small models of its own tests run, with tables that rotate.",
    "timm": "All run with one layer at their own image size, except vit_5b_patch16_sapiens2.",
}


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], right: int = 0) -> str:
    """A Markdown table; the last columns are aligned to the right."""
    head = list(head)
    line = ["---"] * (len(head) - right) + ["--:"] * right
    cells = [head, line, *[[str(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def transformers(data: Any) -> str:
    """The section of transformers."""
    families = "\n\n".join(
        textwrap.fill(f"{state.capitalize()}: {', '.join(names)}.", 100)
        for state, names in data["families"].items()
    )
    return TRANSFORMERS.format(
        version=data["version"],
        classes=table(("model classes", "number"), data["classes"].items(), right=1),
        rotations=table(("rotation", "families", "classes", "for example"), data["rotations"]),
        left=textwrap.fill(data["left"], 100),
        families=families,
    )


def stack(name: str, data: Any) -> str:
    """The section of another library."""
    models = data["models"]
    states = [state for state, _ in models.values() if state in ("patched", "partly", "left")]
    rows = [
        (model, state, why) for model, (state, why) in models.items() if state != "does not rotate"
    ]
    return STACK.format(
        name=name,
        version=data["version"],
        text=TEXTS[name],
        rotating=len(states),
        patched=states.count("patched"),
        table=table(("model", "state", "what it computes, or why it stays"), rows),
    )


def page() -> str:
    """The page."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    parts = [HEAD, transformers(data["transformers"])]
    parts += [stack(name, data[name]) for name in TEXTS]
    return "\n".join(parts)
