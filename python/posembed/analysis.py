"""Numbers about positions: wavelengths, scores by distance, heat maps, angle errors.

The operators themselves compute them, so they show what models compute. Results are tensors,
float64 by default; numpy and matplotlib read them without a copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from posembed import functional
from posembed.functional._learned import checked_grid
from posembed.glue import notebooks
from posembed.glue.gate import check_tensors, wrong_type
from posembed.glue.validation import whole
from posembed.modules.learned import LearnedPositionalEmbedding
from posembed.modules.rotary import RotaryEmbedding
from posembed.modules.sinusoidal import SinusoidalPositionalEmbedding
from posembed.specifications import AngleError, Numerics, RotarySpec, SinusoidalSpec

__all__ = [
    "Encoder",
    "TermTable",
    "Wavelengths",
    "angle_error",
    "binary_codes",
    "component_scores",
    "float32_error",
    "heat_map",
    "most_similar",
    "scores_by_distance",
    "similarity",
    "similarity_map",
    "tf_idf",
    "wavelengths",
]


def __dir__() -> list[str]:
    """The functions; the types that they take and return are public, too."""
    return [name for name in __all__ if name.islower()]


CHUNK = 8192  # distances per step, which bounds memory for long contexts


class Encoder(Protocol):
    """Maps positions to vectors, like the learned and sinusoidal embeddings."""

    def encode(self, positions: Tensor) -> Tensor:
        """Integer [...] -> [..., dim]."""
        ...


Rotation = RotarySpec | RotaryEmbedding
Sinusoid = SinusoidalSpec | SinusoidalPositionalEmbedding


def rotation(spec: Any, argument: str = "spec") -> RotarySpec:
    """The specification, given as itself or as a module that has it."""
    if isinstance(spec, RotaryEmbedding):
        if spec.frequencies is not None:
            raise ValueError(
                f"{argument}: expected frequencies that are not learned; of learned ones [pairs], "
                "RotarySpec(head_dim, custom_frequencies=module.frequencies.tolist())"
            )
        spec = spec.spec
    if not isinstance(spec, RotarySpec):
        raise wrong_type(argument, "a RotarySpec or RotaryEmbedding", type(spec).__name__)
    return spec


def sinusoid(spec: Any, argument: str = "spec") -> SinusoidalSpec:
    """The specification, given as itself or as a module that has it; others raise TypeError."""
    spec = spec.spec if isinstance(spec, SinusoidalPositionalEmbedding) else spec
    if not isinstance(spec, SinusoidalSpec):
        expected = "a SinusoidalSpec or SinusoidalPositionalEmbedding"
        raise wrong_type(argument, expected, type(spec).__name__)
    return spec


# ------------------------------------------------------------------------------------- frequencies


@dataclasses.dataclass(frozen=True, eq=False)
class Wavelengths:
    """Frequencies and wavelengths, with one entry for each pair of components.

    Attributes:
        frequencies: Radians per position.
        wavelengths: Positions per turn; inf for pairs that do not turn.
        half_wavelengths: Positions per half turn.
        contexts: int64: the longest context in which all distances, in both directions, have
            different angles. Its first and last tokens are less than half a turn apart; 1 for pairs
            that do not turn.
    """

    frequencies: Tensor
    wavelengths: Tensor
    half_wavelengths: Tensor
    contexts: Tensor

    def _repr_html_(self) -> str:
        """A row for each pair, for notebooks."""
        head = ("pair", "radians/position", "wavelength", "half", "longest context")
        columns = (self.frequencies, self.wavelengths, self.half_wavelengths)
        numbers = [[f"{number:.6g}" for number in column.tolist()] for column in columns]
        contexts = [str(context) for context in self.contexts.tolist()]
        rows = zip(*numbers, contexts, strict=True)
        return notebooks.table(head, ([str(pair), *row] for pair, row in enumerate(rows)))


def wavelengths(spec: Rotation | Sinusoid) -> Wavelengths:
    """Frequencies and wavelengths of a specification's pairs.

    Args:
        spec: The specification, or a module that has one. If its frequencies depend on the length
            of the sequence, pass ``spec.resolve(length)``.

    Examples:
        >>> import posembed as pe
        >>> table = pe.analysis.wavelengths(pe.RotarySpec(16))
        >>> [round(length, 3) for length in table.wavelengths[:4].tolist()]
        [6.283, 19.869, 62.832, 198.692]
        >>> table.contexts[:4].tolist()
        [4, 10, 32, 100]
    """
    known = (SinusoidalSpec, SinusoidalPositionalEmbedding)
    spec = sinusoid(spec) if isinstance(spec, known) else rotation(spec)
    full = spec.wavelengths()
    half = full / 2
    contexts = torch.where(half.isinf(), torch.ones_like(half), half.ceil()).to(torch.int64)
    return Wavelengths(spec.frequencies(), full, half, contexts)


# ------------------------------------------------------------------------------------------ scores


def places(name: str, numbers: Tensor) -> Tensor:
    """Distances or positions to compute at: int64 [n], each at least 0.

    Position -1 means "not rotated" and is not a distance.
    """
    check_tensors(**{name: numbers})
    if numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(f"{name}: expected int32 or int64, got {numbers.dtype}")
    if numbers.dim() != 1:
        raise ValueError(f"{name}: expected [n], got {list(numbers.shape)}")
    numbers = numbers.to("cpu", torch.int64)
    below = numbers[numbers < 0]
    if len(below):
        raise ValueError(f"{name}: expected numbers of at least 0, got {int(below[0])}")
    return numbers


def distances_to(distances: int | Tensor) -> Tensor:
    """All distances from 0 to a number inclusive, or the given distances: int64 [n]."""
    if isinstance(distances, Tensor):
        return places("distances", distances)
    return torch.arange(whole("distances", distances, 0) + 1)


def head_vector(name: str, vector: Tensor | None, spec: RotarySpec) -> Tensor:
    """One head's query or key, float64 [head_dim]; ones if none is given."""
    if vector is None:
        return torch.ones(spec.head_dim, dtype=torch.float64)
    check_tensors(**{name: vector})
    if tuple(vector.shape) != (spec.head_dim,):
        raise ValueError(f"{name}: expected [{spec.head_dim}], got {list(vector.shape)}")
    return vector.detach().to("cpu", torch.float64)


