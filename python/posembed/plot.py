"""Plots of the numbers in :mod:`posembed.analysis`, drawn with matplotlib.

Every function draws into ``axes``, or into a new figure, and returns the axes:
``pe.plot.heat_map(spec).figure.savefig("heat_map.png")``.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posembed import analysis, functional
from posembed.analysis import Cells, Encoder, Rotation, Sinusoid, rotation, sinusoid
from posembed.glue.gate import check_tensors, wrong_type
from posembed.glue.validation import shown, whole
from posembed.modules.alibi import ALiBi
from posembed.specifications import Numerics, RotarySpec

try:
    from matplotlib import pyplot
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Circle
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        "posembed.plot draws with matplotlib: python -m pip install matplotlib"
    ) from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Colormap

WIDTH, HEIGHT = 7.0, 4.0  # inches: about the width of a page's text
DPI = 200  # two dots per component, for 512 components
DIVERGING, SEQUENTIAL = "RdBu_r", "viridis"
FIRST_TO_LAST = ("tab:blue", "tab:orange")  # both are seen on light and dark pages
CURVES_SHOWN = 6
SMALL = 9.0  # points: letters of legends and of texts in a plot
LETTERS_PER_INCH = 13  # of a small text
# Where curves meet, gaps show those below.
STYLES: Any = ("-", (0, (6, 3)), (0, (3, 3)), (0, (1, 3)), (0, (6, 3, 1, 3)))

Specs = Rotation | Sequence[Rotation] | Mapping[str, Rotation]

__all__ = [
    "alibi_bias",
    "angle_error",
    "binary_codes",
    "component_scores",
    "extrapolation",
    "grid",
    "heat_map",
    "losses",
    "rotated_pair",
    "scores_by_distance",
    "shift_matrix",
    "similarity",
    "similarity_map",
    "wavelengths",
]


def __dir__() -> list[str]:
    """The functions that draw."""
    return __all__


# ------------------------------------------------------------------------------------ common to all


def new_axes(axes: Axes | None, height: float = HEIGHT) -> Axes:
    """The axes given, or those of a new figure."""
    if axes is not None:
        return axes
    return pyplot.subplots(figsize=(WIDTH, height), dpi=DPI, layout="constrained")[1]


def side_by_side(widths: Sequence[int], height: float = HEIGHT) -> list[Axes]:
    """Axes for several plots in a new figure, with the given relative widths."""
    figure = pyplot.figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(1, len(widths), width_ratios=list(widths))
    return [figure.add_subplot(grid[0, column]) for column in range(len(widths))]


def inches(axes: Axes) -> float:
    """About the width of the axes."""
    return float(axes.bbox.width / axes.figure.dpi)


def label(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Sets title, in lines as wide as the axes, and labels."""
    axes.set_title(textwrap.fill(title, max(20, int(11 * inches(axes)))))
    axes.set_xlabel(x)
    height = float(axes.bbox.height / axes.figure.dpi)
    axes.set_ylabel(textwrap.fill(y, max(9, int(11 * height))))
    return axes


def matrix(
    axes: Axes,
    values: Tensor,
    *,
    colors: str | Colormap,
    limit: tuple[float, float] | None,
    bar: str,
) -> Colorbar:
    """Draws a matrix as a heat map, row 0 on top; returns the colour bar."""
    low, high = limit or (None, None)
    image = axes.imshow(
        values.numpy(), aspect="auto", interpolation="nearest", cmap=colors, vmin=low, vmax=high
    )
    return axes.figure.colorbar(image, ax=axes, label=bar)


def named(specs: Specs) -> dict[str, RotarySpec]:
    """Specifications by their names in the legend.

    Descriptions omit long lists of numbers, so several may be equal; those are numbered.
    """
    if isinstance(specs, Mapping):
        return {name: rotation(spec, "specs") for name, spec in specs.items()}
    given = specs if isinstance(specs, Sequence) else [specs]
    several = [rotation(spec, "specs") for spec in given]
    result: dict[str, RotarySpec] = {}
    seen: Counter[str] = Counter()
    for spec in several:
        name = f"head_dim {spec.describe()}"
        seen[name] += 1
        result[name if seen[name] == 1 else f"{name} ({seen[name]})"] = spec
    return result


