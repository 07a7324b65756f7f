"""Diagrams of layers, tokens, pairs, layouts, documents, a paged cache, waves and sinusoids.

docs/pictures.py saves them beside the plots of posembed.plot. Cells are boxes of one unit; rows go
down.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle
from posembed import RotarySpec, SinusoidalSpec, functional, plot

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


def cell(axes: Any, x: float, y: float, color: str, text: str = "", size: float = 10.0) -> None:
    """A box with a text."""
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=1.2))
    axes.text(x + 0.5, y + 0.53, text, ha="center", va="center", color="white", fontsize=size)


def words(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    """A text, whose left end is at x."""
    axes.text(x, y, text, **{"va": "center", "fontsize": 10.0, **style})


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
        words(axes, 0.1, top + 0.85, models, fontsize=9)
        for pair, (first, second) in enumerate(partners):
            for component in (first, second):
                cell(axes, 4 + component, top, COLORS[pair], str(component))
            arc(axes, 4 + first, 4 + second, top, COLORS[pair])
    for pair in range(4):
        cell(axes, 12.3, 1.6 + 1.05 * pair, COLORS[pair], f"pair {pair}", 9)
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
        words(axes, 0.1, top + 0.85, shape, fontsize=9)
        order = name.replace("t", "bs")[:3]  # from the slowest index to the fastest
        for place, indices in enumerate(itertools.product(*(range(sizes[x]) for x in order))):
            at = dict(zip(order, indices, strict=True))
            color = COLORS[2 * at["h"] + at["b"]]
            cell(axes, 5.3 + place, top, color, f"t{at['s']} h{at['h']}", 9)
    for i, (h, b) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        x = 5.3 + 3.1 * i
        axes.add_patch(Rectangle((x, 6.9), 0.4, 0.4, facecolor=COLORS[2 * h + b]))
        words(axes, x + 0.55, 7.12, f"text {b}, head {h}", fontsize=9)
    return axes


def packed() -> Any:
    """Three documents as a padded batch and packed into one row."""
    axes = canvas(13, 7)
    lengths = (3, 2, 2)
    words(axes, 0.1, 0.5, "padded", fontweight="bold")
    words(axes, 0.1, 1.05, "3 rows of 3", fontsize=9)
    words(axes, 0.1, 4.7, "packed", fontweight="bold")
    words(axes, 0.1, 5.25, "1 row of 7", fontsize=9)
    words(axes, 11.5, 6.2, "cu_seqlens", fontsize=9, family="monospace")
    words(axes, 7.5, 1.7, "The number in a cell is the token's position.", fontsize=9)
    begin = 0
    for row, length in enumerate(lengths):
        for position in range(max(lengths)):
            color, text = (COLORS[row], str(position)) if position < length else (EMPTY, "pad")
            cell(axes, 4 + position, 0.2 + row, color, text, 10 if position < length else 9)
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
    words(axes, 0.1, 7.6, "4 to a page", fontsize=9)
    for page in range(4):
        words(axes, 5 + 4.2 * page, 8.2, f"page {page}", ha="center", fontsize=9)
        for slot in range(4):
            cell(axes, 3 + 4.2 * page + slot, 6.6, EMPTY)
    for sequence, left, length, table in ((0, 3.0, 7, (2, 0)), (1, 11.4, 5, (3, 1))):
        words(axes, left, 0.3, f"sequence {sequence}, {length} tokens", fontsize=9)
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


def layers() -> Any:
    """Module, operator and kernel: what is in each, and what passes between them."""
    axes = canvas(21, 10)
    for place, (name, color, first, second) in enumerate(
        (
            (
                "module",
                COLORS[0],
                "torch::nn::Module (C++), nn.Module (Python)",
                "options, parameters, defaults",
            ),
            (
                "operator",
                COLORS[3],
                "torch.ops.posembed.*",
                "schema, checks, shapes, gradients, choice of kernel",
            ),
            (
                "kernel",
                COLORS[2],
                "C++ (baseline, AVX2, AVX-512) and CUDA",
                "arithmetic, without a header of torch",
            ),
        )
    ):
        top = 0.2 + 3.0 * place
        axes.add_patch(Rectangle((0.1, top), 20.8, 1.9, facecolor=color))
        words(axes, 0.5, top + 0.95, name, color="white", fontsize=11, fontweight="bold")
        for line, text in enumerate((first, second)):
            words(axes, 5.2, top + 0.55 + 0.8 * line, text, color="white", fontsize=9)
    for top, text in (
        (2.1, "one call through the dispatcher"),
        (5.1, "pointers, sizes and strides"),
    ):
        arrow(axes, (2.0, top), (2.0, top + 1.1))
        words(axes, 2.6, top + 0.5, text, fontsize=9)
    operators = "libposembed.so has the upper two: C++ programs link it, Python loads it."
    kernels = "libposembed_kernels.so has the kernels: C, NumPy and JAX call it without torch."
    words(axes, 0.1, 8.6, operators, fontsize=9)
    words(axes, 0.1, 9.4, kernels, fontsize=9)
    return axes


TEXT = "unhappily, the café closed."
CUTS = {
    "words": ("unhappily", ",", "the", "café", "closed", "."),
    "sub-words": ("un", "##happi", "##ly", ",", "the", "[UNK]", "clos", "##ed", "."),
    "characters": tuple(TEXT),
}


def tokens() -> Any:
    """One text, cut into words, sub-words and characters."""
    axes = canvas(33, 9)
    for row, (name, cut) in enumerate(CUTS.items()):
        top = 0.4 + 2.7 * row
        words(axes, 0.1, top + 0.9, name, fontweight="bold", fontsize=9)
        begin = 0
        for number, token in enumerate(cut):
            begin += TEXT[begin] == " " and token != " "
            letters = token.removeprefix("##")
            length = 4 if token == "[UNK]" else len(letters)
            box = {"facecolor": COLORS[number % 2], "edgecolor": "white", "linewidth": 1.2}
            axes.add_patch(Rectangle((5.8 + begin, top), length, 1.8, **box))
            style = {"ha": "center", "va": "center", "color": "white", "fontsize": 9}
            axes.text(5.8 + begin + length / 2, top + 0.95, letters.replace(" ", "␣"), **style)
            begin += length
    return axes


def waves() -> Any:
    """The bound of a pair's part of the score, and cosines of distances 1 and 3 by pair."""
    left, right = plot.side_by_side([1, 1], height=3.9)
    x = torch.linspace(0, 4 * math.pi, 400, dtype=torch.float64)
    for name, values, style in (
        ("cos x", x.cos(), "--"),
        ("sin x", x.sin(), ":"),
        ("their sum", x.cos() + x.sin(), "-"),
    ):
        left.plot(x.numpy(), values.numpy(), style, label=name)
    for bound in (-math.sqrt(2), math.sqrt(2)):
        left.axhline(bound, color="grey", linewidth=0.8)
    left.set_yticks([-math.sqrt(2), -1, 0, 1, math.sqrt(2)], ["-√2", "-1", "0", "1", "√2"])
    left.set_xticks([0, 2 * math.pi, 4 * math.pi], ["0", "2π", "4π"])
    theta = RotarySpec(16).frequencies()
    for distance, mark in ((1, "o-"), (3, "s--")):
        right.plot((distance * theta).cos().numpy(), mark, label=f"cos {distance}θ")
    plot.legend(left)
    plot.legend(right)
    plot.label(left, "A pair's wave", "x", "part of the score")
    plot.label(right, "Distances 1 and 3", "pair, fastest first", "cosine")
    return left


