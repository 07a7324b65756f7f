"""Tests the parts of pictures: titles, labels with units, and the drawn numbers."""

import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import posembed as pe
import pytest
import torch
from support.refusals import refused

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def words(axes: Axes) -> tuple[str, str, str]:
    """Title and the labels of both axes."""
    return axes.get_title(), axes.get_xlabel(), axes.get_ylabel()


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def colors(axes: Axes) -> np.ndarray:
    """The numbers that an image shows; hidden ones are NaN."""
    return np.ma.filled(axes.get_images()[0].get_array().astype(float), math.nan)


def bar_label(axes: Axes) -> str:
    return axes.get_images()[0].colorbar.ax.get_ylabel()


SPECS = {"short": pe.RotarySpec(64), "long": pe.RotarySpec(64, base=500000.0)}


def test_grid() -> None:
    spec = pe.SinusoidalSpec(8, preset="detr")
    cells = pe.functional.sinusoidal_grid_positions((2, 3), spec=spec)
    for positions in (cells, cells[:, 0], torch.cat([torch.zeros(1, 1, 6), cells])):
        axes = pe.plot.grid(positions)
        assert words(axes)[0] == "Positions of 6 tokens"
        assert [text.get_text() for text in axes.texts] == list("012345")
        points = axes.collections[0].get_offsets()
        assert np.array_equal(points, cells[:, 0].flip(0).T.numpy())
    refused((lambda: pe.plot.grid(torch.zeros(1, 6)), ValueError, "positions: expected .axes, tokens. with two axes"))  # fmt: skip


def test_similarity_map() -> None:
    position = pe.LearnedPositionalEmbedding(grid=(3, 4), prefix_tokens=1, embedding_dim=8)
    one = pe.plot.similarity_map(position, cell=(1, 2))
    assert words(one) == ("Similarity to the cell in row 1, column 2", "column", "row")
    assert np.array_equal(colors(one), pe.analysis.similarity_map(position, cell=(1, 2)).numpy())
    (marker,) = one.get_lines()
    assert (*marker.get_xdata(), *marker.get_ydata()) == (2, 1)
    each = colors(pe.plot.similarity_map(position))
    assert each.shape == (9, 16)
    assert np.allclose(each[3:6, 8:12], colors(one), rtol=0.0, atol=1e-15)


def test_wavelengths() -> None:
    axes = pe.plot.wavelengths(SPECS)
    assert words(axes) == ("Wavelength of each pair", "pair", "wavelength (positions)")
    assert axes.get_yscale() == "log"
    assert legend(axes) == ["short", "long"]
    for line, spec in zip(axes.get_lines(), SPECS.values(), strict=True):
        assert np.array_equal(line.get_ydata(), spec.wavelengths().numpy())


@pytest.mark.parametrize("log", [False, True])
def test_scores_side_by_side(log: bool) -> None:
    axes = pe.plot.scores_by_distance(SPECS, 300, log=log)
    title, x, y = words(axes)
    assert (title, x) == ("Score of a query and a key of ones", "distance (positions)")
    assert y == "q · k / √head_dim"
    assert axes.get_xscale() == ("log" if log else "linear")
    assert legend(axes) == ["short", "long"]
    first = int(log)
    for line, spec in zip(axes.get_lines(), SPECS.values(), strict=False):
        assert list(line.get_xdata()) == list(range(first, 301))
        expected = pe.analysis.scores_by_distance(spec, 300)[first:]
        assert np.array_equal(line.get_ydata(), expected.numpy())


def test_one_specification_or_a_list_are_named_by_what_they_are() -> None:
    spec = pe.RotarySpec(64, base=500000.0)
    assert legend(pe.plot.scores_by_distance(spec, 4)) == [f"head_dim {spec.describe()}"]
    both = [pe.RotarySpec(64), spec]
    assert legend(pe.plot.wavelengths(both)) == [f"head_dim {one.describe()}" for one in both]


def longrope(factor: float) -> pe.RotarySpec:
    """A specification like Phi-3's for long texts, whose description omits the factors."""
    scaling = pe.LongRopeScaling((1.0,) * 48, (factor,) * 48, 4096, factor=32.0)
    return pe.RotarySpec(96, scaling=scaling).resolve(8192)