def check_mapping(name: str, value: Any) -> None:
    """Raises TypeError for what is no mapping."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, "a dict", type(value).__name__)


def legend(axes: Axes, title: str = "") -> None:
    """Draws a legend below the axes, where it covers nothing, in as many columns as fit."""
    lines, names = axes.get_legend_handles_labels()
    room = int(LETTERS_PER_INCH * inches(axes))
    texts = [textwrap.fill(name, room) for name in names]
    columns = room // (6 + max(len(name) for name in names))  # 6: the line and the gap
    place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 5.0}
    letters: Any = {"fontsize": SMALL, "title": title, "title_fontsize": SMALL}
    # borderaxespad, in letter heights, leaves room for the axis
    axes.legend(lines, texts, ncols=min(len(names), max(1, columns)), **place, **letters)


def spread(count: int, shown: int = CURVES_SHOWN) -> list[int]:
    """Evenly spread indices, including the first and the last."""
    shown = min(count, shown)
    return sorted({round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)})


# ------------------------------------------------------------------------------------------- rotary


def rotated_pair(
    spec: Rotation, pair: int = 0, positions: int = 8, *, axes: Axes | None = None
) -> Axes:
    """Plots what a rotation does to a pair of components: one arrow for each position.

    The pair is (1, 0) before it is rotated. Position 0 leaves it as it is.

    Args:
        spec: The rotation, over one axis of positions.
        pair: The pair, from 0; pairs with higher numbers turn more slowly.
        positions: How many positions are shown.
        axes: Where to draw.

    Raises:
        IndexError: The rotation has no such pair.

    Examples:
        >>> import posembed as pe
        >>> pe.plot.rotated_pair(pe.RotarySpec(64), 1, 5).get_title()
        'Pair 1: 0.75 radians per position'
    """
    spec = rotation(spec)
    speeds = spec.frequencies()
    if not 0 <= pair < speeds.numel():
        raise IndexError(f"pair: expected 0 to {speeds.numel() - 1}, got {pair}")
    first = spec.rotary_start + (2 * pair if spec.interleaved else pair)
    second = first + (1 if spec.interleaved else speeds.numel())
    vector = torch.zeros(spec.head_dim, dtype=torch.float64)
    vector[first] = 1.0
    at = torch.arange(whole("positions", positions, 0))
    points = analysis.rotate_one(vector, at, spec)[:, [first, second]].tolist()
    axes = new_axes(axes, height=WIDTH)
    colors = LinearSegmentedColormap.from_list("positions", FIRST_TO_LAST)
    spots: list[tuple[float, float, list[int]]] = []  # arrows that are near have one number
    for position, (x, y) in enumerate(points):
        color = colors(position / max(1, positions - 1))
        style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x, y), (0.0, 0.0), arrowprops=style)
        near = [spot for spot in spots if math.hypot(spot[0] - x, spot[1] - y) < 0.2]
        if not near:
            spots.append((x, y, [position]))
        elif near[-1][2][-1] == position - 1:
            near[-1][2].append(position)
    for x, y, at_spot in spots:
        numbers = str(at_spot[0]) + (f"…{at_spot[-1]}" if len(at_spot) > 1 else "")
        color = colors(at_spot[0] / max(1, positions - 1))
        axes.text(1.14 * x, 1.14 * y, numbers, color=color, ha="center", va="center")
    axes.add_patch(Circle((0.0, 0.0), 1.0, fill=False, color="grey", linewidth=0.5))
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    axes.set_aspect("equal")
    number = f"{float(speeds[pair]):.2g}"
    speed = f"{number} radian{'' if number == '1' else 's'} per position"
    return label(axes, f"Pair {pair}: {speed}", f"component {first}", f"component {second}")


def wavelengths(specs: Specs, *, axes: Axes | None = None) -> Axes:
    """Plots each pair's wavelength (positions per turn), for one or more specifications.

    Examples:
        >>> import posembed as pe
        >>> pe.plot.wavelengths({"base 1e4": pe.RotarySpec(128)}).get_ylabel()
        'wavelength (positions)'
    """
    axes = new_axes(axes)
    for i, (name, spec) in enumerate(named(specs).items()):
        values = analysis.wavelengths(spec).wavelengths.numpy()
        axes.plot(values, marker=".", linestyle=STYLES[i % len(STYLES)], label=name)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    legend(axes)
    return label(axes, "Wavelength of each pair", "pair", "wavelength (positions)")


def scores_by_distance(
    specs: Specs, distances: int = 512, *, log: bool = False, axes: Axes | None = None
) -> Axes:
    """Plots scores of a query and a key of ones by distance, for one or more specifications.

    Args:
        specs: One specification, several, or a dict of them by legend name.
        distances: The largest distance.
        log: Use a logarithmic distance axis, starting at 1.
        axes: Where to draw.

    Examples:
        >>> import posembed as pe
        >>> specs = {"base 1e4": pe.RotarySpec(256), "base 5e5": pe.RotarySpec(256, base=5e5)}
        >>> pe.plot.scores_by_distance(specs).get_title()
        'Score of a query and a key of ones'
    """
    axes = new_axes(axes)
    first = 1 if log else 0
    for i, (name, spec) in enumerate(named(specs).items()):
        scores = analysis.scores_by_distance(spec, distances)[first:].numpy()
        style: dict[str, Any] = {"linewidth": 1.0, "linestyle": STYLES[i % len(STYLES)]}
        axes.plot(range(first, distances + 1), scores, label=name, **style)
    if log:
        axes.set_xscale("log")
    axes.axhline(0.0, color="grey", linewidth=0.5)
    legend(axes)
    return label(
        axes, "Score of a query and a key of ones", "distance (positions)", "q · k / √head_dim"
    )


def component_scores(
    spec: Rotation,
    distances: int = 512,
    *,
    components: Sequence[int] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Plots each component's part of the score as a curve: fast pairs on top, slow ones below.

    Args:
        spec: The rotation.
        distances: The largest distance.
        components: Components to show; default: some, evenly spread over the pairs.
        axes: Where to draw.

    Raises:
        IndexError: The head has no such component.
    """
    spec = rotation(spec)
    axes = new_axes(axes)
    scores = analysis.component_scores(spec, distances)
    if components is None:
        pairs = spec.frequencies().numel()
        stride = 2 if spec.interleaved else 1
        components = [spec.rotary_start + stride * pair for pair in spread(pairs)]
    for component in components:
        if not 0 <= component < spec.head_dim:
            raise IndexError(f"components: expected 0 to {spec.head_dim - 1}, got {component}")
    limit = float(scores[:, list(components)].abs().max())
    for row, component in enumerate(components):
        curve = row - 0.45 * scores[:, component] / limit  # the axis points down
        axes.plot(curve.numpy(), linewidth=1.0, label=f"component {component}")
    axes.hlines(range(len(components)), 0, distances, color="grey", linewidth=0.5)  # zeros
    axes.set_yticks(range(len(components)), [str(component) for component in components])
    axes.set_ylim(len(components) - 0.4, -0.6)
    title = f"Parts of the score, each up to ±{limit:.3g}"
    return label(axes, title, "distance (positions)", "component")