STEPS = 32  # positions of the animation
SHOWN_PAIRS = (0, 1, 2, 4)


def step(position: int) -> Any:
    """One position of the animation: sines of four pairs, and the whole encoding as a column."""
    left, right = plot.side_by_side([5, 1], height=4.0)
    spec = SinusoidalSpec(32, preset="marian")
    speeds = spec.frequencies()
    at = torch.linspace(0, STEPS - 1, 400, dtype=torch.float64)
    for row, pair in enumerate(SHOWN_PAIRS):
        color, middle = COLORS[row], 2.6 * row
        left.axhline(middle, color="grey", linewidth=0.4)
        left.plot(at.numpy(), (middle - (speeds[pair] * at).sin()).numpy(), color=color)
        left.plot(
            position,
            middle - math.sin(float(speeds[pair]) * position),
            "o",
            color=color,
            markersize=8,
        )
    left.axvline(position, color="grey", linewidth=0.8, linestyle="--")
    left.set_yticks([2.6 * row for row in range(4)], [str(pair) for pair in SHOWN_PAIRS])
    left.set_ylim(9.2, -1.4)
    right.imshow(
        functional.sinusoidal_encode(torch.tensor([position]), spec=spec)[:, :16].T.numpy(),
        aspect="auto",
        cmap=plot.DIVERGING,
        vmin=-1,
        vmax=1,
    )
    right.set_xticks([])
    plot.label(left, f"Position {position}", "position", "sine of pair")
    plot.label(right, "All", "", "")
    return left


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow from one point to another."""
    style = {"arrowstyle": "-|>", "mutation_scale": 8, "color": "grey", "linewidth": 1.0}
    axes.add_patch(FancyArrowPatch(begin, end, **style))
