"""Configurations of diffusers, which name their class: presets of rotations, and sinusoids."""

from __future__ import annotations

from typing import Any

import torch

from posembed.models.data import table
from posembed.models.fields import (
    Fields,
    flag,
    positive,
    real,
    reals,
    shown,
    text_of,
    whole,
    wholes,
)
from posembed.models.options import Options
from posembed.specifications import RotarySpec, SinusoidalSpec

WITHOUT_EFFECT = dict.fromkeys(
    ("layer_type", "part", "interleaved", "base"), "a configuration of diffusers states everything"
)


def is_configuration(fields: Fields) -> bool:
    """Whether a configuration is one of diffusers."""
    return "_class_name" in fields


def _need(fields: Fields, key: str) -> Any:
    value = fields.get(key)
    if value is None:
        name = shown(fields.get("_class_name"))
        raise ValueError(f"{key}: expected a value for {name}, got none")
    return value


def _row_of(fields: Fields, rows: str) -> Fields:
    """What is known of a class."""
    name = text_of(fields.get("_class_name"))
    known: dict[str, Fields] = table("diffusers")[rows]
    if name not in known:
        expected = shown(sorted(key for key, row in known.items() if "refused" not in row))
        raise ValueError(f"_class_name: expected one of {expected}, got {shown(name)}")
    return known[name]


def _head_dim_of(fields: Fields, row: Fields) -> int:
    if "head_dim" in row:
        key = row["head_dim"]
        return whole(key, _need(fields, key))
    total, count = row["quotient"]
    heads = positive(count, _need(fields, count))
    return whole(total, _need(fields, total)) // heads


def read(fields: Fields, options: Options) -> RotarySpec:
    """The specification of a configuration of diffusers.

    An unknown class, a missing key or an option, which has no effect, is a ValueError.
    """
    row = _row_of(fields, "classes")
    if "refused" in row:  # its preset says what to do instead
        try:
            RotarySpec.from_preset(row["refused"])
        except ValueError as error:
            why = str(error).removeprefix(row["refused"])
            raise ValueError(fields["_class_name"] + why) from None
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
    known = _row_of(fields, "timesteps")
    stated = {**known, **{key: fields[key] for key in known if key in fields}}
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
