"""Draws the charts of the README from the tables in benchmarks/results.

python benchmarks/charts.py [folder]

Each chart is an SVG for a white page and one for a dark page, in docs/charts. Equal results give
equal bytes; tests/python/test_readme.py compares the committed files with those of this script.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = ROOT / "docs" / "charts"

# GitHub's own colours for text, lines and bars, so that a chart belongs to the page around it.
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "peer": "#b3bcc6", "ours": "#0969da"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "peer": "#4c5561", "ours": "#4493f8"},
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11.0,
    "svg.fonttype": "none",  # text stays text: small files, the reader's own font
    "svg.hashsalt": "posembed",
}
UNITS = {"ms": 1.0, "µs": 1e-3}

# Rows of the rotary chart: a column of the results table, and its name for the reader.
CALLS = {
    "posembed": "posembed",
    "fastest copy": "copy of the same bytes",
    "transformers, compiled": "transformers, torch.compile",
    "complex numbers": "complex numbers",
    "transformers": "transformers, eager",
    "torchtune": "torchtune",
    "rotary-embedding-torch": "rotary-embedding-torch",
}
DTYPES = ("bfloat16", "float32")
ROTARY = "rotary forward [4,2048,32+8,128] {}"
TICKS, MARKED = (128, 4096, 131_072, 4_194_304), 131_072
SETTING = "2 threads, reusing"  # and its allocator: the setting that favours posembed least

Table = dict[str, dict[str, str]]


# ------------------------------------------------------------------------------------------ reading


def read_table(file: str, heading: str = "") -> Table:
    """The first table below a heading: the cells of each row by their columns, rows by cell 1."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    if heading:
        start = re.search(rf"^### {re.escape(heading)}$", text, re.MULTILINE)
        if start is None:
            raise ValueError(f"{file}: no heading {heading!r}")
        text = text[start.end() :]
    lines = text[text.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def calls(file: str, case: str) -> dict[str, str]:
    """What each call took in a case."""
    return {call: cells[SETTING] for call, cells in read_table(file, case).items()}


def milliseconds(row: dict[str, str], call: str) -> float:
    """The time of a call: cells of peers say how many times as fast posembed is."""
    number, unit = row["posembed"].split()
    ours = float(number) * UNITS[unit]
    return ours if call == "posembed" else ours * float(row[call])


def rotary_times(dtype: str) -> dict[str, float]:
    """Milliseconds by the name that the chart shows."""
    row = calls("rotary_calls_cpu.md", ROTARY.format(dtype))
    return {name: milliseconds(row, call) for call, name in CALLS.items()}


def float32_errors(base: str = "base 500,000") -> dict[int, float]:
    """The largest error of angles by the number of positions."""
    table = read_table("angle_error.md")
    return {int(count.replace(",", "")): float(row[base]) for count, row in table.items()}


def largest_error() -> float:
    """The largest error of posembed at any position and base; data are not float64."""
    text = (RESULTS / "exactness.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| float32")]
    return max(float(cell) for row in rows for cell in row.split("|")[5:-1])


def data() -> dict[str, str]:
    """The numbers of each chart in words, for its description."""
    times = {dtype: rotary_times(dtype) for dtype in DTYPES}
    errors = ", ".join(f"{count:,}: {error:.2e}" for count, error in float32_errors().items())
    return {
        "rotary": ". ".join(
            f"Milliseconds, {dtype}: "
            + ", ".join(f"{name} {time:.3f}" for name, time in row.items())
            for dtype, row in times.items()
        ),
        "angle_error": f"float32, by positions: {errors}. posembed: {largest_error():.2e}",
    }


# ------------------------------------------------------------------------------------------ drawing


def readable(number: float) -> str:
    """Two digits: 7.6e-8."""
    return f"{number:.1e}".replace("e-0", "e-")


def set_title(figure: Figure, title: str, colors: dict[str, str]) -> None:
    """The title of the whole chart, above the names on the left."""
    figure.suptitle(title, x=0.006, ha="left", fontsize=12, weight="bold", color=colors["text"])


