"""Published files: a table of what they say and of the right specification."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import posembed as pe
import pytest
from posembed.configuration import completion
from published import gguf, huggingface, params
from published.row import SLIDING, Row

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
    pytest.importorskip("transformers", minversion="5.0")
    for found, right in outcomes(row):
        assert found == right


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_without_transformers(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, or an error: something is missing that the model's configuration class adds."""
    monkeypatch.setattr(completion, "class_of", lambda model_type: None)
    refusals = ("missing", "not understood", "layer_type: expected")
    for found, right in outcomes(row):
        if isinstance(found, str):
            assert any(refusal in found for refusal in refusals)
        else:
            assert found == right


def test_the_table_is_large_and_names_its_sources() -> None:
    assert len(ROWS) >= 120
    assert len({str(row) for row in ROWS}) == len(ROWS)
    assert all(row.source for row in ROWS)


def minimal(architecture: str, sections: tuple[int, ...] = ()) -> dict[str, object]:
    """The least metadata of a GGUF file that says how it rotates: heads of 16 components."""
    says: dict[str, object] = {"embedding_length": 64, "attention.head_count": 4}
    says |= {"rope.dimension_count": 16, "rope.freq_base": 1e4, "block_count": 4}
    if sections:
        says["rope.dimension_sections"] = list(sections)
    fields = {f"{architecture}.{key}": value for key, value in says.items()}
    return {"general.architecture": architecture, **fields}


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [(kind, name) for kind, names in gguf.TYPES.items() for name in names.split()],
)
def test_llama_cpp_pairs_alike(kind: str, architecture: str) -> None:
    says = minimal(architecture, (3, 3, 2, 0) if "MROPE" in kind else ())
    if kind == "NONE" or architecture in gguf.UNKNOWN.split():
        with pytest.raises(ValueError, match=f"'{architecture}' is not known: pass interleaved="):
            pe.RotarySpec.from_huggingface(says)
        return
    spec = pe.RotarySpec.from_huggingface(
        says, SLIDING if architecture in ("gemma3", "gemma3n") else None
    )
    assert spec.interleaved == (kind == "NORM")
    axes = {"MROPE": (0, 0, 0, 1, 1, 1, 2, 2), "IMROPE": (0, 1, 2, 0, 1, 2, 0, 1)}
    assert (spec.sections.axis_of_pair if spec.sections else None) == axes.get(kind)
