"""Every plot and every picture of the pages can be read: nothing is cut, overlaps or is hidden."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import posembed as pe
import pytest
from support.documentation import ROOT, program

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from matplotlib.transforms import Bbox  # noqa: E402

WIDTHS = (400, 748)  # dots: a phone, and the column of text on a page
LETTERS = 7.0  # dots that letters of a page's picture have at least on a phone

SCALINGS = {
    "unscaled": None,
    "linear": pe.LinearScaling(16.0),
    "NTK": pe.NtkScaling(16.0),
    "YaRN": pe.YarnScaling(16.0, 8192),
    "Llama 3": pe.Llama3Scaling(16.0, 1.0, 4.0, 8192),
}
SPECS = {name: pe.RotarySpec(128, base=5e5, scaling=scaling) for name, scaling in SCALINGS.items()}
MAE = pe.SinusoidalPositionalEmbedding(64, preset="mae")
DETR = pe.SinusoidalSpec(64, preset="detr")
LOSSES = {"none": [2.3, 2.4, 2.5], "learned": [2.1, None, None], "rotary": [1.9, 1.9, 2.3]}
LOSSES |= {"sinusoidal": [2.1, 2.7, 3.1], "ALiBi": [2.0, 2.0, 2.0]}

Draw = Callable[[Any], Any]
PLOTS: dict[str, Draw] = {
    "rotated_pair": lambda axes: pe.plot.rotated_pair(pe.RotarySpec(64), 4, axes=axes),
    "rotated_pair, a slow one": lambda axes: pe.plot.rotated_pair(pe.RotarySpec(64), 31, axes=axes),
    "rotated_pair, often": lambda axes: pe.plot.rotated_pair(pe.RotarySpec(64), 0, 40, axes=axes),
    "wavelengths": lambda axes: pe.plot.wavelengths(SPECS, axes=axes),
    "wavelengths, of one": lambda axes: pe.plot.wavelengths(pe.RotarySpec(128), axes=axes),
    "scores_by_distance": lambda axes: pe.plot.scores_by_distance(SPECS, axes=axes),
    "scores_by_distance, far": lambda axes: pe.plot.scores_by_distance(SPECS, 65_535, log=True, axes=axes),
    "scores_by_distance, near": lambda axes: pe.plot.scores_by_distance(SPECS, log=True, axes=axes),
    "component_scores": lambda axes: pe.plot.component_scores(pe.RotarySpec(256), axes=axes),
    "angle_error": lambda axes: pe.plot.angle_error(pe.RotarySpec(128), axes=axes),
    "heat_map": lambda axes: pe.plot.heat_map(pe.SinusoidalSpec(512), axes=axes),
    "heat_map, 1,000 positions": lambda axes: pe.plot.heat_map(
        pe.SinusoidalSpec(100, base=1e6, preset="marian"), 1000, axes=axes
    ),
    "binary_codes": lambda axes: pe.plot.binary_codes(100, axes=axes),
    "shift_matrix": lambda axes: pe.plot.shift_matrix(pe.SinusoidalSpec(32), 7, axes=axes),
    "similarity": lambda axes: pe.plot.similarity(pe.SinusoidalPositionalEmbedding(64), 128, axes=axes),
    "grid": lambda axes: pe.plot.grid(pe.functional.sinusoidal_grid_positions((4, 6), spec=DETR), axes=axes),
    "similarity_map": lambda axes: pe.plot.similarity_map(MAE, (14, 14), (3, 5), axes=axes),
    "similarity_map of all": lambda axes: pe.plot.similarity_map(MAE, (14, 14), axes=axes),
    "alibi_bias": lambda axes: pe.plot.alibi_bias(pe.ALiBi(8), 64, axes=axes),
    "extrapolation": lambda axes: pe.plot.extrapolation(LOSSES, (64, 128, 256), axes=axes),
    "losses": lambda axes: pe.plot.losses(
        {name: (range(50), [5 / (i + k) for i in range(50)]) for k, name in ((1, "a"), (2, "b"))}, axes=axes
    ),
}


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    pyplot.close("all")


class Picture:
    """A figure as it is drawn: boxes of texts and legends, paths of curves, in dots."""

    def __init__(self, figure: Any) -> None:
        self.figure, self.texts = figure, []
        figure.canvas.draw()  # places everything; the second time, what is drawn is listed
        draw = Text.draw

        def listed(text: Text, renderer: Any) -> None:
            if text.get_visible() and text.get_text().strip():
                self.texts.append((text, text.get_window_extent(renderer)))
            draw(text, renderer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Text, "draw", listed)
            figure.canvas.draw()

    def cut(self) -> list[str]:
        """Texts that leave the figure."""
        width, height = self.figure.bbox.width, self.figure.bbox.height
        inside = Bbox([[-0.5, -0.5], [width + 0.5, height + 0.5]])
        return [
            f"cut: {text.get_text()!r}"
            for text, box in self.texts
            if not (inside.contains(*box.min) and inside.contains(*box.max))
        ]

    def overlaps(self) -> list[str]:
        """Texts over others."""
        return [
            f"overlap: {one.get_text()!r}, {other.get_text()!r}"
            for (one, box), (other, of_other) in itertools.combinations(self.texts, 2)
            if one is not other and meet(box, of_other)
        ]

    def curves(self) -> list[Any]:
        """Lines with a name, in the order in which they are drawn."""
        lines = [line for axes in self.figure.axes for line in axes.lines]
        named = [line for line in lines if not line.get_label().startswith("_")]
        return sorted(named, key=lambda line: line.get_zorder())

    def covered(self) -> list[str]:
        """Curves and bars behind a legend or a text of the same axes."""
        found = []
        for axes in self.figure.axes:
            boxes = [(text.get_text(), box) for text, box in self.texts if text in axes.texts]
            if (legend := axes.get_legend()) is not None:
                boxes.append(("the legend", legend.get_window_extent()))
            curves = [line for line in self.curves() if line.axes is axes]
            for name, box in boxes:
                found += [
                    f"{name} covers {line.get_label()!r}"
                    for line in curves
                    if line.get_path().transformed(line.get_transform()).intersects_bbox(box, False)
                ]
                bars = [bar for group in axes.containers for bar in group]
                if name == "the legend" and any(meet(box, b.get_window_extent()) for b in bars):
                    found.append("the legend covers a bar")
        return found

    def crossed(self) -> list[str]:
        """Texts over the edge of a box."""
        found = []
        for text, box in self.texts:
            drawn = [] if text.axes is None else text.axes.patches
            edges = [part.get_window_extent() for part in drawn if isinstance(part, Rectangle)]
            if any(meet(box, e) and not (e.contains(*box.min) and e.contains(*box.max)) for e in edges):
                found.append(f"over an edge: {text.get_text()!r}")
        return found

    def hidden(self) -> list[str]:
        """Curves that lie behind others for nearly all their length, without gaps in those."""
        found = []
        for one, over in itertools.combinations(self.curves(), 2):
            if one.axes is not over.axes or over.get_linestyle() != "-":
                continue
            (x, y), (of_x, of_y) = (line.get_transform().transform(line.get_xydata()).T for line in (one, over))
            at = np.linspace(x.min(), x.max(), 1000)
            near = np.abs(np.interp(at, x, y) - np.interp(at, of_x, of_y)) < 1.0
            if near.mean() > 0.9:
                found.append(f"{over.get_label()!r} hides {one.get_label()!r}")
        return found

    def faults(self) -> list[str]:
        return [*self.cut(), *self.overlaps(), *self.covered(), *self.crossed(), *self.hidden()]

    def small(self) -> list[str]:
        """Texts with small letters, where the picture is as wide as a phone."""
        dots = 400 / self.figure.get_figwidth() / 72  # of a point
        return sorted(
            {
                f"{text.get_fontsize() * dots:.1f} dots: {text.get_text()!r}"
                for text, _ in self.texts
                if text.get_fontsize() * dots < LETTERS
            }
        )


def meet(one: Bbox, other: Bbox) -> bool:
    """Whether boxes overlap by more than a dot."""
    common = Bbox.intersection(one, other)
    return common is not None and min(common.width, common.height) > 1.0


def axes_of(width: int, height: float | None = None) -> Any:
    """Axes of a figure that is so many dots wide."""
    size = (width / 100, (max(300.0, 4 / 7 * width) if height is None else height) / 100)
    return pyplot.subplots(figsize=size, dpi=100, layout="constrained")[1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", PLOTS)
def test_plots_can_be_read(kind: str, width: int) -> None:
    square = kind.startswith(("rotated_pair", "similarity", "shift", "grid"))
    axes = PLOTS[kind](axes_of(width, 0.8 * width if square else None))
    faults = Picture(axes.figure).faults()
    assert not faults, "\n".join(faults)


def test_every_kind_of_plot_is_looked_at() -> None:
    assert {kind.split(",")[0].split(" ")[0] for kind in PLOTS} == set(pe.plot.__all__)


def test_pictures_of_pages_can_be_read() -> None:
    """They are drawn once and scaled, so that letters get smaller on a phone."""
    drawn = {name: axes.figure for name, axes in program("pictures").drawn().items()}
    charts = program("charts", ROOT / "benchmarks")
    with matplotlib.rc_context(charts.STYLE):
        drawn |= {name: draw(charts.THEMES["light"]) for name, draw in charts.DRAWINGS.items()}
    found = {name: Picture(figure) for name, figure in drawn.items()}
    assert len(found) > 15
    faults = {name: [*picture.faults(), *picture.small()] for name, picture in found.items()}
    assert {name: list_ for name, list_ in faults.items() if list_} == {}
