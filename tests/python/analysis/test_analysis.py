"""Compares every number of the analysis with float64 arithmetic in plain code."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import posembed as pe
import pytest
import torch
from support.case import assert_close
from support.refusals import refused

ANY_SPEC = {
    "half split": pe.RotarySpec(16),
    "interleaved": pe.RotarySpec(16, interleaved=True),
    "window": pe.RotarySpec(24, rotary_dim=16, rotary_start=4, interleaved=True),
    "reverse": pe.RotarySpec(16, reverse=True),
    "sections": pe.RotarySpec(16, sections=pe.Sections((4, 2, 2))),
    "yarn": pe.RotarySpec(16, scaling=pe.YarnScaling(8.0, 512)),
}
specs = pytest.mark.parametrize("spec", ANY_SPEC.values(), ids=ANY_SPEC)


# ------------------------------------------------------------------------------------- wavelengths


def test_wavelengths_of_the_classic_example() -> None:
    """Sixteen components, base 10000; many tutorials have wrong odd rows."""
    table = pe.analysis.wavelengths(pe.RotarySpec(16))
    full = [2 * math.pi * 10000 ** (i / 8) for i in range(8)]
    assert_close(table.wavelengths, torch.tensor(full, dtype=torch.float64), 1e-10)
    assert_close(table.half_wavelengths, table.wavelengths / 2, 0.0)
    rounded = [6.283, 19.869, 62.832, 198.692, 628.319, 1986.918, 6283.185, 19869.177]
    assert table.wavelengths.numpy().round(3).tolist() == rounded
    halves = [3.1416, 9.9346, 31.4159, 99.3459, 314.1593, 993.4588, 3141.5927, 9934.5883]
    assert table.half_wavelengths.numpy().round(4).tolist() == halves


def distances_told_apart(frequency: float, context: int) -> bool:
    """Whether all signed distances between tokens of a context have different angles."""
    distances = np.arange(-(context - 1), context)
    angles = np.sort(np.mod(distances * frequency, 2 * math.pi))
    gaps = np.diff(np.append(angles, angles[0] + 2 * math.pi))
    ordered = (len(distances) - 1) * frequency < 2 * math.pi  # less than a whole turn
    return ordered and bool(gaps.min() > 1e-9)


def test_context_is_the_longest_that_a_pair_tells_apart() -> None:
    table = pe.analysis.wavelengths(pe.RotarySpec(16))
    assert table.contexts.dtype == torch.int64
    for frequency, context in zip(table.frequencies.tolist(), table.contexts.tolist(), strict=True):
        assert distances_told_apart(frequency, context)
        assert not distances_told_apart(frequency, context + 1)


def test_notebooks_show_wavelengths_as_a_table() -> None:
    shown = pe.analysis.wavelengths(pe.RotarySpec(4))._repr_html_()
    cells = re.findall(r"<td>(.*?)</td>", shown)
    assert cells == ["0", "1", "6.28319", "3.14159", "4", "1", "0.01", "628.319", "314.159", "315"]


def test_pairs_that_stand_still_tell_nothing_apart() -> None:
    table = pe.analysis.wavelengths(pe.RotarySpec(4, custom_frequencies=(1.0, 0.0)))
    assert table.wavelengths.tolist()[1] == math.inf
    assert table.contexts.tolist() == [4, 1]


def test_wavelengths_of_sinusoids() -> None:
    table = pe.analysis.wavelengths(pe.SinusoidalSpec(8, preset="ddpm"))
    expected = [2 * math.pi * 10000 ** (i / 3) for i in range(4)]
    assert_close(table.wavelengths, torch.tensor(expected, dtype=torch.float64), 1e-9)


# ------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("farthest", [512, 65535])
def test_scores_of_ones(farthest: int) -> None:
    """Each pair adds 2 cos(distance * frequency), for any pairing."""
    spec = pe.RotarySpec(256)
    scores = pe.analysis.scores_by_distance(spec, farthest)
    distances = np.arange(farthest + 1)[:, None]
    expected = 2 * np.cos(distances * spec.frequencies().numpy()).sum(1) / 16
    # The reference's float64 products lose 65535 * 2^-53 radians in each of 128 pairs.
    assert_close(scores, torch.from_numpy(expected), 1e-10)
    assert scores[0].item() == 16.0


@specs
def test_components_add_up(spec: pe.RotarySpec) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, spec.head_dim, generator=generator, dtype=torch.float64)
    parts = pe.analysis.component_scores(spec, 40, query=query, key=key)
    assert parts.shape == (41, spec.head_dim)
    total = pe.analysis.scores_by_distance(spec, 40, query=query, key=key)
    assert_close(total, parts.sum(1), 1e-14)

    # The same as a model computes it: a query at position 140, keys before it.
    places = torch.arange(100, 141)
    keys = pe.functional.rotary(key.expand(1, 41, 1, -1).contiguous(), positions=places, spec=spec)
    asking = pe.functional.rotary(query.view(1, 1, 1, -1), positions=places[-1:], spec=spec)
    expected = (keys * asking).sum(-1).flatten() / math.sqrt(spec.head_dim)
    assert_close(total, expected.flip(0), 1e-12)


@pytest.mark.parametrize("scaling", [pe.XPosScaling(64.0, center=100.0), pe.XPosScaling(-64.0, center=7.5)], ids=str)
def test_scores_of_xpos_are_those_of_query_and_key(scaling: pe.XPosScaling) -> None:
    """Keys are scaled by the inverse of the query's factor, so the centre does not matter."""
    rope = pe.RotaryEmbedding(8, scaling=scaling)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    tokens = (one.expand(1, 41, 1, 8).contiguous() for one in (query, key))
    queries, keys = (rotated[0, :, 0] for rotated in rope(*tokens))
    # Compare pairs: the query's position determines how a pair's components divide their sum.
    parts = (queries[-1] * keys.flip(0) / math.sqrt(8)).view(41, 2, 4).sum(1)
    found = pe.analysis.component_scores(rope.spec, 40, query=query, key=key)
    # Factors up to (1.4 / 0.4) ** (100 / 64) multiply the rounding of each component.
    assert_close(found.view(41, 2, 4).sum(1), parts, 1e-13)
    total = pe.analysis.scores_by_distance(rope.spec, 40, query=query, key=key)
    assert_close(total, parts.sum(1), 1e-13)