def rotate_one(vector: Tensor, positions: Tensor, spec: RotarySpec) -> Tensor:
    """A query, or a key for ``spec.for_keys()``, at each position: [positions, head_dim]."""
    tokens = vector.expand(len(positions), 1, -1).contiguous()
    return functional.rotary(tokens, positions=positions, spec=spec, layout="thd")[:, 0]


def component_scores(
    spec: Rotation,
    distances: int | Tensor = 512,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Each component's contribution to a query-key score, by distance.

    Pairs of low index make many turns within a few tokens; pairs of high index make a fraction of a
    turn within thousands.

    Args:
        spec: The rotation: a specification, or a module that has one.
        distances: The largest distance (all from 0 are used), or int [n], each at least 0.
        query: [head_dim]; default: ones.
        key: [head_dim]; default: ones.

    Returns:
        [distances, head_dim], divided by the square root of head_dim as attention does.

    Raises:
        ValueError: Shapes are incompatible, or a distance is below 0.

    Examples:
        >>> import posembed as pe
        >>> pe.analysis.component_scores(pe.RotarySpec(256), 511).shape
        torch.Size([512, 256])
    """
    spec = rotation(spec)
    at = distances_to(distances)
    start = torch.zeros(1, dtype=torch.int64)
    turned = rotate_one(head_vector("query", query, spec), at, spec)
    still = rotate_one(head_vector("key", key, spec), start, spec.for_keys())
    return turned * still / math.sqrt(spec.head_dim)


def scores_by_distance(
    spec: Rotation,
    distances: int | Tensor = 512,
    *,
    query: Tensor | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Query-key attention scores [distances], by how far the key is before the query.

    With a query and a key of ones, the curve falls from ``sqrt(head_dim)`` and then oscillates (Su
    et al., arXiv:2104.09864, section 3.4.3). Arguments and errors are those of
    :func:`component_scores`.

    Examples:
        >>> import posembed as pe
        >>> scores = pe.analysis.scores_by_distance(pe.RotarySpec(256), 65535)
        >>> len(scores), scores[0].item()
        (65536, 16.0)
    """
    spec = rotation(spec)
    parts = torch.split(distances_to(distances), CHUNK)
    sums = [component_scores(spec, part, query=query, key=key).sum(-1) for part in parts]
    return torch.cat(sums)


# --------------------------------------------------------------------------------------- encodings


def heat_map(spec: Sinusoid, positions: int = 100) -> Tensor:
    """Sinusoidal encodings of the first positions: [positions, embedding_dim].

    Examples:
        >>> import posembed as pe
        >>> pe.analysis.heat_map(pe.SinusoidalSpec(512, base=1e6)).shape
        torch.Size([100, 512])
    """
    at = torch.arange(whole("positions", positions, 0))
    return functional.sinusoidal_encode(at, spec=sinusoid(spec), dtype=torch.float64)


def binary_codes(positions: int = 100, width: int | None = None) -> Tensor:
    """Positions in binary: uint8 [positions, width], the fastest-changing bit first.

    Sinusoids are a smooth form of this: each component changes more slowly than the one before.

    Args:
        positions: Number of positions, from 0.
        width: Number of bits; default: as many as the last position needs.

    Raises:
        ValueError: The last position needs more bits, or ``positions`` is negative.

    Examples:
        >>> import posembed as pe
        >>> pe.analysis.binary_codes(7)[6].tolist()
        [0, 1, 1]
    """
    positions = whole("positions", positions, 0)
    needed = max(1, (positions - 1).bit_length())
    width = needed if width is None else width
    if not needed <= width <= 63:
        raise ValueError(
            f"width: expected {needed} to 63 bits for {positions} positions, got {width}"
        )
    bits = torch.arange(positions)[:, None] >> torch.arange(width)
    return (bits & 1).to(torch.uint8)


def similarity(embedding: Tensor | Encoder, positions: int | None = None) -> Tensor:
    """Cosine similarity between position vectors: [positions, positions].

    If a learned table encodes proximity, values decrease on both sides of the diagonal.

    Args:
        embedding: A table [positions, dim], or a module with ``encode``, such as
            :class:`posembed.LearnedPositionalEmbedding`.
        positions: Number of positions, from 0; default: the whole table.

    Returns:
        [positions, positions]: 1 on the diagonal, or 0 for rows of zeros.

    Raises:
        ValueError: The module has no table and ``positions`` is missing; or a number is below 0.

    Examples:
        >>> import posembed as pe
        >>> pe.analysis.similarity(pe.LearnedPositionalEmbedding(32, 64)).shape
        torch.Size([32, 32])
    """
    count = None if positions is None else whole("positions", positions, 0)
    if isinstance(embedding, Tensor):
        rows = embedding[:count]
    elif not hasattr(embedding, "encode"):
        raise wrong_type("embedding", "a Tensor or a module with encode", type(embedding).__name__)
    else:
        if count is None:
            count = getattr(embedding, "max_positions", None)
        if count is None:
            raise ValueError("positions: expected a number, as the embedding has no last position")
        weight = getattr(embedding, "weight", None)
        rows = embedding.encode(
            torch.arange(count, device=None if weight is None else weight.device)
        )
    rows = torch.nn.functional.normalize(rows.detach().double(), dim=-1)
    return rows @ rows.T


def most_similar(table: Tensor, query: int | Tensor, count: int = 10) -> tuple[Tensor, Tensor]:
    """The rows of a table that are most similar to one of them or to a vector, by cosine.

    Args:
        table: [rows, dim], for instance word vectors.
        query: The number of a row, which is not among the results, or a vector [dim].
        count: The largest number of results.

    Returns:
        The numbers of the rows, int64 [results], the most similar one first; and their cosines, in
        float32, or float64 for a table in float64. Rows of zeros have 0.

    Raises:
        ValueError: ``table`` is not a matrix, ``query`` has another size than its rows, or
            ``count`` is below 0.
        IndexError: The table has no such row.

    Examples:
        >>> import posembed as pe, torch
        >>> words = ["cat", "dog", "the"]
        >>> table = torch.tensor([[1.0, 0.1], [2.0, 0.3], [-0.5, 1.0]])
        >>> rows, cosines = pe.analysis.most_similar(table, words.index("cat"), 1)
        >>> [words[row] for row in rows]
        ['dog']
    """
    check_tensors(table=table)
    if table.dim() != 2:
        raise ValueError(f"table: expected [rows, dim], got {list(table.shape)}")
    count = whole("count", count, 0)
    rows = table.detach().to(torch.promote_types(table.dtype, torch.float32))
    own = None if isinstance(query, Tensor) else whole("query", query)
    if isinstance(query, Tensor):
        vector = query.detach().to(rows)
    elif own is not None and 0 <= own < len(rows):
        vector = rows[own]
    else:
        raise IndexError(f"query: expected a row from 0 to {len(rows) - 1}, got {own}")
    if vector.shape != rows.shape[1:]:
        raise ValueError(f"query: expected [{rows.shape[1]}], got {list(vector.shape)}")
    products, norms = rows @ vector, rows.norm(dim=1) * vector.norm()
    cosines = torch.where(norms > 0, products / norms, 0.0)
    if own is not None:
        cosines[own] = -math.inf
    kept = min(count, len(rows) - (own is not None))
    best = cosines.topk(kept)
    return best.indices, best.values


Cells = Tensor | LearnedPositionalEmbedding | SinusoidalPositionalEmbedding | Rotation


def similarity_map(
    embedding: Cells, grid: Sequence[int] | None = None, cell: Sequence[int] | None = None
) -> Tensor:
    """Cosine similarity between the cells of a picture: the figure of the ViT paper.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, figure 7. For a rotation,
    the score of a query and a key of ones, divided by head_dim.

    Args:
        embedding: A table [rows * columns, dim]; a module with a grid or several axes; or a
            rotation, whose last two axes are rows and columns.
        grid: Rows and columns; default: those of a learned table.
        cell: The row and the column to compare with; default: each.

    Returns:
        float64 [rows, columns], or [rows, columns, rows, columns] for each cell.

    Raises:
        ValueError: ``grid`` is missing, or the embedding has not this grid.
        IndexError: ``cell`` is outside the grid.

    Examples:
        >>> import posembed as pe
        >>> position = pe.SinusoidalPositionalEmbedding(64, preset="mae")
        >>> pe.analysis.similarity_map(position, (14, 14), (3, 5)).shape
        torch.Size([14, 14])
    """
    own = getattr(embedding, "grid", None)
    if grid is None and own is None:
        raise ValueError("grid: expected rows and columns, as the embedding has no grid")
    rows, columns = checked_grid("grid", own if grid is None else grid)
    vectors = _vectors_of_cells(embedding, (rows, columns)).detach().double()
    if len(vectors) != rows * columns:
        raise ValueError(f"grid: expected {len(vectors)} cells, got {(rows, columns)}")
    vectors = torch.nn.functional.normalize(vectors, dim=-1).view(rows, columns, -1)
    if cell is None:
        return torch.einsum("abd,yxd->abyx", vectors, vectors)
    row, column = (whole("cell", index) for index in cell)
    if not (0 <= row < rows and 0 <= column < columns):
        raise IndexError(f"cell: expected one of the grid {(rows, columns)}, got {(row, column)}")
    return vectors @ vectors[row, column]


def _vectors_of_cells(embedding: Cells, grid: tuple[int, int]) -> Tensor:
    """A vector for each cell, row by row."""
    if isinstance(embedding, Tensor):
        return embedding
    if isinstance(embedding, SinusoidalPositionalEmbedding):
        return embedding.encode_grid(grid, dtype=torch.float64)[0]
    if isinstance(embedding, LearnedPositionalEmbedding):
        return embedding.resampled(grid)[-grid[0] * grid[1] :]
    spec = rotation(embedding, "embedding")
    axes = 1 if spec.sections is None else 1 + max(spec.sections.axis_of_pair)
    if axes < 2:
        raise ValueError(f"grid: expected a rotation of rows and columns, got {axes} axis")
    positions = torch.zeros(axes, 1, grid[0] * grid[1], dtype=torch.int64)
    positions[-2:, 0] = torch.cartesian_prod(*(torch.arange(size) for size in grid)).T
    ones = torch.ones(1, positions.shape[2], 1, spec.head_dim, dtype=torch.float64)
    return functional.rotary(ones, positions=positions, spec=spec)[0, :, 0]


# ----------------------------------------------------------------------------------- float32 angles


def cosines_and_sines(
    spec: RotarySpec, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each pair's angle from the operator: float64 [positions, pairs] each.

    They are the rotated vector (1, 0) of each pair, including the attention factor.
    """
    pairs = spec.frequencies().numel()
    stride, partner = (2, 1) if spec.interleaved else (1, pairs)
    first = spec.rotary_start + stride * torch.arange(pairs)
    unit = torch.zeros(spec.head_dim, dtype=dtype).index_fill_(0, first, 1.0)
    turned = rotate_one(unit, positions, spec).double()
    return turned[:, first], turned[:, first + partner]


def float32_error(spec: Rotation, length: int) -> AngleError:
    """The largest error of float32 angles at any position below ``length``, and where it is.

    The angle is a float32 position times a float32 frequency, which transformers computes as
    ``1 / base ** (2 * i / dim)`` in float32. Sine and cosine are off by nearly as much.

    Args:
        spec: The rotation: a specification, or a module that has one.
        length: Number of positions, from 0.

    Raises:
        ValueError: ``length`` is below 1.

    Examples:
        >>> import posembed as pe
        >>> error, position = pe.analysis.float32_error(pe.RotarySpec(128, base=500000.0), 131_072)
        >>> f"{error:.1e} radians"
        '9.3e-03 radians'
    """
    return rotation(spec).float32_error(length)


def worst_positions(spec: RotarySpec) -> Tensor:
    """Where float32 angles are worst below 2, 4, … 2 ** 20 positions: int64 [20]."""
    return torch.tensor([float32_error(spec, 2**bits).position for bits in range(1, 21)])


def angle_error(
    spec: Rotation, positions: Tensor | None = None, *, numerics: Numerics = "float32"
) -> Tensor:
    """The difference between rounded and exact angles, in radians.

    Args:
        spec: The rotation: a specification, or a module that has one.
        positions: int [n], each at least 0; default: where float32 angles are worst below 2, 4, …
            2 ** 20 positions, as :func:`float32_error` tells.
        numerics: How angles of float32 data are rounded; see :class:`posembed.RotarySpec`.
            ``"float32"`` is what most code does; with ``"exact"`` only the result is rounded.

    Returns:
        [positions, pairs], at most pi.

    Examples:
        >>> import torch, posembed as pe
        >>> spec, at = pe.RotarySpec(128), torch.tensor([1_000_003])
        >>> pe.analysis.angle_error(spec, at).max().item() > 2e-2
        True
        >>> pe.analysis.angle_error(spec, at, numerics="exact").max().item() < 2e-7
        True
    """
    spec = rotation(spec)
    at = worst_positions(spec) if positions is None else places("positions", positions)
    exact = dataclasses.replace(spec, numerics="exact")
    cosine, sine = cosines_and_sines(exact, at, torch.float64)
    rounded = dataclasses.replace(spec, numerics=numerics)
    ours = cosines_and_sines(rounded, at, torch.float32)
    # The angle between two vectors of any length.
    return torch.atan2(ours[1] * cosine - ours[0] * sine, ours[0] * cosine + ours[1] * sine).abs()


# ------------------------------------------------------------------------------------------- words

# Words may contain punctuation, as in 6:00 and Covid-19, but not begin or end with it.
WORD = r"\w+(?:[:'-]\w+)*"


@dataclasses.dataclass(frozen=True, eq=False)
class TermTable:
    """Words of some documents and their weights.

    Attributes:
        terms: The words, in the order of the columns below.
        term_frequencies: [documents, terms]: fraction of the document's words.
        document_counts: int64 [terms]: number of documents with the word.
        inverse_document_frequencies: [terms]: log10 of documents over document_counts.
        weights: [documents, terms]: TF-IDF, the product of both.
    """

    terms: tuple[str, ...]
    term_frequencies: Tensor
    document_counts: Tensor
    inverse_document_frequencies: Tensor
    weights: Tensor


def tf_idf(documents: Sequence[str], terms: Sequence[str] | None = None) -> TermTable:
    """Textbook TF-IDF: term frequency times inverse document frequency, with log base 10.

    Requires scikit-learn to count words. Its ``TfidfVectorizer`` uses another formula (natural
    logarithm plus 1, rows normalised to length 1).

    Args:
        documents: Texts; case-insensitive.
        terms: The words to show; default: all, sorted.

    Raises:
        ImportError: scikit-learn is missing.
        TypeError: ``documents`` is one text.
        ValueError: A term does not occur in any document.

    Examples:
        >>> import posembed as pe
        >>> table = pe.analysis.tf_idf(["The cat sat.", "The dog."], ["cat", "the"])
        >>> table.weights.round(decimals=4).tolist()
        [[0.1003, 0.0], [0.0, 0.0]]
    """
    if isinstance(documents, str):
        raise TypeError("documents: expected several texts, got one str; [documents]")
    try:
        from sklearn.feature_extraction import text  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "tf_idf counts words with scikit-learn: python -m pip install scikit-learn"
        ) from error
    vectorizer = text.CountVectorizer(token_pattern=WORD)
    counts = torch.as_tensor(vectorizer.fit_transform(documents).toarray())
    column = vectorizer.vocabulary_
    shown = tuple(sorted(column) if terms is None else terms)
    missing = [term for term in shown if term not in column]
    if missing:
        raise ValueError(f"terms: expected words of the documents, got {missing}")
    frequencies = counts.double() / counts.sum(1, keepdim=True)
    chosen = [int(column[term]) for term in shown]
    document_counts = (counts[:, chosen] > 0).sum(0)
    inverse = torch.log10(len(documents) / document_counts.double())
    return TermTable(
        shown, frequencies[:, chosen], document_counts, inverse, frequencies[:, chosen] * inverse
    )
