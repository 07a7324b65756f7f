"""Files with a value of another type, range or nesting: an error that names it, or a sound answer.

Files are those of the tables of published ones, of vLLM's families, and the default configuration
of every model type.
"""

import copy
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import posembed as pe
import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")

from published import gguf, huggingface, params, vllm  # noqa: E402
from support.transformers_models import COMPLETED  # noqa: E402

Fields = dict[str, Any]
TYPES = sorted(transformers.CONFIG_MAPPING)
FILES: list[tuple[Fields, Fields]] = [
    *((row.says, row.arguments) for row in (*huggingface.ROWS, *params.ROWS, *gguf.ROWS)),
    *(({"model_type": kind, **fields}, {}) for kind, fields, _ in vllm.FAMILIES),
]

WORDS = ("alibi", "attn", "head", "hidden_size", "layer_type", "model_type", "partial", "position")
WORDS += ("rope", "rotary", "theta")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**63), 1e308, 1e-300, 0.5, -0.5),
    *(math.nan, math.inf, "", "x", "1", "default", "yarn", b"x"),
    *([], {}, [1], [[1]], {"a": 1}, (1, 2), object()),
)
# What these keys become in a specification, whose checks name it.
BECOMES = {
    "architecture": "model_type",
    "beta_slow": "beta_fast",
    "freq_base": "scaling",
    "head_dim": "rotary_dim",
    "hidden_size": "head_dim rotary_dim sections",
    "key_length": "head_dim rotary_dim",
    "kv_channels": "head_dim rotary_dim",
    "n_heads": "model_type",  # which is how params.json is known
    "num_attention_heads": "head_dim rotary_dim sections",
    "original_max_position_embeddings": "original_max_positions",
    "original_rope": "interleaved",
    "rope_scaling": "original_max_position_embeddings",
    "rope_theta": "scaling",
    "rotary_emb_base": "rope_theta scaling",
    "rotary_pct": "partial_rotary_factor rotary_dim",
}
# Keys by which params.json is known.
IDENTIFYING = {"dim", "n_heads"}
# POSEMBED_MUTATIONS=2000 for more.
COUNT = int(os.environ.get("POSEMBED_MUTATIONS", "150"))


def paths(fields: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in fields.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def mutate(fields: dict[str, Any], draw: random.Random) -> tuple[str, ...]:
    """Changes or removes one value, mostly one that concerns positions; the path of its key."""
    every = list(paths(fields))
    near = [path for path in every if any(word in str(path) for word in WORDS)]
    *outer, key = draw.choice(near if draw.random() < 0.8 else every)
    for name in outer:
        fields = fields[name]
    if draw.random() < 0.15:
        del fields[key]
    else:
        fields[key] = draw.choice(VALUES)
    return (*outer, key)


def is_sound(spec: pe.RotarySpec) -> bool:
    frequencies = spec.frequencies()
    return 0 <= spec.rotary_dim <= spec.head_dim > 0 and bool(frequencies.isfinite().all())


def drawn(draw: random.Random) -> tuple[Fields, Fields]:
    """A file that is read, and what its reader is told beside it."""
    while True:
        if draw.random() < 0.5:
            fields, arguments = draw.choice(FILES)
        else:
            kind, arguments = draw.choice(TYPES), {}
            try:
                fields = transformers.CONFIG_MAPPING[kind](**COMPLETED.get(kind, {})).to_dict()
            except Exception:  # a class without defaults
                continue
        fields = copy.deepcopy(fields)
        if not isinstance(outcome(fields, arguments), str):
            return fields, arguments


def outcome(fields: Fields, arguments: Fields) -> list[pe.RotarySpec | None] | str:
    """The specification of each layer, or the error's message."""
    try:
        return pe.RotarySpec.for_layers(copy.deepcopy(fields), **arguments)
    except (ValueError, TypeError) as error:
        return str(error)


def without(fields: Fields, path: tuple[str, ...]) -> Fields:
    fields = copy.deepcopy(fields)
    *outer, key = path
    inner = fields
    for name in outer:
        inner = inner[name]
    inner.pop(key, None)
    return fields


def test_mutated_files() -> None:
    accepted = 0
    for seed in range(COUNT):
        draw = random.Random(seed)
        fields, arguments = drawn(draw)
        before, original = outcome(fields, arguments), copy.deepcopy(fields)
        path = mutate(fields, draw)
        found = outcome(fields, arguments)
        if isinstance(found, str):
            assert names(found, path), (seed, path, found)
            continue
        accepted += 1
        assert all(is_sound(spec) for spec in found if spec is not None), (seed, path)
        if found == before and not_said_before(fields, path, original):  # it does not matter
            assert outcome(without(fields, path), arguments) == before, (seed, path)
    assert 0.2 < accepted / COUNT < 0.8


def names(message: str, path: tuple[str, ...]) -> bool:
    """Whether a message has the key, what it becomes, or one of the blocks that it stands in."""
    parts = [part.rsplit(".", 1)[-1] for part in path]
    words = [*parts, *(word for part in parts for word in BECOMES.get(part, "").split())]
    return any(word in message for word in words)


def value_at(fields: Fields, path: tuple[str, ...]) -> Any:
    for key in path:
        fields = fields.get(key, {})
    return fields


def not_said_before(fields: Fields, path: tuple[str, ...], original: Fields) -> bool:
    """Whether a file has a new value, except where the key's presence says whose file it is."""
    return path[-1] not in IDENTIFYING and value_at(fields, path) != value_at(original, path)


@pytest.mark.parametrize("width", [1e-300, -0.5, 64.5, math.nan])
def test_widths_are_whole(width: float) -> None:
    config = {**transformers.GPTJConfig().to_dict(), "rotary_dim": width}
    with pytest.raises(ValueError, match=r"rotary_dim: expected a (whole )?number, got"):
        pe.RotarySpec.from_huggingface(config)