LOOK_ALIKE = {
    "longrope": [longrope(1.0), longrope(2.0), longrope(4.0)],
    "custom frequencies": [pe.RotarySpec(4, custom_frequencies=numbers) for numbers in [(1.0, 0.5), (1.0, 0.25)]],
}


@pytest.mark.parametrize("draw", [pe.plot.wavelengths, pe.plot.scores_by_distance])
@pytest.mark.parametrize("specs", LOOK_ALIKE.values(), ids=LOOK_ALIKE)
def test_specifications_that_read_alike_are_all_drawn(draw: Callable[..., Axes], specs: list[pe.RotarySpec]) -> None:
    axes = draw(specs)
    name = f"head_dim {specs[0].describe()}"
    numbered = [name, *(f"{name} ({i})" for i in range(2, len(specs) + 1))]
    assert [text.replace("\n", " ") for text in legend(axes)] == numbered
    first = axes.get_lines()[0].get_ydata()
    for line in axes.get_lines()[1 : len(specs)]:
        assert not np.array_equal(line.get_ydata(), first)


@pytest.mark.filterwarnings("error")
def test_long_names_stand_below_the_axes() -> None:
    """In a separate figure they neither hide curves nor squeeze the axes."""
    axes = pe.plot.wavelengths(LOOK_ALIKE["longrope"])
    figure = axes.get_figure()
    figure.draw_without_rendering()
    box, whole = axes.get_legend().get_window_extent(), figure.bbox
    assert box.y1 < axes.get_window_extent().y0
    assert whole.x0 <= box.x0
    assert box.x1 <= whole.x1
    assert box.y0 >= whole.y0
    assert axes.get_window_extent().height > 0.4 * whole.height
    assert axes.get_window_extent().width > 0.8 * whole.width


@pytest.mark.parametrize("interleaved", [False, True])
def test_component_scores(interleaved: bool) -> None:
    spec = pe.RotarySpec(32, rotary_dim=16, rotary_start=8, interleaved=interleaved)
    axes = pe.plot.component_scores(spec, 50)
    ticks = [int(text.get_text()) for text in axes.get_yticklabels()]
    assert ticks == [8 + (2 if interleaved else 1) * pair for pair in (0, 1, 3, 4, 6, 7)]
    parts = pe.analysis.component_scores(spec, 50)[:, ticks]
    limit = parts.abs().max()
    assert words(axes)[0] == f"Parts of the score, each up to ±{limit:.3g}"
    for row, line in enumerate(axes.get_lines()):
        np.testing.assert_allclose((row - line.get_ydata()) / 0.45 * limit.item(), parts[:, row])
    assert axes.yaxis_inverted()


def test_angle_error() -> None:
    spec, positions = pe.RotarySpec(64), torch.tensor([10, 1000, 100_000])
    axes = pe.plot.angle_error(spec, positions)
    assert words(axes) == ("Error of angles", "position", "largest error (radians)")
    assert legend(axes) == ["float32 product", "posembed, float32 data"]
    for line, numerics in zip(axes.get_lines(), ("float32", "exact"), strict=True):
        expected = pe.analysis.angle_error(spec, positions, numerics=numerics).amax(1)
        assert np.array_equal(line.get_ydata(), expected.numpy())
        assert line.get_xdata().tolist() == positions.tolist()


def test_heat_map_beside_binary_codes() -> None:
    """Both in one figure of the caller."""
    figure, (left, right) = pyplot.subplots(1, 2)
    spec = pe.SinusoidalSpec(32, base=1000.0, scale=2.0)
    assert pe.plot.heat_map(spec, 20, axes=left) is left
    assert pe.plot.binary_codes(20, 8, axes=right) is right
    title, shown = "Sinusoidal encodings, vaswani, base 1000", "sines (even), then cosines (odd)"
    found = tuple(text.replace("\n", " ") for text in words(left))
    assert found == (title, f"component: {shown}", "position")
    assert words(right) == ("Binary codes", "bit, fastest first", "position")
    values = pe.analysis.heat_map(spec, 20).numpy()
    assert np.array_equal(colors(left), np.hstack([values[:, 0::2], values[:, 1::2]]))
    ticks = zip(left.get_xticks(), left.get_xticklabels(), strict=True)
    places = {int(tick.get_text()): place for place, tick in ticks}
    for component, place in places.items():
        assert np.array_equal(colors(left)[:, int(place)], values[:, component])
    assert {0, 31} <= places.keys()
    assert np.array_equal(colors(right), pe.analysis.binary_codes(20, 8).numpy())
    key = right.get_images()[0].colorbar
    assert [tick.get_text() for tick in key.ax.get_yticklabels()] == ["0", "1"]
    assert right.get_images()[0].get_cmap().N == 2
    assert left.get_images()[0].get_clim() == (-2.0, 2.0)
    assert left.get_figure() is figure
    assert len(pyplot.get_fignums()) == 1


