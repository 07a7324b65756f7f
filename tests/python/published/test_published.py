"""Published files: a table of what they say and of the right specification."""

import copy
from collections.abc import Mapping

import posembed as pe
import pytest
from published import gguf, huggingface, params
from published.row import Row

ROWS = [*huggingface.ROWS, *params.ROWS, *gguf.ROWS]


def outcomes(row: Row) -> list[tuple[object, object]]:
    """Pairs of what is read and what is right: for each kind of layer, and layer by layer.

    An error is read as its message; None where layers do not rotate.
    """
    says = copy.deepcopy(row.says)
    by_kind = row.right if isinstance(row.right, Mapping) else {None: row.right}
    pairs: list[tuple[object, object]] = []
    for kind, right in by_kind.items():
        try:
            found: object = pe.RotarySpec.from_huggingface(says, kind, **row.arguments)
        except ValueError as error:
            message = f"layer_type: layers of kind {kind!r} do not rotate"
            found = None if str(error) == message else str(error)
        pairs.append((found, right))
    only = next(iter(right for right in by_kind.values() if right is not None))
    length = len(row.layers) or count(says)
    if length is not None and "part" not in row.arguments:
        kinds = row.layers or ("all",) * length
        expected = [None if kind == "no" else by_kind.get(kind, only) for kind in kinds]
        try:
            pairs.append((pe.RotarySpec.for_layers(says, **row.arguments), expected))
        except ValueError as error:
            pairs.append((str(error), expected))
    assert says == row.says  # nothing is written into a caller's dict
    return pairs


def count(says: dict[str, object]) -> int | None:
    """The number of layers, where the file says it."""
    keys = ("num_hidden_layers", "n_layers", f"{says.get('general.architecture')}.block_count")
    return next((int(str(says[key])) for key in keys if key in says), None)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_files_say(row: Row) -> None:
    for found, right in outcomes(row):
        assert found == right


def test_the_table_is_large_and_names_its_sources() -> None:
    assert len(ROWS) >= 120
    assert len({str(row) for row in ROWS}) == len(ROWS)
    assert all(row.source for row in ROWS)
