"""One document of all that a program has to know about a model's positions.

docs/reference/positions.schema.json describes it. C++ reads it (csrc/models), and any other program
can: golden numbers tell it whether it computes the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from posembed.glue.other_names import check_options
from posembed.models import (
    alibi,
    catalogue,
    diffusers,
    gguf,
    input_layer,
    mrope,
    params,
    parts,
    reading,
)
from posembed.models.fields import Fields, as_fields, text_of
from posembed.models.files import load, read_once
from posembed.models.options import Facts
from posembed.specifications import RotarySpec

FORMAT = "posembed.positions"
# A reader refuses documents of a newer version; what is added without changing the rest keeps it.
VERSION = 1


class _Shared:
    """Values that layers share: each is written once, and layers have its index."""

    def __init__(self, written: Callable[[Any], Fields]) -> None:
        self._written = written
        self._found: dict[str, int] = {}
        self.values: list[Fields] = []

    def index(self, value: Any) -> int | None:
        """The index of a value; None for none."""
        if value is None:
            return None
        written = self._written(value)
        text = json.dumps(written, sort_keys=True)
        if text not in self._found:
            self._found[text] = len(self.values)
            self.values.append(written)
        return self._found[text]


def _rotation(spec: RotarySpec) -> Fields:
    """A specification, with the numbers by which a program can check its own."""
    alone = dataclasses.replace(spec, score_scale=None)
    source = {"source": spec.source} if spec.source else {}
    return {
        **source,
        "specification": json.loads(alone.to_json()),
        "frequencies": alone.frequencies().tolist(),
        "attention_factor": alone.attention_factor,
    }


def _described(config: Any, **options: Any) -> Fields:
    """The layers of a model, or of a part, and the rotation of all of them."""
    rotations, scales = _Shared(_rotation), _Shared(dataclasses.asdict)
    layers: list[Fields] | None = None
    every: Fields = {"rotary": None, "score_scale": None}
    refusals = []
    try:
        layers = [
            {
                "kind": layer.kind,
                "rotary": rotations.index(layer.rotary),
                "score_scale": scales.index(layer.score_scale),
            }
            for layer in reading.layers(config, **options)
        ]
    except ValueError as error:
        refusals.append(str(error))
    try:
        spec = reading.rotary(config, **options)
        if spec.rotary_dim:
            scale = scales.index(spec.score_scale)
            every = {"rotary": rotations.index(spec), "score_scale": scale}
    except ValueError as error:
        refusals.append(str(error))
    if len(refusals) == 2:
        return {"refused": refusals[1]}
    return {"rotations": rotations.values, "score_scales": scales.values, "layers": layers, **every}


def _alibi(config: Any, fields: Fields) -> Fields | None:
    if not alibi.is_used(fields):
        return None
    preset = reading.alibi_preset(config)
    return {"preset": preset.name, "num_heads": preset.num_heads, "options": preset.options}


def _input(config: Any, fields: Fields) -> Fields | None:
    """The input layer of a folder with tensors."""
    is_folder = isinstance(config, (str, os.PathLike)) and Path(config).is_dir()
    if not is_folder or input_layer.family_of(fields) is None:
        return None
    has_tensors = any(Path(config, name).is_file() for name in input_layer.TENSORS)
    return input_layer.read(fields, str(input_layer.tensors_of(config))) if has_tensors else None


def names_of_parts(fields: Fields) -> list[str]:
    """The names of nested configurations, except the text model, and of parts of layers."""
    if gguf.is_metadata(fields) or params.is_params(fields) or diffusers.is_configuration(fields):
        return []
    whole = catalogue.with_parts(fields)
    text = ".".join(parts.path_of(whole, None))
    own = catalogue.of(parts.typed(fields, None)).get("layer_parts", {})
    return [name for name in _nested(whole) if name != text] + sorted(own)


def _nested(fields: Fields, before: str = "") -> list[str]:
    found = []
    for name in parts.names_of_parts(fields):
        part = fields[name]
        if isinstance(part, dict) and "model_type" in part:
            found += [before + name, *_nested(catalogue.with_parts(part), f"{before}{name}.")]
    return found


def for_part(name: str, options: Fields) -> Fields:
    """The caller's options that concern a part: its pairing, and a tower's base, are its own."""
    own = ("interleaved",) if parts.layer_part(name) else ("interleaved", "base")
    return {key: value for key, value in options.items() if key not in own}


def describe(config: Any, **facts: Unpack[Facts]) -> dict[str, Any]:
    """All that a program needs to know about a model's positions, as a JSON object.

    ``python -m posembed describe MODEL > positions.json`` writes it, and C++ programs read it
    (``posembed::ModelPositions``). docs/reference/positions.schema.json describes its members:
    rotations and scales of scores, each once, with golden numbers; which of them each layer has;
    the same for parts such as "vision_config" and "indexer"; ALiBi; the rule of M-RoPE; and, for a
    folder with safetensors, options and tensors of the input layer. A part that is refused has the
    reason instead.

    Args:
        config: As in :meth:`posembed.RotarySpec.from_huggingface`.
        **facts: ``interleaved``, ``base``, ``ignore``, ``read_module`` and ``trust_remote_code``,
            as there.

    Raises:
        ValueError: Nothing about the model's positions can be read; the message is that of
            :meth:`posembed.RotarySpec.from_huggingface`.
        TypeError: ``config`` is of another type.

    Examples:
        >>> import posembed as pe
        >>> found = pe.describe({"model_type": "gemma3_text", "num_hidden_layers": 6})
        >>> [layer["rotary"] for layer in found["layers"]]
        [0, 0, 0, 0, 0, 1]
        >>> [rotation["specification"]["base"] for rotation in found["rotations"]]
        [10000.0, 1000000.0]
    """
    loaded = load(config)
    fields = as_fields(loaded)
    check_options("describe", facts, Facts.__annotations__)
    source = read_once(config, loaded, facts.get("trust_remote_code", False))
    options: Fields = {**facts, "ignore": tuple(facts.get("ignore", ()))}
    whole = _described(source, **options)
    biases, input_ = _alibi(source, fields), _input(config, fields)
    described = {
        name: _described(source, part=name, **for_part(name, options))
        for name in names_of_parts(fields)
    }
    known = biases or input_ or any("refused" not in part for part in described.values())
    if "refused" in whole and not known:
        raise ValueError(whole["refused"])
    rule = reading.mrope_rule(source) if mrope.has_rule(fields) else None
    model = text_of(fields.get("general.architecture") or fields.get("model_type"))
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model or text_of(fields.get("_class_name")),
        **whole,
        "parts": described,
        "alibi": biases,
        "mrope": json.loads(rule.to_json()) if rule else None,
        "input": input_,
    }
