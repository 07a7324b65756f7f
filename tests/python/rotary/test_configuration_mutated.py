"""Configurations with values of other types, ranges and nesting: an error, or a sound specification."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Iterator
from typing import Any

import posembed as pe
import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")

KINDS = [
    "bloom",
    "cohere",
    "deepseek_v3",
    "falcon",
    "gemma3_text",
    "glm",
    "gpt_neox",
    "gptj",
    "llama",
    "llama4_text",
    "mpt",
    "phi3",
    "qwen2",
    "qwen2_vl",
    "roberta",
]
WORDS = ("alibi", "attn", "head", "hidden_size", "layer_type", "model_type", "partial", "position")
WORDS += ("rope", "rotary", "theta")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**63), 1e308, 1e-300, 0.5, -0.5),
    *(math.nan, math.inf, "", "x", "1", "default", "yarn", b"x"),
    *([], {}, [1], [[1]], {"a": 1}, (1, 2), object()),
)
# POSEMBED_MUTATIONS=2000 for more.
COUNT = int(os.environ.get("POSEMBED_MUTATIONS", "150"))


def paths(fields: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in fields.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def mutate(fields: dict[str, Any], draw: random.Random) -> None:
    """Changes or removes one value, mostly one that concerns positions."""
    every = list(paths(fields))
    near = [path for path in every if any(word in str(path) for word in WORDS)]
    *outer, key = draw.choice(near if draw.random() < 0.8 else every)
    for name in outer:
        fields = fields[name]
    if draw.random() < 0.15:
        del fields[key]
    else:
        fields[key] = draw.choice(VALUES)


def is_sound(spec: pe.RotarySpec) -> bool:
    frequencies = spec.frequencies()
    return 0 <= spec.rotary_dim <= spec.head_dim > 0 and bool(frequencies.isfinite().all())


def test_mutated_configurations() -> None:
    accepted = 0
    for seed in range(COUNT):
        draw = random.Random(seed)
        kind = draw.choice(KINDS)
        config = copy.deepcopy(transformers.CONFIG_MAPPING[kind]().to_dict())
        for _ in range(draw.choice((1, 1, 2))):
            mutate(config, draw)
        for read in (pe.RotarySpec.for_layers, pe.RotarySpec.from_huggingface):
            try:
                found = read(config)
            except (ValueError, TypeError):
                continue
            specs = found if isinstance(found, list) else [found]
            assert all(is_sound(spec) for spec in specs if spec is not None), seed
            accepted += 1
    assert 0.2 < accepted / (2 * COUNT) < 0.8


def test_errors_say_what_the_class_in_transformers_says() -> None:
    config = transformers.GPTNeoXConfig().to_dict()
    config["num_attention_heads"] = "x"
    message = "num_attention_heads: expected a number.*; its class in transformers says: .*'num_att"
    with pytest.raises(ValueError, match=message):
        pe.RotarySpec.from_huggingface(config)


@pytest.mark.parametrize("width", [1e-300, -0.5, 64.5, math.nan])
def test_widths_are_whole(width: float) -> None:
    config = {**transformers.GPTJConfig().to_dict(), "rotary_dim": width}
    with pytest.raises(ValueError, match=r"rotary_dim: expected a (whole )?number, got"):
        pe.RotarySpec.from_huggingface(config)
