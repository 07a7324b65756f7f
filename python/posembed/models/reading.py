"""Reads what a configuration of any form says about positions."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

from posembed.models import (
    alibi,
    catalogue,
    diffusers,
    gguf,
    huggingface,
    mrope,
    params,
    parts,
    rope_parameters,
    score_scale,
    sizes,
)
from posembed.models.fields import Fields, NoRuleError, as_fields, check_effect, same, shown
from posembed.models.files import load
from posembed.models.layers import check_type, every_layer, every_list_place
from posembed.models.options import Options
from posembed.specifications import MropeRule, RotarySpec, SinusoidalSpec
from posembed.specifications.score_scale import ScoreScale

Specs = list[RotarySpec | None]


def _reader_of(fields: Fields) -> Any:
    """The module that reads such a file. Those beside huggingface read files without parts."""
    if gguf.is_metadata(fields):
        return gguf
    if diffusers.is_configuration(fields):  # names its class, whatever keys the class has
        return diffusers
    return params if params.is_params(fields) else huggingface


def _part_of(fields: Fields, part: str | None) -> Fields:
    """The part that is asked for, with what its class adds to a file."""
    if _reader_of(fields) is not huggingface:
        return fields
    if part is None or parts.layer_part(part) == part:
        huggingface.check_supported(fields)
    own = parts.typed(fields, part)
    for layer in every_list_place(own):
        rope_parameters.of(layer)  # raises where the file contradicts itself
    own = catalogue.completed(own)
    catalogue.check_kinds(own)
    return own


def _opened(config: Any, part: str | None) -> tuple[Fields, Fields]:
    """The whole configuration, and the part to read."""
    fields = as_fields(load(config))
    return fields, _part_of(fields, part)


def rotary(config: Any, layer_type: str | None = None, **options: Any) -> RotarySpec:
    """See :meth:`posembed.RotarySpec.from_huggingface`."""
    stated = Options(layer_type, **options)
    try:
        return _by_rules(config, stated)
    except NoRuleError as error:
        found = _off_module(config, stated, error)
    if layer_type is not None:
        check_type([str(layer.kind) for layer in found], layer_type)
        found = [layer for layer in found if layer.kind == layer_type]
    kinds = sorted({str(layer.kind) for layer in found if layer.rotary is not None})
    specs = list(dict.fromkeys(layer.rotary for layer in found if layer.rotary is not None))
    if len(specs) == 1:
        return specs[0]
    why = f"expected one of {kinds}, got {shown(layer_type)}" if specs else "none of them rotates"
    raise ValueError(f"layer_type: {why}; RotarySpec.for_layers reads all layers")


def _off_module(config: Any, stated: Options, error: NoRuleError) -> list[LayerPositions]:
    """What each layer computes, where there is no rule, if the caller allows it."""
    if not stated.read_module or parts.layer_part(stated.part) is not None:
        raise ValueError(str(error)) from None
    from posembed.models import module

    check_effect("base", stated.base, "the module is read")
    found = module.read(config, load(config), stated.part, stated.trust_remote_code)
    for layer in found:
        if layer.rotary is not None:
            same("interleaved", (stated.interleaved, layer.rotary.interleaved))
    return found


def _by_rules(config: Any, stated: Options) -> RotarySpec:
    fields, part = _opened(config, stated.part)
    reader = _reader_of(fields)
    stated.check_effect(reader.WITHOUT_EFFECT)
    spec = copy.copy(_with_scale(reader.read(part, stated), part, stated.layer_type))
    own = parts.typed(fields, stated.part) if reader is huggingface else fields
    # What the class adds is no length that the model was trained on.
    object.__setattr__(spec, "max_positions", sizes.of(own).max_positions)
    return spec


def sizes_of(config: Any, part: str | None = None) -> sizes.Sizes:
    """Heads and the longest sequence; none of a part of a layer, which has heads of its own."""
    if parts.layer_part(part) is not None:
        return sizes.Sizes()
    return sizes.of(_opened(config, part)[1])


def _with_scale(spec: RotarySpec, fields: Fields, kind: str | None) -> RotarySpec:
    scale = score_scale.of_layer(fields, spec, kind)
    return spec if scale is None else dataclasses.replace(spec, score_scale=scale)


def rotary_layers(config: Any, **options: Any) -> Specs:
    """See :meth:`posembed.RotarySpec.for_layers`."""
    return [layer.rotary for layer in layers(config, **options)]


def _layers(config: Any, stated: Options) -> tuple[Fields, Specs]:
    fields, part = _opened(config, stated.part)
    reader = _reader_of(fields)
    if reader is diffusers:
        raise ValueError(
            "config: a model of diffusers rotates alike in all layers: use from_huggingface"
        )
    stated.check_effect(reader.WITHOUT_EFFECT)
    specs: Specs = reader.read_layers(part, stated)
    scaled: dict[tuple[int, str | None], RotarySpec] = {}
    for place, spec in enumerate(specs):
        if spec is not None:
            key = (id(spec), huggingface.kind_of(part, place))
            if key not in scaled:
                scaled[key] = _with_scale(spec, part, key[1])
            specs[place] = scaled[key]
    return part, specs


def score_scales(config: Any, **options: Any) -> list[ScoreScale | None]:
    """See :meth:`posembed.ScoreScale.for_layers`."""
    return [layer.score_scale for layer in layers(config, **options)]


class LayerPositions(NamedTuple):
    """What a layer does with positions."""

    kind: str | None
    rotary: RotarySpec | None  # None: it does not rotate
    score_scale: ScoreScale | None  # None: 1


def layers(config: Any, **options: Any) -> list[LayerPositions]:
    """The layers of a model, or of a part."""
    stated = Options(**options)
    try:
        part, specs = _layers(config, stated)
    except NoRuleError as error:
        return _off_module(config, stated, error)
    kinds = _kinds_of(part, len(specs))
    scales = [
        score_scale.without_rotation(part, huggingface.kind_of(part, place))
        if spec is None
        else spec.score_scale
        for place, spec in enumerate(specs)
    ]
    return list(map(LayerPositions, kinds, specs, scales))


def _kinds_of(fields: Fields, count: int) -> list[str | None]:
    """The kind of each layer."""
    if gguf.is_metadata(fields):
        return gguf.kinds_of_layers(fields)
    if params.is_params(fields):
        return [None] * count
    return [layer.kind for layer in every_layer(fields)]


def sinusoidal(config: Any) -> SinusoidalSpec:
    """See :meth:`posembed.SinusoidalSpec.from_huggingface`."""
    return diffusers.read_timesteps(as_fields(load(config)))


def mrope_rule(config: Any) -> MropeRule:
    """See :meth:`posembed.MropeRule.from_huggingface`."""
    return mrope.read(as_fields(load(config)))


def alibi_preset(config: Any) -> alibi.Preset:
    """See :meth:`posembed.ALiBi.from_config`."""
    return alibi.read(as_fields(load(config)))