def test_heat_map_of_halves_keeps_their_order() -> None:
    module = pe.SinusoidalPositionalEmbedding(10, preset="marian")
    axes = pe.plot.heat_map(module, 5)
    assert np.array_equal(colors(axes), pe.analysis.heat_map(module.spec, 5).numpy())
    assert axes.get_xlabel() == "component: sines, then cosines"
    other = pe.SinusoidalSpec(10, preset="marian", cos_first=True)
    assert pe.plot.heat_map(other).get_xlabel() == "component: cosines, then sines"


def test_modules_are_drawn_as_their_specifications() -> None:
    rope = pe.RotaryEmbedding(16, base=500.0)
    lines = [pe.plot.scores_by_distance(each, 9).get_lines()[0] for each in (rope, rope.spec)]
    assert np.array_equal(lines[0].get_ydata(), lines[1].get_ydata())
    assert pe.plot.wavelengths([rope, rope.spec]).get_legend() is not None
    assert pe.plot.component_scores(rope, 9).get_ylabel() == "component"


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: pe.plot.scores_by_distance(3), TypeError, "specs: expected a RotarySpec or"),
        (lambda: pe.plot.wavelengths({"a": 3}), TypeError, "specs: expected a RotarySpec or"),
        (lambda: pe.plot.angle_error(pe.SinusoidalSpec(8)), TypeError, "spec: expected a Rotary"),
        (lambda: pe.plot.heat_map(pe.RotarySpec(8)), TypeError, "spec: expected a SinusoidalSpec"),
        (lambda: pe.plot.alibi_bias(8, 32), TypeError, "alibi: expected an ALiBi, got an int$"),
        (lambda: pe.plot.alibi_bias(pe.ALiBi(8), 4, head=9), IndexError, "head: expected 0 to 7"),
        (lambda: pe.plot.angle_error(pe.RotarySpec(8), [1]), TypeError, "positions: expected a Tensor, got a list"),
        (lambda: pe.plot.grid([1]), TypeError, "positions: expected a Tensor, got a list"),
        (lambda: pe.plot.component_scores(pe.RotarySpec(8), components=[8]), IndexError, "components: expected 0 to 7, got 8"),
        (lambda: pe.plot.losses([1.0]), TypeError, "curves: expected a dict, got a list$"),
        (lambda: pe.plot.extrapolation([1.0], [8]), TypeError, "losses: expected a dict, got a list$"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(draw: Callable[[], Axes], error: type, message: str) -> None:
    with pytest.raises(error, match="^" + message):
        draw()


def test_names_are_those_of_functions() -> None:
    """Functions that draw are those that return axes and take none of their own figure's."""
    assert dir(pe.plot) == sorted(pe.plot.__all__)
    functions = {name: f for name, f in vars(pe.plot).items() if inspect.isfunction(f)}
    drawing = {name for name, f in functions.items() if "axes" in inspect.signature(f).parameters}
    helpers = {"inches", "label", "legend", "matrix", "new_axes"}
    assert all(inspect.isfunction(getattr(pe.plot, name)) for name in dir(pe.plot))
    assert drawing - helpers == {*pe.plot.__all__}


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_pair(interleaved: bool) -> None:
    spec = pe.RotarySpec(16, rotary_dim=8, rotary_start=4, interleaved=interleaved)
    axes = pe.plot.rotated_pair(pe.RotaryEmbedding(spec=spec), 2, 5)
    speed = float(spec.frequencies()[2])
    first, second = (8, 9) if interleaved else (6, 10)
    shown = (f"Pair 2: {speed:.2g} radians per position", f"component {first}", f"component {second}")
    assert words(axes) == shown
    arrows = [text for text in axes.texts if text.get_text() == ""]
    fast = pe.plot.rotated_pair(spec, 0, 5)
    numbers = [[text.get_text() for text in each.texts if text.get_text()] for each in (axes, fast)]
    assert numbers == [["0…4"], list("01234")]  # arrows on one spot have one number
    for position, arrow in enumerate(arrows):
        expected = (math.cos(position * speed), math.sin(position * speed))
        np.testing.assert_allclose(arrow.xy, expected, atol=1e-12)
    assert pe.plot.rotated_pair(spec).get_title() == "Pair 0: 1 radian per position"
    with pytest.raises(IndexError, match=r"^pair: expected 0 to 3, got 4"):
        pe.plot.rotated_pair(spec, 4)


def test_shift_matrix() -> None:
    spec = pe.SinusoidalSpec(16)
    axes = pe.plot.shift_matrix(spec, 5)
    matrix = pe.functional.sinusoidal_shift_matrix(5, spec=spec)
    assert np.array_equal(colors(axes), matrix.numpy())
    assert words(axes)[1:] == ("component of encode(p)", "component of encode(p + 5)")


def test_similarity() -> None:
    learned = pe.LearnedPositionalEmbedding(12, 8)
    axes = pe.plot.similarity(learned)
    assert np.array_equal(colors(axes), pe.analysis.similarity(learned).numpy())
    assert words(axes) == ("Similarity of positions", "position", "position")
    assert bar_label(axes) == "cosine similarity"


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_bias(causal: bool) -> None:
    alibi = pe.ALiBi(8, causal=causal)
    axes = pe.plot.alibi_bias(alibi, 4, 6, head=1)
    bias = alibi(4, 6, dtype=torch.float64)[1]
    expected = bias.masked_fill(bias.isinf(), math.nan).numpy()
    np.testing.assert_array_equal(colors(axes), expected)
    assert np.isnan(colors(axes)).any() == causal
    assert words(axes) == ("ALiBi, head 1, slope 0.25", "key", "query")


def test_extrapolation() -> None:
    losses = {"learned": [1.75, None, None], "alibi": [1.69, 1.68, 1.67]}
    axes = pe.plot.extrapolation(losses, [64, 128, 256])
    assert [text.get_text() for text in axes.get_xticklabels()] == list(losses)
    assert legend(axes) == ["64 tokens, as trained", "128 tokens", "256 tokens"]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[1.75, 1.69], [0.0, 1.68], [0.0, 1.67]]
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["1.75", "1.69", "n/a", "1.68", "n/a", "1.67"]
    refused((lambda: pe.plot.extrapolation(losses, [64, 128]), ValueError, "losses: expected 2 for 'learned', got 3"))  # fmt: skip