def without_frame(axes: Axes, colors: dict[str, str]) -> None:
    """Removes lines and ticks that carry no number."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=colors["muted"])
    axes.patch.set_alpha(0.0)


def bars(axes: Axes, times: dict[str, float], title: str, colors: dict[str, str]) -> None:
    """One bar for each call, the first on top, with its time at its end."""
    without_frame(axes, colors)
    names, values = list(times), list(times.values())
    axes.barh(
        range(len(names)),
        values,
        height=0.66,
        color=[colors["ours" if name == "posembed" else "peer"] for name in names],
    )
    for place, (name, value) in enumerate(times.items()):
        ours = name == "posembed"
        axes.annotate(
            f"{value:.1f} ms",
            (value, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=colors["ours" if ours else "text"],
            weight="bold" if ours else "normal",
        )
    axes.set_xlim(0, 1.22 * max(values))
    axes.set_xticks([])
    axes.set_yticks(range(len(names)), names, color=colors["text"])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=11, color=colors["muted"])


def rotary(colors: dict[str, str]) -> Figure:
    """Times of one rotary embedding by its peers, in bfloat16 and in float32."""
    figure, places = pyplot.subplots(1, 2, figsize=(8.4, 3.2), sharey=True, layout="constrained")
    for axes, dtype in zip(places, DTYPES, strict=True):
        bars(axes, rotary_times(dtype), dtype, colors)
    set_title(
        figure, "RoPE on query and key, 4 x 2,048 tokens, 32 + 8 heads of 128, on two cores", colors
    )
    places[0].get_yticklabels()[0].set(color=colors["ours"], weight="bold")
    return figure


def angle_error(colors: dict[str, str]) -> Figure:
    """Errors of float32 angles by position, and the largest error of posembed."""
    figure, axes = pyplot.subplots(figsize=(8.4, 3.2), layout="constrained")
    without_frame(axes, colors)
    theirs, ours = float32_errors(), largest_error()
    first, last = min(theirs), max(theirs)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(axis="y", color=colors["muted"], alpha=0.25, linewidth=0.6)
    axes.plot(list(theirs), list(theirs.values()), color=colors["muted"], linewidth=2.2)
    axes.plot([first, last], [ours, ours], color=colors["ours"], linewidth=2.6)
    rounding = 2.0**-9  # half a unit in the last place of bfloat16 numbers near 1
    axes.axhline(rounding, color=colors["muted"], linewidth=1.0, linestyle=(0, (4, 4)))
    axes.plot([MARKED], [theirs[MARKED]], "o", color=colors["text"], markersize=6)

    note: dict[str, Any] = {"textcoords": "offset points", "color": colors["text"]}
    marked = f"angles in float32: {readable(theirs[MARKED])} at {MARKED:,} positions"
    axes.annotate(marked, (MARKED, theirs[MARKED]), (-8, 10), ha="right", **note)
    axes.annotate("rounding to bfloat16", (first, rounding), (2, 6), **note)
    note.update(color=colors["ours"], weight="bold")
    axes.annotate(f"posembed: at most {readable(ours)}", (first, ours), (2, 8), **note)

    axes.set_xticks(TICKS, [f"{count:,}" for count in TICKS])
    axes.set_yticks([1e-7, 1e-5, 1e-3, 1e-1], ["1e-7", "1e-5", "1e-3", "1e-1"])
    axes.minorticks_off()
    axes.set_xlim(first, last)
    axes.set_ylim(3e-8, 2.0)
    axes.set_xlabel("positions", color=colors["muted"])
    set_title(figure, "Largest error of RoPE's angles in radians, base 500,000", colors)
    return figure


DRAWINGS: dict[str, Callable[[dict[str, str]], Figure]] = {
    "rotary": rotary,
    "angle_error": angle_error,
}


def charts() -> dict[str, str]:
    """Every chart as SVG text, by the name of its file."""
    found, words = {}, data()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        for name, draw in DRAWINGS.items():
            for theme, colors in THEMES.items():
                figure, file = draw(colors), io.StringIO()
                facts = {"Date": None, "Creator": None, "Description": words[name]}
                figure.savefig(file, format="svg", transparent=True, metadata=facts)
                pyplot.close(figure)
                lines = file.getvalue().splitlines()
                found[f"{name}_{theme}.svg"] = "\n".join(line.rstrip() for line in lines) + "\n"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=CHARTS)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in charts().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
