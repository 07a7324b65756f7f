"""The right rotation: posembed's own reading of a model, and where it comes from."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from posembed.models import catalogue, diffusers, gguf, params, parts, reading
from posembed.models.data import table
from posembed.models.fields import Fields, as_fields, shown, text_of
from posembed.models.files import load, read_once
from posembed.specifications import RotarySpec
from posembed.specifications.scaling import XPosScaling


@dataclasses.dataclass(frozen=True)
class Truth:
    """A specification, its source, and the other kinds of layers of its model."""

    spec: RotarySpec
    source: str
    others: dict[str, RotarySpec] = dataclasses.field(default_factory=dict)
    heads: int = 2
    longest: int | None = None


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
        found: dict[str, RotarySpec] = {}
        for layer in reading.layers(config, **options):
            name = str(layer.kind)
            if layer.rotary is not None and found.setdefault(name, layer.rotary) != layer.rotary:
                raise error from None
        return found


def _chosen(config: Any, layer: int | None, layer_type: str | None, options: Fields) -> Truth:
    """What layers of one kind do, or one layer; the source is added later."""
    layers = []
    try:
        layers = reading.layers(config, **options)
    except ValueError:  # the configuration does not list its layers
        if layer is not None:
            raise
    if layer is None:
        spec = reading.rotary(config, layer_type=layer_type, **options)
    elif 0 <= layer < len(layers):
        own = layers[layer].rotary
        if own is None:
            raise ValueError(f"layer: layer {layer} does not rotate")
        spec = own
    else:
        raise ValueError(f"layer: expected 0 to {len(layers) - 1}, got {layer}")
    others = {str(each.kind): each.rotary for each in layers if each.rotary not in (None, spec)}
    alike = {k: v for k, v in others.items() if v is not None and v.head_dim == spec.head_dim}
    stated = reading.sizes_of(config, options.get("part"))
    return Truth(spec, "", alike, stated.heads or 2, stated.max_positions)


def truth_of(config: Any, layer_type: str | None, layer: int | None, **options: Any) -> Truth:
    """Reads what a model's layers do, with the arguments of :func:`posembed.diagnose`."""
    if layer is not None and layer_type is not None:
        raise ValueError("layer: expected none beside layer_type")
    if isinstance(config, RotarySpec):
        for name, value in {"layer_type": layer_type, "layer": layer, **options}.items():
            if value not in (None, (), False):
                raise ValueError(f"{name}: expected none beside a RotarySpec, got {value!r}")
        source = f"the RotarySpec given: {config.describe()}"
        found = Truth(config, source, longest=config.max_positions)
    else:
        loaded = load(config)
        source = source_of(as_fields(loaded), options.get("part"))
        if isinstance(config, (str, os.PathLike)):
            source = f"{os.fspath(config)}: {source}"
        given = read_once(config, loaded, options.get("trust_remote_code", False))
        found = _chosen(given, layer, layer_type, options)
        source = f"{found.spec.source or source}: head_dim {found.spec.describe()}"
        found = dataclasses.replace(found, source=source)
    if not found.spec.rotary_dim:
        raise ValueError("config: the model does not rotate")
    if isinstance(found.spec.scaling, XPosScaling):
        raise ValueError("config: xPos is not diagnosed: it rotates query and key differently")
    return found
