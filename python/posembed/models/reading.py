"""Reads what a configuration of any form says about positions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
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
from posembed.score_scale import ScoreScale
from posembed.specification import MropeRule, RotarySpec, SinusoidalSpec

Specs = list[RotarySpec | None]


class Part(NamedTuple):
    """The configuration to read, and the keys that its class knows."""

    fields: Fields
    known: frozenset[str] = frozenset()


@functools.cache
def _known_keys(own: type) -> frozenset[str]:
    """The keys that a configuration class knows: its fields, other names, what it adds."""
    names = set(getattr(own, "attribute_map", {})) | set(getattr(own, "__dataclass_fields__", {}))
    names |= set(inspect.signature(own.__init__).parameters)  # type: ignore[misc]
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # of keys that the readers here accept or reject
    try:
        with contextlib.suppress(Exception):  # a class without defaults
            names |= set(own().to_dict())
    finally:
        logger.setLevel(level)
    return frozenset(names)


def _is_whole(fields: Fields) -> bool:
    """Whether a file has no parts, and all that its reader takes."""
    readers = (gguf.is_metadata, params.is_params, diffusers.is_configuration)
    return any(reads(fields) for reads in readers)


def _part_of(config: Any, fields: Fields, options: Options) -> Part:
    """The part that is asked for, with what its class adds to a file."""
    if _is_whole(fields):
        return Part(fields)
    part = options.part
    if part is None or parts.layer_part(part) == part:
        huggingface.check_supported(fields)
    own = parts.typed(fields, part)
    for layer in every_list_place(own):
        rope_parameters.of(layer)  # raises where the file contradicts itself
    if type(config).__module__.startswith("transformers."):  # its class has completed it
        found, kind = parts.of_object(config, part)
        chosen = Part(as_fields(found), _known_keys(kind) | catalogue.known(own))
    else:
        chosen = Part(catalogue.completed(own), catalogue.known(own))
    catalogue.check_kinds(chosen.fields)
    return chosen


def _check_options(fields: Fields, options: Options) -> None:
    """Rejects options that have no effect."""
    if gguf.is_metadata(fields):
        check_effect("part", options.part, "GGUF metadata has no parts")
    elif params.is_params(fields):
        check_effect("part", options.part, "params.json has no parts")
        why = "pairs of params.json are interleaved"
        check_effect("interleaved", options.interleaved, why)


def _opened(config: Any, options: Options) -> tuple[Fields, Part]:
    fields = as_fields(load(config))
    return fields, _part_of(config, fields, options)


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
    fields, part = _opened(config, stated)
    if diffusers.is_configuration(fields):
        spec = diffusers.read(fields, stated)
    elif gguf.is_metadata(fields):
        _check_options(fields, stated)
        spec = gguf.read(fields, stated)
    elif params.is_params(fields):
        _check_options(fields, stated)
        spec = params.read(fields, stated)
    else:
        spec = huggingface.read(part.fields, stated, part.known)
    spec = copy.copy(_with_scale(spec, part.fields, stated.layer_type))
    own = fields if _is_whole(fields) else parts.typed(fields, stated.part)
    # What the class adds is no length that the model was trained on.
    object.__setattr__(spec, "max_positions", sizes.of(own).max_positions)
    return spec


def sizes_of(config: Any, part: str | None = None) -> sizes.Sizes:
    """Heads and the longest sequence; none of a part of a layer, which has heads of its own."""
    if parts.layer_part(part) is not None:
        return sizes.Sizes()
    return sizes.of(_opened(config, Options(part=part))[1].fields)


def _with_scale(spec: RotarySpec, fields: Fields, kind: str | None) -> RotarySpec:
    scale = score_scale.of_layer(fields, spec, kind)
    return spec if scale is None else dataclasses.replace(spec, score_scale=scale)


def rotary_layers(config: Any, **options: Any) -> Specs:
    """See :meth:`posembed.RotarySpec.for_layers`."""
    return [layer.rotary for layer in layers(config, **options)]


def _layers(config: Any, stated: Options) -> tuple[Part, Specs]:
    fields, part = _opened(config, stated)
    if diffusers.is_configuration(fields):
        raise ValueError(
            "config: a model of diffusers rotates alike in all layers: use from_huggingface"
        )
    _check_options(fields, stated)
    if gguf.is_metadata(fields):
        specs = gguf.read_layers(fields, stated)
    elif params.is_params(fields):
        specs = params.read_layers(fields, stated)
    else:
        specs = huggingface.read_layers(part.fields, stated, part.known)
    scaled: dict[tuple[int, str | None], RotarySpec] = {}
    for place, spec in enumerate(specs):
        if spec is not None:
            key = (id(spec), huggingface.kind_of(part.fields, place))
            if key not in scaled:
                scaled[key] = _with_scale(spec, part.fields, key[1])
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
    kinds = _kinds_of(part.fields, stated, len(specs))
    scales = [
        score_scale.without_rotation(part.fields, huggingface.kind_of(part.fields, place))
        if spec is None
        else spec.score_scale
        for place, spec in enumerate(specs)
    ]
    return list(map(LayerPositions, kinds, specs, scales))


def _kinds_of(fields: Fields, stated: Options, count: int) -> list[str | None]:
    """The kind of each layer."""
    if gguf.is_metadata(fields):
        return gguf.kinds_of_layers(fields, stated)
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