def test_losses_of_one_list_are_no_curve() -> None:
    for curve in ([5.0, 4.0], [5.0, 4.0, 3.0], ([1, 2, 3], [5.0, 4.0])):
        with pytest.raises(ValueError, match=r"^curves: expected .* for 'rope'"):
            pe.plot.losses({"rope": curve})


def test_a_grid_is_of_one_frame() -> None:
    video = pe.positions.grid(2, 3, 4)
    refused((lambda: pe.plot.grid(video), ValueError, "positions: expected the cells of one frame, got 2 frames"))  # fmt: skip
    assert len(pe.plot.grid(video[:, video[0] == 1]).texts) == 12


def test_losses() -> None:
    axes = pe.plot.losses({"training": ([1, 2, 3], [3.0, 2.0, 1.5]), "held out": ([3], [2.5])})
    assert words(axes) == ("Training", "step", "loss (nats per token)")
    assert legend(axes) == ["training", "held out"]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[3.0, 2.0, 1.5], [2.5]]
    axes = pe.plot.losses({"rope": torch.tensor([[1.0, 2.0], [3.0, 2.5]])})
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[3.0, 2.5]]


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_alone_needs_no_matplotlib() -> None:
    loaded = "[m for m in ('matplotlib', 'posembed.analysis', 'posembed.data') if m in sys.modules]"
    assert python(f"import sys, posembed; print({loaded})") == "[]"
    assert python("import posembed; print('plot' in dir(posembed))") == "True"


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = """
import sys, posembed
sys.modules["matplotlib"] = None  # as if it were not there
try:
    posembed.plot
except ImportError as error:
    print(error)
print(posembed.analysis.binary_codes(4).shape)
"""
    first, second = python(code).splitlines()
    assert first == "posembed.plot draws with matplotlib: python -m pip install matplotlib"
    assert second == "torch.Size([4, 2])"