def test_chosen_distances() -> None:
    spec = pe.RotarySpec(32)
    chosen = pe.analysis.scores_by_distance(spec, torch.tensor([7, 3], dtype=torch.int32))
    assert_close(chosen, pe.analysis.scores_by_distance(spec, 7)[[7, 3]], 0.0)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"distances": -1}, ValueError, "distances: expected a number of at least 0, got -1"),
        ({"distances": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, r"got \[2, 2\]"),
        ({"distances": torch.zeros(2)}, TypeError, "expected int32 or int64, got torch.float32"),
        ({"distances": torch.tensor([3, -1])}, ValueError, "numbers of at least 0, got -1"),
        ({"distances": torch.tensor([-5])}, ValueError, "distances: .* of at least 0, got -5"),
        ({"query": torch.ones(8)}, ValueError, r"query: expected \[16\], got \[8\]"),
        ({"key": torch.ones(1, 16)}, ValueError, r"key: expected \[16\], got \[1, 16\]"),
    ],
)  # fmt: skip
def test_scores_refuse(arguments: dict, kind: type, message: str) -> None:
    refused((lambda: pe.analysis.scores_by_distance(pe.RotarySpec(16), **arguments), kind, message))


# --------------------------------------------------------------------------------------- encodings


@pytest.mark.parametrize("base", [1e3, 1e4, 1e6])
def test_heat_map(base: float) -> None:
    values = pe.analysis.heat_map(pe.SinusoidalSpec(512, base=base))
    angles = np.arange(100)[:, None] / base ** (np.arange(256) / 256)
    expected = np.stack([np.sin(angles), np.cos(angles)], 2).reshape(100, 512)
    assert_close(values, torch.from_numpy(expected), 2e-14)


@pytest.mark.parametrize("width", [None, 7, 20])
def test_binary_codes(width: int | None) -> None:
    codes = pe.analysis.binary_codes(100, width)
    assert codes.shape == (100, width or 7)
    for position, bits in enumerate(codes.tolist()):
        assert "".join(map(str, reversed(bits))) == format(position, f"0{width or 7}b")


@pytest.mark.parametrize("width", [9, 64])
def test_binary_codes_are_never_cut_off(width: int) -> None:
    refused((lambda: pe.analysis.binary_codes(1000, width), ValueError, "width: expected 10 to 63 bits for 1000 positions"))  # fmt: skip


