"""Configuration files as published: the keys that concern positions, and what they mean.

tests/shared/genuine_configurations.json has them, each with its source. "reads": for the text model
and parts, the specification without the fields that have their defaults, or the refusal's beginning;
where layers differ, the rotations and each layer's.
"""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import posembed as pe
import pytest

ROWS = json.loads((Path(__file__).parents[2] / "shared/genuine_configurations.json").read_text(encoding="utf-8"))
READS = [(row, read) for row in ROWS for read in row["reads"]]


def name(value: Any) -> str:
    return str(value.get("file", value.get("part")))


def specification(fields: dict[str, Any]) -> pe.RotarySpec:
    return pe.RotarySpec.from_json(json.dumps(fields))


@pytest.mark.parametrize(("row", "read"), READS, ids=name)
def test_genuine_files(row: dict[str, Any], read: dict[str, Any]) -> None:
    says, part = copy.deepcopy(row["says"]), read["part"]
    if read["rotation"] is not None:
        expected = specification(read["rotation"])
        assert pe.RotarySpec.from_huggingface(says, part=part) == expected
    else:
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (the message is compared below)
            pe.RotarySpec.from_huggingface(says, part=part)
        assert str(raised.value).startswith(read["refused"])
    if "layers" in read:
        specs = [specification(fields) for fields in read["rotations"]]
        expected_layers = [None if place is None else specs[place] for place in read["layers"]]
        assert pe.RotarySpec.for_layers(says, part=part) == expected_layers


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_their_own_classes_say_the_same(row: dict[str, Any]) -> None:
    """The file as an object of transformers, where it has the class."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    says = copy.deepcopy(row["says"])
    if says.get("model_type") not in transformers.CONFIG_MAPPING:
        pytest.skip("a model of its own repository")
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.CONFIG_MAPPING[says["model_type"]](**says)
    for read in row["reads"]:
        if read["rotation"] is not None:
            found = pe.RotarySpec.from_huggingface(config, part=read["part"])
            assert found == specification(read["rotation"])


def test_the_table_is_large_and_names_its_sources() -> None:
    assert len(ROWS) == 66
    assert len({row["source"] for row in ROWS}) == 66
    assert sum(read["rotation"] is not None for _, read in READS) > 60
