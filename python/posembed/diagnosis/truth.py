"""The right rotation: posembed's own reading of a model, and where it comes from."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from posembed.models import catalogue, diffusers, gguf, params, parts, reading
from posembed.models.data import table
from posembed.models.fields import Fields, as_fields, shown, text_of
from posembed.models.files import load
from posembed.scaling import XPosScaling
from posembed.specification import RotarySpec


@dataclasses.dataclass(frozen=True)
class Truth:
    """A specification, its source, and the other kinds of layers of its model."""

    spec: RotarySpec
    source: str
    others: dict[str, RotarySpec] = dataclasses.field(default_factory=dict)
    heads: int = 2


def source_of(fields: Fields, part: str | None) -> str:
    """What posembed's knowledge of this model was made from."""
    if gguf.is_metadata(fields):
        return f"the metadata of GGUF architecture {shown(fields.get('general.architecture'))}"
    if params.is_params(fields):
        return "params.json, as Meta's and Mistral's code reads it"
    if diffusers.is_configuration(fields):
        version = table("diffusers")["source"]["diffusers"]
        return f"{text_of(fields.get('_class_name'))} of diffusers {version}"
    kind = text_of(parts.typed(fields, part).get("model_type"))
    made = table("catalogue")["source"]
    sources = catalogue.of_type(kind).get("source") or [f"{made['library']} {made['version']}"]
    return f"model_type {shown(kind)} as in {'; '.join(sources)}"


def kinds_of(config: Any, **options: Any) -> dict[str, RotarySpec]:
    """The specification of each kind of layers that rotates, by name; "" if all are alike."""
    try:
        spec = reading.rotary(config, **options)
        return {"": spec} if spec.rotary_dim else {}
    except ValueError as error:
        if not str(error).startswith("layer_type: "):
            raise
        length = reading.sizes_of(config, options.get("part")).max_positions
        found: dict[str, RotarySpec] = {}
        for layer in reading.layers(config, **options):
            name = str(layer.kind)
            if layer.rotary is not None and found.setdefault(name, layer.rotary) != layer.rotary:
                raise error from None
        for spec in found.values():
            object.__setattr__(spec, "max_positions", length)
        return found


def _of_layer(config: Any, layer: int, options: Fields) -> RotarySpec:
    """The specification of one layer."""
    layers = reading.layers(config, **options)
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer: expected 0 to {len(layers) - 1}, got {layer}")
    spec = layers[layer].rotary
    if spec is None:
        raise ValueError(f"layer: layer {layer} does not rotate")
    length = reading.sizes_of(config, options.get("part")).max_positions
    object.__setattr__(spec, "max_positions", length)
    return spec


def truth_of(config: Any, layer_type: str | None, layer: int | None, **options: Any) -> Truth:
    """Reads what a model's layers do, with the arguments of :func:`posembed.diagnose`."""
    if layer is not None and layer_type is not None:
        raise ValueError("layer: expected none beside layer_type")
    if isinstance(config, RotarySpec):
        given = {"layer_type": layer_type, "layer": layer, **options}
        for name, value in given.items():
            if value not in (None, ()):
                raise ValueError(f"{name}: expected none beside a RotarySpec, got {value!r}")
        found = Truth(config, f"the RotarySpec given: {config.describe()}")
    else:
        loaded = load(config)
        source = config if hasattr(config, "to_dict") else loaded
        if layer is not None:
            spec = _of_layer(source, layer, options)
        else:
            spec = reading.rotary(source, layer_type=layer_type, **options)
        found = _with_neighbours(spec, source, as_fields(loaded), options)
        if isinstance(config, (str, os.PathLike)):
            found = dataclasses.replace(found, source=f"{os.fspath(config)}: {found.source}")
    if not found.spec.rotary_dim:
        raise ValueError("config: the model does not rotate")
    if isinstance(found.spec.scaling, XPosScaling):
        raise ValueError("config: xPos is not diagnosed: it rotates query and key differently")
    return found


def _with_neighbours(spec: RotarySpec, config: Any, fields: Fields, options: Fields) -> Truth:
    part = options.get("part")
    heads = reading.sizes_of(config, part).heads
    others: dict[str, RotarySpec] = {}
    try:
        for layer in reading.layers(config, **options):
            if layer.rotary is not None and layer.rotary != spec:
                others.setdefault(str(layer.kind), layer.rotary)
    except ValueError:  # the configuration does not list its layers
        pass
    source = f"{source_of(fields, part)}: head_dim {spec.describe()}"
    usable = {k: v for k, v in others.items() if v.head_dim == spec.head_dim and v.rotary_dim}
    return Truth(spec, source, usable, heads or 2)
