"""Draws the pictures of the pages, for light and for dark ones: SVG, PNG for maps, a GIF.

A picture carries the texts and numbers that it shows as its description: what a test compares,
because another version of matplotlib writes other bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import diagrams
import posembed as pe
from matplotlib import pyplot
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "posembed"}
THEMES: dict[str, Any] = {
    "light": {},
    "dark": {
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "text.color": "#e2e4e9",
        "axes.labelcolor": "#e2e4e9",
        "axes.edgecolor": "#a6a9b6",
        "xtick.color": "#a6a9b6",
        "ytick.color": "#a6a9b6",
        "legend.facecolor": "#1e2129",
    },
}
LARGEST_SVG = 100_000  # bytes; many points make a smaller PNG
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def page_table(page: str, first: str) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of a page's table, whose first head is given."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return head, rows


def training_step() -> Any:
    """The milliseconds of each part of a step in guide/training_tables.md, as bars."""
    head, rows = page_table("guide/training_tables.md", "table learns by")
    axes = pe.plot.new_axes(None, height=2.2)
    names = [row[0].strip("`") for row in rows]
    left = [0.0] * len(rows)
    for column in range(2, len(head)):
        widths = [float(row[column]) for row in rows]
        axes.barh(names, widths, left=left, height=0.6, label=head[column])
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.28), ncols=4, frameon=False)
    return axes


def extrapolation() -> tuple[dict[str, list[float | None]], list[int]]:
    """The table of losses in families/index.md: of each method, and the lengths."""
    head, rows = page_table("families/index.md", "positions")
    losses = {
        method: [None if cell == "no rows" else float(cell) for cell in cells]
        for method, *cells in rows
    }
    return losses, [int(length) for length in head[1:]]


def drawn() -> dict[str, Any]:
    """Every picture that the pages show, by name."""
    llama = {f"base {base:,}": pe.RotarySpec(256, base=float(base)) for base in (10_000, 500_000)}
    pair_axes = pe.plot.side_by_side([1, 1], height=3.9)
    for pair, axes in zip((0, 4), pair_axes, strict=True):
        pe.plot.rotated_pair(pe.RotarySpec(64), pair, axes=axes)
    return {
        "rotated_pair": pair_axes[0],
        "layers": diagrams.layers(),
        "tokens": diagrams.tokens(),
        "waves": diagrams.waves(),
        "pairs": diagrams.pairs(),
        "layouts": diagrams.layouts(),
        "packed": diagrams.packed(),
        "paged": diagrams.paged(),
        "heat_map": pe.plot.heat_map(pe.SinusoidalSpec(512)),
        "heat_map_million": pe.plot.heat_map(pe.SinusoidalSpec(512, base=1e6)),
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
        "training_step": training_step(),
        "alibi_bias": pe.plot.alibi_bias(pe.ALiBi(8), 32),
    }


def numbers(kind: str, values: Any) -> str:
    """The range and the mean of what is drawn."""
    low, high, mean = float(values.min()), float(values.max()), float(values.mean())
    return f"{kind} of {values.size} from {low:.3g} to {high:.3g}, mean {mean:.3g}"


def description(figure: Any) -> str:
    """The texts and numbers that a figure shows."""
    figure.canvas.draw()
    parts = [text.get_text() for text in figure.findobj(Text) if text.get_visible()]
    for axes in figure.axes:
        parts += [numbers("line", line.get_xydata()) for line in axes.lines]
        parts += [numbers("map", image.get_array()) for image in axes.images]
        parts.append(f"{len(axes.patches)} shapes, {len(axes.collections)} collections")
    return "; ".join(" ".join(part.split()) for part in parts if part.strip())


def small_png(content: bytes, words: str = "") -> bytes:
    """The same picture in 128 colours, with a description."""
    facts, file = PngInfo(), io.BytesIO()
    if words:
        facts.add_itxt("Description", words)
    with Image.open(io.BytesIO(content)) as image:
        few = image.convert("RGBA").quantize(128, Image.Quantize.FASTOCTREE)
        few.save(file, "PNG", optimize=True, pnginfo=facts)
    return file.getvalue()


def saved(figure: Any, form: str, **options: Any) -> bytes:
    """The bytes of a figure's file."""
    file = io.BytesIO()
    figure.savefig(file, format=form, **options)
    return file.getvalue()


def picture(figure: Any) -> tuple[str, bytes]:
    """The ending of its file, and its bytes."""
    words = description(figure)
    if not any(axes.images for axes in figure.axes):
        facts = {"Description": words, "Date": None, "Creator": None}
        lines = saved(figure, "svg", metadata=facts).decode().splitlines()
        text = "\n".join(line.rstrip() for line in lines) + "\n"
        if len(text) < LARGEST_SVG:
            return ".svg", text.encode()
    return ".png", small_png(saved(figure, "png"), words)


def animation(background: str) -> bytes:
    """The steps of an encoding as a GIF, whose comment describes the first and the last."""
    frames, words = [], []
    for position in range(diagrams.STEPS):
        figure = diagrams.step(position).figure
        figure.set(dpi=80, facecolor=background)
        if position in (0, diagrams.STEPS - 1):
            words.append(description(figure))
        frames.append(Image.open(io.BytesIO(saved(figure, "png", facecolor=background))))
        pyplot.close(figure)
    palette = frames[-1].convert("RGB").quantize(48)
    few = [
        frame.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames
    ]
    file = io.BytesIO()
    comment = "; ".join(words).encode("ascii", "backslashreplace")
    options: dict[str, Any] = {"duration": 400, "loop": 0, "comment": comment}
    few[0].save(file, "GIF", save_all=True, append_images=few[1:], **options)
    return file.getvalue()


def files() -> dict[Path, bytes]:
    """Every picture in both forms, by its file."""
    found = {}
    for theme, colors in THEMES.items():
        with matplotlib.rc_context({**STYLE, **colors}):
            for name, axes in drawn().items():
                ending, content = picture(axes.figure)
                found[PICTURES / f"{name}_{theme}{ending}"] = content
            pyplot.close("all")
            background = "white" if theme == "light" else "#0d1117"  # GIFs have no half-clear dots
            found[PICTURES / f"sinusoid_steps_{theme}.gif"] = animation(background)
    return found


def shown(content: bytes) -> str:
    """The description of a picture."""
    if content.startswith(b"\x89PNG"):
        return str(Image.open(io.BytesIO(content)).info.get("Description", ""))
    if content.startswith(b"GIF"):
        return str(Image.open(io.BytesIO(content)).info.get("comment", b"").decode())
    words = re.search(r"<dc:description>(.*?)</dc:description>", content.decode(), re.DOTALL)
    return "" if words is None else html.unescape(words[1])


def same(one: str, other: str) -> bool:
    """Whether two descriptions have the same texts, and numbers that differ by rounding alone."""
    if NUMBER.sub("0", one) != NUMBER.sub("0", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.01, abs_tol=1e-6) for a, b in pairs)


def is_stale(path: Path, content: bytes) -> bool:
    """Whether a file is missing or shows something else than it should."""
    return not path.exists() or not same(shown(path.read_bytes()), shown(content))