def angle_error(
    spec: Rotation, positions: Tensor | None = None, *, axes: Axes | None = None
) -> Axes:
    """Plots the largest angle error by position, for float32 products and for posembed.

    Args:
        spec: The rotation.
        positions: int [n], none of them 0; default: where float32 angles are worst below 2, 4, …
            2 ** 20 positions.
        axes: Where to draw.
    """
    spec = rotation(spec)
    axes = new_axes(axes)
    at = analysis.worst_positions(spec) if positions is None else positions
    check_tensors(positions=at)
    names: dict[Numerics, str] = {"float32": "float32 product", "exact": "posembed, float32 data"}
    for numerics, name in names.items():
        worst = analysis.angle_error(spec, at, numerics=numerics).amax(1)
        axes.plot(at.numpy(), worst.numpy(), ".-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    legend(axes)
    return label(axes, "Error of angles", "position", "largest error (radians)")


# ------------------------------------------------------------------------------- additive positions


def heat_map(spec: Sinusoid, positions: int = 100, *, axes: Axes | None = None) -> Axes:
    """Plots sinusoidal encodings as a heat map: a row for each position.

    Sines and cosines stand apart: alternating columns would blend on a screen into colours that
    stand for no value.

    Examples:
        >>> import posembed as pe
        >>> pe.plot.heat_map(pe.SinusoidalSpec(512)).get_title()
        'Sinusoidal encodings, vaswani, base 10000'
    """
    spec = sinusoid(spec)
    axes = new_axes(axes)
    values = analysis.heat_map(spec, positions)
    halves = ("sines", "cosines")
    x = "component: {}, then {}".format(*reversed(halves) if spec.cos_first else halves)
    if spec.preset == "vaswani":
        order = spec.permutation_to(dataclasses.replace(spec, preset="marian"))
        values = values[:, order]
        x = "component: sines (even), then cosines (odd)"
        shown = spread(len(order), int(2 * inches(axes)))
        axes.set_xticks(shown, [str(int(order[column])) for column in shown])
        axes.axvline((len(order) + 1) // 2 - 0.5, color="black", linewidth=0.5)
    matrix(axes, values, colors=DIVERGING, limit=(-spec.scale, spec.scale), bar="value")
    title = f"Sinusoidal encodings, {spec.preset}, base {spec.base:.10g}"
    return label(axes, title, x, "position")


def binary_codes(
    positions: int = 100, width: int | None = None, *, axes: Axes | None = None
) -> Axes:
    """Plots positions in binary as a heat map; sinusoids are a smooth form of them."""
    axes = new_axes(axes)
    values = analysis.binary_codes(positions, width)
    two = pyplot.get_cmap("Greys", 2)
    bar = matrix(axes, values, colors=two, limit=(0.0, 1.0), bar="bit")
    bar.set_ticks([0.25, 0.75], labels=["0", "1"])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    return label(axes, "Binary codes", "bit, fastest first", "position")


def shift_matrix(spec: Sinusoid, distance: float, *, axes: Axes | None = None) -> Axes:
    """Plots the matrix that shifts an encoding by a distance: one rotation for each pair."""
    spec = sinusoid(spec)
    axes = new_axes(axes, height=5.5)
    values = functional.sinusoidal_shift_matrix(distance, spec=spec)
    matrix(axes, values, colors=DIVERGING, limit=(-1.0, 1.0), bar="value")
    axes.set_aspect("equal")
    title = f"Shift matrix, M encode(p) = encode(p + {distance:g})"
    return label(axes, title, "component of encode(p)", f"component of encode(p + {distance:g})")


def similarity(
    embedding: Tensor | Encoder, positions: int | None = None, *, axes: Axes | None = None
) -> Axes:
    """Plots the similarity of position vectors; see :func:`posembed.analysis.similarity`."""
    axes = new_axes(axes, height=5.5)
    values = analysis.similarity(embedding, positions)
    matrix(axes, values, colors=SEQUENTIAL, limit=None, bar="cosine similarity")
    axes.set_aspect("equal")
    return label(axes, "Similarity of positions", "position", "position")


def grid(positions: Tensor, *, axes: Axes | None = None) -> Axes:
    """Plots where the cells of a grid are, numbered in the order of the tokens.

    Args:
        positions: [axes, tokens] or [axes, 1, tokens]; the last two axes are rows and columns.
        axes: Where to draw.

    Raises:
        ValueError: There are not two axes or more, or there are several frames.

    Examples:
        >>> import posembed as pe
        >>> spec = pe.SinusoidalSpec(64, preset="detr")
        >>> cells = pe.functional.sinusoidal_grid_positions((3, 4), spec=spec)
        >>> pe.plot.grid(cells).get_title()
        'Positions of 12 tokens'
    """
    check_tensors(positions=positions)
    if positions.dim() == 3 and positions.shape[1] == 1:
        positions = positions[:, 0]
    if positions.dim() != 2 or len(positions) < 2:
        shape = list(positions.shape)
        raise ValueError(f"positions: expected [axes, tokens] with two axes or more, got {shape}")
    frames = positions[:-2].detach()
    if frames.numel() > 0 and bool((frames != frames[:, :1]).any()):
        count = len({*map(tuple, frames.T.tolist())})
        raise ValueError(
            f"positions: expected the cells of one frame, got {count} frames, which would be drawn "
            "over each other; positions[:, positions[0] == frame]"
        )
    axes = new_axes(axes, height=5.5)
    rows, columns = positions[-2:].detach().double().cpu().tolist()
    axes.plot(columns, rows, color="grey", linewidth=0.5, zorder=1)
    axes.scatter(columns, rows, s=160, color="white", edgecolors="tab:blue", zorder=2)
    for number, (row, column) in enumerate(zip(rows, columns, strict=True)):
        style: Any = {"ha": "center", "va": "center", "fontsize": SMALL, "color": "black"}
        axes.text(column, row, str(number), **style)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    title = f"Positions of {len(rows)} tokens"
    return label(axes, title, "position of the column", "position of the row")


def similarity_map(
    embedding: Cells,
    grid: Sequence[int] | None = None,
    cell: Sequence[int] | None = None,
    *,
    axes: Axes | None = None,
) -> Axes:
    """Plots how alike the cells of a picture are: one with all others, or each in a small map.

    Arguments and errors are those of :func:`posembed.analysis.similarity_map`.

    Examples:
        >>> import posembed as pe
        >>> position = pe.SinusoidalPositionalEmbedding(64, preset="mae")
        >>> pe.plot.similarity_map(position, (14, 14), (3, 5)).get_title()
        'Similarity to the cell in row 3, column 5'
    """
    values = analysis.similarity_map(embedding, grid, cell)
    axes = new_axes(axes, height=5.5)
    if cell is not None:
        matrix(axes, values.cpu(), colors=SEQUENTIAL, limit=None, bar="cosine similarity")
        row, column = cell
        axes.plot(column, row, "o", color="red", markersize=4)
        title = f"Similarity to the cell in row {row}, column {column}"
    else:
        rows, columns = values.shape[:2]
        maps = values.permute(0, 2, 1, 3).reshape(rows * rows, columns * columns)
        matrix(axes, maps.cpu(), colors=SEQUENTIAL, limit=None, bar="cosine similarity")
        shown = int(3 * inches(axes))
        for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
            numbers = spread(count, shown)
            axis.set_ticks([count * (i + 0.5) - 0.5 for i in numbers], [str(i) for i in numbers])
            axis.set_ticks([count * i - 0.5 for i in range(count)], minor=True)
        axes.tick_params(which="minor", length=0)
        axes.grid(which="minor", color="white", linewidth=1.0)
        title = "Similarity of each cell to all others"
    axes.set_aspect("equal")
    return label(axes, title, "column", "row")


# -------------------------------------------------------------------------------------------- ALiBi


def alibi_bias(
    alibi: ALiBi,
    query_length: int,
    key_length: int | None = None,
    *,
    head: int = 0,
    axes: Axes | None = None,
) -> Axes:
    """Plots one head's bias as a heat map, a row for each query; masked keys stay white.

    Raises:
        TypeError: ``alibi`` is not an ALiBi module.
        IndexError: ``alibi`` has no such head.
    """
    if not isinstance(alibi, ALiBi):
        raise wrong_type("alibi", "an ALiBi", type(alibi).__name__)
    if not 0 <= head < alibi.num_heads:
        raise IndexError(f"head: expected 0 to {alibi.num_heads - 1}, got {head}")
    axes = new_axes(axes, height=5.0)
    bias = alibi(query_length, key_length, dtype=torch.float64)[head].detach().cpu()
    hidden = bias.isinf()
    matrix(
        axes, bias.masked_fill(hidden, math.nan), colors=SEQUENTIAL, limit=None, bar="bias of score"
    )
    slope = alibi.slopes.detach().reshape(-1, alibi.num_heads)[0, head].item()
    return label(axes, f"ALiBi, head {head}, slope {slope:.4g}", "key", "query")


# ---------------------------------------------------------------------------------------- training


def extrapolation(
    losses: Mapping[str, Sequence[float | None]],
    lengths: Sequence[int],
    *,
    axes: Axes | None = None,
) -> Axes:
    """Plots each position method's loss on texts longer than in training, as bars.

    Args:
        losses: A loss per length for each method; None if the method does not support the length.
        lengths: Lengths of the texts in tokens, the trained length first.
        axes: Where to draw.

    Raises:
        TypeError: ``losses`` is no mapping.
        ValueError: A method does not have one loss per length.

    Examples:
        >>> import posembed as pe
        >>> losses = {"learned": [1.75, None], "alibi": [1.69, 1.68]}
        >>> len(pe.plot.extrapolation(losses, [64, 128]).containers)
        2
    """
    check_mapping("losses", losses)
    axes = new_axes(axes)
    width = 0.8 / len(lengths)
    room = width * inches(axes) / len(losses)
    for method, row in losses.items():
        if len(row) != len(lengths):
            raise ValueError(f"losses: expected {len(lengths)} for {method!r}, got {len(row)}")
    for i, length in enumerate(lengths):
        values = [row[i] for row in losses.values()]
        places = [place + (i - (len(lengths) - 1) / 2) * width for place in range(len(values))]
        name = f"{length} tokens" + (", as trained" if i == 0 else "")
        bars = axes.bar(places, [value or 0.0 for value in values], width, label=name)
        texts = ["n/a" if value is None else f"{value:.2f}" for value in values]
        axes.bar_label(bars, texts, padding=2, fontsize=SMALL, rotation=0 if room > 0.285 else 90)
    axes.set_xticks(range(len(losses)), list(losses))
    axes.margins(y=0.15 if room > 0.285 else 0.6)  # room for the numbers
    legend(axes, "read in windows of")
    return label(axes, "Train short, read long", "position method", "loss (nats per token)")


def losses(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, axes: Axes | None = None
) -> Axes:
    """Plots training losses as curves.

    Args:
        curves: Steps and losses by name.
        axes: Where to draw.

    Raises:
        TypeError: ``curves`` is no mapping.
        ValueError: A curve is not steps and as many losses.
    """
    check_mapping("curves", curves)
    for name, curve in curves.items():
        has_rows = isinstance(curve, Sequence) or getattr(curve, "ndim", 0) == 2
        is_pair = has_rows and len(curve) == 2
        if not is_pair or not all(hasattr(part, "__len__") for part in curve):
            raise ValueError(
                f"curves: expected steps and losses for {name!r}, as (range(len(losses)), losses), "
                f"got {shown(curve)}"
            )
        if len(curve[0]) != len(curve[1]):
            sizes = f"{len(curve[0])} steps and {len(curve[1])} losses"
            raise ValueError(f"curves: expected as many steps as losses for {name!r}, got {sizes}")
    axes = new_axes(axes)
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, linewidth=1.0, label=name)
    axes.grid(alpha=0.3)
    legend(axes)
    return label(axes, "Training", "step", "loss (nats per token)")
