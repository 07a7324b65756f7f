"""Diagrams of pairs, layouts, packed documents and a paged cache.

docs/pictures.py saves them beside the plots of posembed.plot. Cells are boxes of one unit; rows go
down.
"""

from __future__ import annotations

import itertools
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
EMPTY = "#9a9a9a"


def canvas(width: float, height: float) -> Any:
    """Axes without ticks, in units of cells: 7 inches wide, rows from the top."""
    size = (7.0, 7.0 * height / width)
    axes = pyplot.subplots(figsize=size, dpi=200, layout="constrained")[1]
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_aspect("equal")
    axes.axis("off")
    return axes


def cell(axes: Any, x: float, y: float, color: str, text: str = "", size: float = 8.0) -> None:
    """A box with a text."""
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=1.2))
    axes.text(x + 0.5, y + 0.53, text, ha="center", va="center", color="white", fontsize=size)


def words(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    """A text, whose left end is at x."""
    axes.text(x, y, text, **{"va": "center", "fontsize": 8.5, **style})


def arc(axes: Any, x: float, to: float, y: float, color: str) -> None:
    """A curve over the cells from one to another."""
    bend = -0.5 if to - x > 1 else -0.9
    ends = {"posA": (x + 0.5, y), "posB": (to + 0.5, y), "connectionstyle": f"arc3,rad={bend}"}
    axes.add_patch(FancyArrowPatch(**ends, arrowstyle="-", color=color, linewidth=1.5))


def pairs() -> Any:
    """Half-split beside interleaved pairs, for eight components."""
    axes = canvas(13.5, 6.2)
    for top, name, models, partners in (
        (1.6, "half-split", "Llama, Qwen, Gemma", [(i, i + 4) for i in range(4)]),
        (4.8, "interleaved", "GPT-J, Cohere, GLM", [(2 * i, 2 * i + 1) for i in range(4)]),
    ):
        words(axes, 0.1, top + 0.3, name, fontweight="bold")
        words(axes, 0.1, top + 0.85, models, fontsize=7)
        for pair, (first, second) in enumerate(partners):
            for component in (first, second):
                cell(axes, 4 + component, top, COLORS[pair], str(component))
            arc(axes, 4 + first, 4 + second, top, COLORS[pair])
    for pair in range(4):
        cell(axes, 12.3, 1.6 + 1.05 * pair, COLORS[pair], f"pair {pair}", 6)
    return axes


def layouts() -> Any:
    """The same twelve vectors in memory, in each layout: two texts, three tokens, two heads."""
    axes = canvas(17.5, 7.6)
    sizes = {"b": 2, "s": 3, "h": 2}
    shapes = {
        "bshd": "[batch, seq, heads, head_dim]",
        "bhsd": "[batch, heads, seq, head_dim]",
        "sbhd": "[seq, batch, heads, head_dim]",
        "thd": "[tokens, heads, head_dim]",
    }
    for row, (name, shape) in enumerate(shapes.items()):
        top = 0.4 + 1.6 * row
        words(axes, 0.1, top + 0.3, name, fontweight="bold", family="monospace")
        words(axes, 0.1, top + 0.85, shape, fontsize=6.5)
        order = name.replace("t", "bs")[:3]  # from the slowest index to the fastest
        for place, indices in enumerate(itertools.product(*(range(sizes[x]) for x in order))):
            at = dict(zip(order, indices, strict=True))
            color = COLORS[2 * at["h"] + at["b"]]
            cell(axes, 5.3 + place, top, color, f"t{at['s']} h{at['h']}", 6)
    for i, (h, b) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        x = 5.3 + 3.1 * i
        axes.add_patch(Rectangle((x, 6.9), 0.4, 0.4, facecolor=COLORS[2 * h + b]))
        words(axes, x + 0.55, 7.12, f"text {b}, head {h}", fontsize=7)
    return axes


def packed() -> Any:
    """Three documents as a padded batch and packed into one row."""
    axes = canvas(13, 7)
    lengths = (3, 2, 2)
    words(axes, 0.1, 0.5, "padded", fontweight="bold")
    words(axes, 0.1, 1.05, "3 rows of 3", fontsize=7)
    words(axes, 0.1, 4.7, "packed", fontweight="bold")
    words(axes, 0.1, 5.25, "1 row of 7", fontsize=7)
    words(axes, 11.5, 6.2, "cu_seqlens", fontsize=7, family="monospace")
    words(axes, 7.5, 1.7, "The number in a cell is the token's position.", fontsize=7)
    begin = 0
    for row, length in enumerate(lengths):
        for position in range(max(lengths)):
            color, text = (COLORS[row], str(position)) if position < length else (EMPTY, "pad")
            cell(axes, 4 + position, 0.2 + row, color, text, 8 if position < length else 6)
        for position in range(length):
            cell(axes, 4 + begin + position, 4.4, COLORS[row], str(position))
        begin += length
        words(axes, 4 + begin, 6.2, str(begin), ha="center")
        axes.plot([4 + begin, 4 + begin], [4.2, 5.8], color="grey", linewidth=1.0)
    words(axes, 4, 6.2, "0", ha="center")
    axes.plot([4, 4], [4.2, 5.8], color="grey", linewidth=1.0)
    return axes


def paged() -> Any:
    """Two sequences whose keys stand in pages of four tokens."""
    axes = canvas(20, 8.8)
    words(axes, 0.1, 1.1, "tokens", fontweight="bold")
    words(axes, 0.1, 3.7, "page table", fontweight="bold")
    words(axes, 0.1, 6.9, "cache", fontweight="bold")
    words(axes, 0.1, 7.5, "pages of 4 tokens", fontsize=7)
    for page in range(4):
        words(axes, 5 + 4.2 * page, 8.2, f"page {page}", ha="center", fontsize=7)
        for slot in range(4):
            cell(axes, 3 + 4.2 * page + slot, 6.6, EMPTY)
    for sequence, left, length, table in ((0, 3.0, 7, (2, 0)), (1, 11.4, 5, (3, 1))):
        words(axes, left, 0.3, f"sequence {sequence}, {length} tokens", fontsize=7)
        for position in range(length):
            page, slot = table[position // 4], position % 4
            cell(axes, left + position, 0.6, COLORS[sequence], str(position))
            cell(axes, 3 + 4.2 * page + slot, 6.6, COLORS[sequence], str(position))
        for number, page in enumerate(table):
            middle = left + 4 * number + min(4, length - 4 * number) / 2
            cell(axes, middle - 0.5, 3.2, EMPTY, str(page))
            arrow(axes, (middle, 1.7), (middle, 3.15))
            arrow(axes, (middle, 4.25), (5 + 4.2 * page, 6.5))
    return axes


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow from one point to another."""
    style = {"arrowstyle": "-|>", "mutation_scale": 8, "color": "grey", "linewidth": 1.0}
    axes.add_patch(FancyArrowPatch(begin, end, **style))