def test_a_number_of_positions_may_be_0_but_not_less() -> None:
    spec, learned = pe.SinusoidalSpec(8), pe.LearnedPositionalEmbedding(5, 4)
    assert pe.analysis.heat_map(spec, 0).shape == (0, 8)
    assert pe.analysis.binary_codes(0).shape == (0, 1)
    for call in (
        lambda count: pe.analysis.heat_map(spec, count),
        pe.analysis.binary_codes,
        lambda count: pe.analysis.similarity(learned, count),
        lambda count: pe.analysis.similarity(learned.weight, count),
    ):
        assert len(call(0)) == 0
        refused(
            (lambda: call(-1), ValueError, "positions: expected 0 or more, got -1"),
            (lambda: call(1.5), ValueError, "positions: expected a whole number, got 1.5"),
        )


def test_similarity() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0], [0.0, 0.0]])
    half = math.sqrt(0.5)
    expected = [[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0]]
    values = pe.analysis.similarity(table)
    assert_close(values, torch.tensor(expected, dtype=torch.float64), 1e-15)
    assert_close(pe.analysis.similarity(table, 2), values[:2, :2], 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_most_similar(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 8).to(dtype)
    table[7] = 0.0
    rows, cosines = pe.analysis.most_similar(table.requires_grad_(), 3, 5)
    exact = pe.analysis.similarity(table)[3]
    exact[3] = -2.0
    assert rows.tolist() == exact.argsort(descending=True)[:5].tolist()
    assert cosines.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert_close(cosines.double(), exact[rows], 1e-6)
    every, values = pe.analysis.most_similar(table, 3, 100)
    assert sorted([*every.tolist(), 3]) == list(range(50))
    assert values[every == 7].tolist() == [0.0]


def test_most_similar_to_a_vector() -> None:
    """King - man + woman."""
    table = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    rows, cosines = pe.analysis.most_similar(table, table[0] - table[1] + 2 * table[2], 2)
    assert rows.tolist() == [2, 0]
    assert cosines[0] == 1.0
    assert pe.analysis.most_similar(table, torch.zeros(2), 0)[0].tolist() == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3), 0), ValueError, "table: expected .rows, dim., got .3."),
        ((torch.zeros(3, 2), 3), IndexError, "query: expected a row from 0 to 2, got 3"),
        ((torch.zeros(3, 2), -1), IndexError, "query: expected a row from 0 to 2, got -1"),
        ((torch.zeros(3, 2), torch.zeros(3)), ValueError, "query: expected .2., got .3."),
        ((torch.zeros(3, 2), 0, -1), ValueError, "count: expected 0 or more, got -1"),
    ],
)  # fmt: skip
def test_most_similar_refuses(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    refused((lambda: pe.analysis.most_similar(*arguments), error, message))


def test_similarity_of_modules() -> None:
    learned = pe.LearnedPositionalEmbedding(6, 4, first_row=2)
    assert_close(pe.analysis.similarity(learned), pe.analysis.similarity(learned.weight[2:]), 0.0)
    assert not pe.analysis.similarity(learned).requires_grad
    sinusoidal = pe.SinusoidalPositionalEmbedding(64)
    values = pe.analysis.similarity(sinusoidal, 5)
    expected = pe.analysis.similarity(pe.analysis.heat_map(sinusoidal.spec, 5))
    assert_close(values, expected, 1e-6)
    refused((lambda: pe.analysis.similarity(sinusoidal), ValueError, "positions: expected a number"))  # fmt: skip


def test_similarity_map_of_every_kind() -> None:
    """One cell is most alike to itself, and a map is a row of the similarity of all cells."""
    grid, cell = (5, 7), (3, 1)
    learned = pe.LearnedPositionalEmbedding(grid=(4, 4), prefix_tokens=2, embedding_dim=8)
    table = learned.resampled(grid)[2:]
    maps = pe.analysis.similarity_map(learned, grid)
    assert_close(maps.reshape(35, 35), pe.analysis.similarity(table), 1e-15)
    assert_close(pe.analysis.similarity_map(table, grid, cell), maps[3, 1], 1e-15)
    sinusoidal = pe.SinusoidalPositionalEmbedding(64, preset="mae")
    found = pe.analysis.similarity_map(sinusoidal, grid, cell)
    codes = sinusoidal.encode_grid(grid, dtype=torch.float64)[0]
    assert_close(found.flatten(), codes @ codes[3 * 7 + 1] / 32, 1e-14)
    for axes in (2, 3):  # the last two are rows and columns
        sections = pe.Sections((0,) * (axes - 2) + (4, 4), restart=True)
        spec = pe.RotarySpec(16, sections=sections)
        found = pe.analysis.similarity_map(spec, grid, cell)
        angles = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
        y, x = torch.meshgrid(torch.arange(5) - 3, torch.arange(7) - 1, indexing="ij")
        parts = [(distance[..., None] * angles).cos().sum(-1) for distance in (y, x)]
        assert_close(found, sum(parts) / 8, 1e-14)
    assert pe.analysis.similarity_map(learned).shape == (4, 4, 4, 4)
    refused(
        (lambda: pe.analysis.similarity_map(sinusoidal), ValueError, "grid: expected rows and columns, as the embedding"),
        (lambda: pe.analysis.similarity_map(table, (4, 4)), ValueError, "grid: expected 35 cells, got (4, 4)"),
        (lambda: pe.analysis.similarity_map(pe.RotarySpec(16), grid), ValueError, "grid: expected a rotation of rows and columns"),
        (lambda: pe.analysis.similarity_map(sinusoidal, grid, (5, 1)), IndexError, "cell: expected one of the grid (5, 7), got (5, 1)"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", [name for name in ANY_SPEC if name != "yarn"])
def test_float32_angles_lose_what_pytorch_code_loses(name: str) -> None:
    spec = ANY_SPEC[name]
    positions = torch.tensor([0, 1, 131_071, 1_000_003])
    error = pe.analysis.angle_error(spec, positions)
    rounded = 1.0 / spec.base ** (torch.arange(0, 16, 2).float() / 16)
    product = (positions.float()[:, None] * rounded).double()
    expected = (product - positions[:, None] * spec.frequencies()).abs()
    assert_close(error, expected, 2e-7)  # cosines and sines are float32 too
    assert error[3].max() > 1e-3


@specs
def test_exact_angles_lose_nothing_with_distance(spec: pe.RotarySpec) -> None:
    positions = torch.tensor([1, 131_071, 2**31 - 1])
    assert pe.analysis.angle_error(spec, positions, numerics="exact").max() < 2e-7


@pytest.mark.parametrize("name", list(ANY_SPEC))
@pytest.mark.parametrize("length", [1, 2, 999, 5000])
def test_the_largest_float32_error_is_that_of_all_positions(name: str, length: int) -> None:
    spec = ANY_SPEC[name]
    every = pe.analysis.angle_error(spec, torch.arange(length)).amax(1)
    error, position = pe.analysis.float32_error(pe.RotaryEmbedding(spec), length)
    assert error == pytest.approx(float(every.max()), abs=2e-7)
    assert position < length
    assert float(every[position]) == pytest.approx(error, abs=2e-7)


def test_angle_error_by_default_goes_to_a_million() -> None:
    spec = pe.RotarySpec(128)
    error = pe.analysis.angle_error(spec)
    assert error.shape == (20, 64)
    for bits, worst in enumerate(error.amax(1).tolist(), start=1):
        assert worst == pytest.approx(pe.analysis.float32_error(spec, 2**bits)[0], abs=2e-7)
    refused((lambda: pe.analysis.angle_error(spec, numerics="half"), ValueError, "numerics: expected 'exact', 'float32'"))  # fmt: skip


# ------------------------------------------------------------------------------------------- words

DOCUMENTS = (
    "There are many popular restaurants nearby this church.",
    "Some restaurants offer breakfasts as early as 6:00 am to provide for prayers.",
    '"The price and taste are all good.", said one prayer who has been a frequent visitor to this church since 1998.',
    "However, Covid-19 has forced some restaurants to shut down for lack of revenue during the "
    "pandemic, and many prayers are complained about it.",
)


def test_tf_idf_of_four_documents() -> None:
    """A table from a tutorial that forgot the church of document 1 and its full stop."""
    pytest.importorskip("sklearn")
    terms = ["many", "popular", "restaurants", "nearby", "church", "offer"]
    table = pe.analysis.tf_idf(DOCUMENTS, terms)
    assert table.terms == tuple(terms)
    lengths = [8, 13, 21, 23]  # 6:00 and Covid-19 are one word each
    counts = [[1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]]
    frequencies = np.array(counts) / np.array(lengths)[:, None]
    documents = [2, 1, 3, 1, 2, 1]
    inverse = np.log10(4 / np.array(documents))
    assert_close(table.term_frequencies, torch.from_numpy(frequencies), 1e-16)
    assert table.document_counts.tolist() == documents
    assert_close(table.inverse_document_frequencies, torch.from_numpy(inverse), 1e-15)
    assert_close(table.weights, torch.from_numpy(frequencies * inverse), 1e-15)
    church = table.weights[:, terms.index("church")]
    assert [round(weight, 4) for weight in church.tolist()] == [0.0376, 0.0, 0.0143, 0.0]


def test_tf_idf_of_all_words() -> None:
    pytest.importorskip("sklearn")
    table = pe.analysis.tf_idf(DOCUMENTS)
    assert list(table.terms) == sorted(table.terms)
    assert {"6:00", "covid-19", "a", "1998", "good"} < set(table.terms)
    assert_close(table.term_frequencies.sum(1), torch.ones(4, dtype=torch.float64), 1e-15)
    refused((lambda: pe.analysis.tf_idf(DOCUMENTS, ["church", "bar"]), ValueError, "terms: expected words of the documents, got ['bar']"))  # fmt: skip


# ------------------------------------------------------------------------------------- arguments


def test_names_are_those_of_functions_on_the_page() -> None:
    """docs/guide/analysis.md lists what dir() and completion show."""
    page = Path(__file__).parents[3] / "docs" / "guide" / "analysis.md"
    tables = re.split(r"\| function \| (?:computes|draws) \|", page.read_text(encoding="utf-8"))[1:]
    cells = [re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for table in tables]
    computed, drawn = ({*re.findall(r"`(\w+)\(", " ".join(each))} for each in cells)
    assert dir(pe.analysis) == sorted(computed)
    assert all(inspect.isfunction(getattr(pe.analysis, name)) for name in dir(pe.analysis))
    assert {*pe.analysis.__all__} - computed == {"Encoder", "TermTable", "Wavelengths"}
    pytest.importorskip("matplotlib")
    assert dir(pe.plot) == sorted(computed - {"float32_error", "most_similar", "tf_idf"} | drawn)


def test_modules_are_computed_as_their_specifications() -> None:
    sections = pe.Sections((4, 4), restart=True)
    for module in (pe.RotaryEmbedding(16, base=500.0), pe.SinusoidalPositionalEmbedding(16)):
        found = (pe.analysis.wavelengths(each) for each in (module, module.spec))
        for ours, expected in zip(*map(dataclasses.astuple, found), strict=True):
            assert torch.equal(ours, expected)
    rope = pe.RotaryEmbedding(16, sections=sections)
    sinusoidal = pe.SinusoidalPositionalEmbedding(16, base=50.0)
    for compute, each in (
        (lambda module: pe.analysis.component_scores(module, 9), rope),
        (lambda module: pe.analysis.scores_by_distance(module, 9), rope),
        (pe.analysis.angle_error, rope),
        (lambda module: pe.analysis.similarity_map(module, (2, 3)), rope),
        (pe.analysis.heat_map, sinusoidal),
    ):
        assert torch.equal(compute(each), compute(each.spec))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pe.analysis.wavelengths(64), TypeError, "spec: expected a RotarySpec or RotaryEmbedding, got an int"),
        (lambda: pe.analysis.component_scores(64), TypeError, "spec: expected a RotarySpec"),
        (lambda: pe.analysis.scores_by_distance(64), TypeError, "spec: expected a RotarySpec"),
        (lambda: pe.analysis.angle_error(pe.SinusoidalSpec(8)), TypeError, "spec: expected a RotarySpec"),
        (lambda: pe.analysis.heat_map(pe.RotarySpec(8)), TypeError, "spec: expected a SinusoidalSpec or"),
        (lambda: pe.analysis.similarity(64, 3), TypeError, "embedding: expected a Tensor or a module with encode, got an int"),
        (lambda: pe.analysis.similarity_map(64, (4, 4)), TypeError, "embedding: expected a RotarySpec"),
        (lambda: pe.analysis.angle_error(pe.RotarySpec(8), [1, 2]), TypeError, "positions: expected a Tensor, got a list; torch.tensor.positions."),
        (lambda: pe.analysis.angle_error(pe.RotarySpec(16), torch.tensor([-1, 4])), ValueError, "positions: expected numbers of at least 0, got -1"),
        (lambda: pe.analysis.scores_by_distance(pe.RotarySpec(8), query=[1.0]), TypeError, "query: expected a Tensor, got a list"),
        (lambda: pe.analysis.most_similar([[1.0]], 0), TypeError, "table: expected a Tensor, got a list"),
        (lambda: pe.analysis.tf_idf("one text"), TypeError, "documents: expected several texts, got one str"),
        (lambda: pe.analysis.wavelengths(pe.RotaryEmbedding(8, learned_frequencies=True)), ValueError, "spec: expected frequencies that are not learned"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call: Callable[[], object], error: type, message: str) -> None:
    with pytest.raises(error, match="^" + message):
        call()
