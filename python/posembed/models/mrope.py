"""Rules of positions from a model's configuration: the rule of its type, with its own numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from posembed import positions
from posembed.glue.validation import one_of
from posembed.models import catalogue
from posembed.models.fields import Fields, check_number, real, text_of, whole
from posembed.specifications import MropeRule

# MiniCPM-V's markers, in the order of the rule's canvas.
CANVAS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


def _block(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _first(fields: Fields, *keys: str) -> tuple[str, Any]:
    """The first of several keys that the configuration has, and its number."""
    for key in keys:
        if fields.get(key) is not None:
            check_number(key, fields[key])
            return key, fields[key]
    return keys[0], None


def _whole_or(fields: Fields, otherwise: Any, *keys: str) -> Any:
    """The number of the first of several keys, or ``otherwise``."""
    key, value = _first(fields, *keys)
    return otherwise if value is None else whole(key, value)


def _ids(fields: Fields, rule: MropeRule) -> dict[str, Any]:
    """The ids that the rule has."""
    names = {"image_token": "image", "video_token": "video", "audio_token": "audio"}
    names |= {"video_start": "video_start", "video_end": "video_end"}
    return {
        field: _whole_or(fields, getattr(rule, field), f"{name}_token_id", f"{name}_token_index")
        for field, name in names.items()
        if getattr(rule, field) is not None
    }


def _shared(fields: Fields, rule: MropeRule) -> dict[str, Any]:
    """The markers of a video with audio: vision_start audio_start … audio_end vision_end."""
    if not rule.shared:
        return {}
    starts, ends, *others = rule.shared
    edges = [
        (_whole_or(fields, pair[0], f"{names[0]}_token_id"),
         _whole_or(fields, pair[1], f"{names[1]}_token_id"))
        for pair, names in (
            (starts, ("vision_start", "audio_start")),
            (ends, ("audio_end", "vision_end")),
        )
    ]  # fmt: skip
    return {"shared": (*edges, *others)}


def _canvas(fields: Fields, rule: MropeRule) -> dict[str, Any]:
    """MiniCPM-V's markers and the patches that it merges, which depend on a mode."""
    if not rule.canvas:
        return {}
    found: dict[str, Any] = {
        "canvas": [
            _whole_or(fields, value, key) for key, value in zip(CANVAS, rule.canvas, strict=True)
        ],
        "image_token": _whole_or(fields, rule.image_token, "image_token_id"),
        "video_token": _whole_or(fields, rule.video_token, "video_token_id"),
    }
    if fields.get("downsample_mode") == "4x":
        found["spatial_merge"] = 2
    return found


def _numbers(fields: Fields, rule: MropeRule) -> dict[str, Any]:
    """Merged patches, seconds, windows of audio, and axes."""
    vision = _block(fields, "vision_config")
    found: dict[str, Any] = {}
    for name in ("spatial_merge", "temporal_merge"):
        key, value = _first(vision, f"{name}_size")
        if value is not None:
            found[name] = whole(key, value)
    if rule.time != "index":
        interval = rule.time == "interval"
        key = "tokens_per_second" if interval else "position_id_per_seconds"
        _, value = _first(vision if interval else fields, key)
        if value is not None:
            found["positions_per_second"] = real(key, value)
    if rule.audio_chunk:
        audio = _block(fields, "audio_config")
        found["audio_chunk"] = 2 * _whole_or(audio, rule.audio_chunk // 2, "n_window")
    for key in ("rope_parameters", "rope_scaling"):  # HunYuan: an axis for each section
        sections = _block(_block(fields, "text_config"), key).get("mrope_section")
        if rule.pages and isinstance(sections, list):
            found["axes"] = len(sections)
    return found


def has_rule(fields: Fields) -> bool:
    """Whether a configuration's model type numbers images among text."""
    return _name(fields) in positions.rules() or "mrope" in catalogue.of(fields)


def _name(fields: Fields) -> str:
    return text_of(fields.get("model_type")).removesuffix("_thinker")


def read(config: Fields) -> MropeRule:
    """See :meth:`posembed.MropeRule.from_huggingface`."""
    own = catalogue.of(config).get("mrope")
    if not own:
        one_of("model_type", _name(config), *positions.rules())
    rule = MropeRule(**own) if own else MropeRule.from_json(_name(config))
    # The part with the tokens' ids: the thinker of an Omni model.
    fields = _block(config, "thinker_config") or config
    changes: dict[str, Any] = {}
    for found in (_ids, _shared, _canvas, _numbers):
        changes |= found(fields, rule)
    return dataclasses.replace(rule, **changes)
