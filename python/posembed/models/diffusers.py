"""Configurations of diffusers, which name their class: presets of rotations, and sinusoids."""

from __future__ import annotations

from typing import Any

import torch

from posembed.models.data import table
from posembed.models.fields import (
    Fields,
    check_effect,
    flag,
    real,
    reals,
    shown,
    text_of,
    whole,
    wholes,
)
from posembed.models.options import Options
from posembed.specification import RotarySpec, SinusoidalSpec


def is_configuration(fields: Fields) -> bool:
    """Whether a configuration is one of diffusers."""
    return "_class_name" in fields


def _check_no_options(options: Options) -> None:
    for name in ("layer_type", "part", "interleaved", "base"):
        why = "a configuration of diffusers states everything"
        check_effect(name, getattr(options, name), why)


def _need(fields: Fields, key: str) -> Any:
    value = fields.get(key)
    if value is None:
        name = shown(fields.get("_class_name"))
        raise ValueError(f"{key}: expected a value for {name}, got none")
    return value


def _row_of(fields: Fields) -> Fields:
    """What is known of a class."""
    name = text_of(fields.get("_class_name"))
    known: dict[str, Fields] = table("diffusers")["classes"]
    if name not in known:
        expected = shown(sorted(key for key, row in known.items() if "refused" not in row))
        raise ValueError(f"_class_name: expected one of {expected}, got {shown(name)}")
    return known[name]


def _head_dim_of(fields: Fields, row: Fields) -> int:
    if "head_dim" in row:
        key = row["head_dim"]
        return whole(key, _need(fields, key))
    total, count = row["quotient"]
    heads = whole(count, _need(fields, count))
    if heads <= 0:
        raise ValueError(f"{count}: expected a positive number, got {heads}")
    return whole(total, _need(fields, total)) // heads


def _refuse(name: str, preset: str) -> None:
    """Raises the error of a preset without a specification, which says what to do instead."""
    try:
        RotarySpec.from_preset(preset)
    except ValueError as error:
        raise ValueError(name + str(error).removeprefix(preset)) from None


def read(fields: Fields, options: Options) -> RotarySpec:
    """The specification of a configuration of diffusers.

    Raises:
        ValueError: The class is unknown, a key is missing, or an option is given, which has no
            effect.
    """
    _check_no_options(options)
    row = _row_of(fields)
    if "refused" in row:
        _refuse(fields["_class_name"], row["refused"])
    if "needs" in row and not _need(fields, row["needs"]):
        raise ValueError(f"{row['needs']}: is false, so the model does not rotate")
    head_dim = _head_dim_of(fields, row)
    stated = {name: _need(fields, row[name]) for name in ("axes", "base", "ntk") if name in row}
    text = torch.ops.posembed.rotary_preset.default(
        row["preset"],
        head_dim,
        wholes(row["axes"], stated["axes"]) if "axes" in stated else None,
        real(row["base"], stated["base"]) if "base" in stated else None,
        reals(row["ntk"], stated["ntk"]) if "ntk" in stated else None,
    )
    return RotarySpec.from_json(text)


def read_timesteps(fields: Fields) -> SinusoidalSpec:
    """See :meth:`posembed.SinusoidalSpec.from_huggingface`."""
    known: dict[str, Fields] = table("diffusers")["timesteps"]
    name = text_of(fields.get("_class_name"))
    if name not in known:
        raise ValueError(f"_class_name: expected one of {shown(sorted(known))}, got {shown(name)}")
    stated = {**known[name], **{key: fields[key] for key in known[name] if key in fields}}
    kind = stated.get("time_embedding_type", "positional")
    if kind != "positional":
        raise ValueError(f"time_embedding_type: expected 'positional', got {shown(kind)}")
    widths = wholes("block_out_channels", _need(fields, "block_out_channels"))
    if not widths:
        raise ValueError("block_out_channels: expected numbers, got none")
    return SinusoidalSpec(
        widths[0],
        preset="ddpm",
        cos_first=flag("flip_sin_to_cos", stated.get("flip_sin_to_cos", True)),
        shift=real("freq_shift", stated.get("freq_shift", 0)),
    )
