"""Which layers of a GGUF file have a sliding window, and which rotate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from posembed.models.fields import Fields, Keys, flag, positive, shown, whole
from posembed.models.layers import MOST_LAYERS

if TYPE_CHECKING:
    from posembed.models.gguf import Metadata

PATTERN = "attention.sliding_window_pattern"
# As many layers as every period of the table fits into.
EVERY_KIND = 120


class Layer(NamedTuple):
    """A layer of the model."""

    slides: bool  # its attention has a sliding window
    rotates: bool


class Counts(NamedTuple):
    """All layers, and those before the last ones, which predict further tokens."""

    all: int
    trunk: int


def _count_at(keys: Keys, key: str, otherwise: int) -> int:
    count = whole(key, keys.take(key, otherwise))
    if not 0 <= count <= MOST_LAYERS:
        raise ValueError(f"{key}: expected 0 to {MOST_LAYERS}, got {count}")
    return count


def _counts_of(file: Metadata) -> Counts:
    key = "nextn_predict_layers"
    every, ahead = _count_at(file.model, "block_count", EVERY_KIND), _count_at(file.model, key, 0)
    if ahead > every:
        raise ValueError(f"{key}: expected at most block_count, got {ahead}")
    return Counts(every, every - ahead)


def _listed(key: str, values: Any, length: int, otherwise: bool) -> list[bool]:
    """A list with an entry for each layer; layers beyond its end have ``otherwise``."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"{key}: expected a list of layers, got {shown(values, 60)}")
    given = [flag(key, value) for value in values[:length]]
    return [*given, *[otherwise] * (length - len(given))]


def has_windows(file: Metadata) -> bool:
    """Whether some layers have a sliding window."""
    rule = file.rules.get("windows", {})
    when = rule.get("when")
    if when is None:
        return False
    window = file.model.take("attention.sliding_window")
    if when == "stated":
        return bool(window)
    return bool(when == "always" or file.model.need("block_count") == rule.get("block_count"))


def _windows_of(file: Metadata, counts: Counts) -> list[bool]:
    """Whether each layer has a sliding window."""
    if not has_windows(file):
        return [False] * counts.all
    rule: Fields = file.rules["windows"]
    known = rule.get("period")
    pattern = file.model.take(PATTERN, known)
    if pattern is None:
        raise ValueError(f"{PATTERN}: missing in the metadata")
    if isinstance(pattern, list) or known is None:
        return _listed(PATTERN, pattern, counts.all, False)
    period = whole(PATTERN, pattern, 0)
    # In all layers but one of each period: the last, or the first.
    full = 0 if rule.get("full_first") else period - 1
    slides = [period == 0 or place % period != full for place in range(counts.trunk)]
    return [*slides, *[False] * (counts.all - counts.trunk)]


def _recurrent_of(file: Metadata, counts: Counts) -> list[bool]:
    """Recurrent layers, which do not rotate.

    Those without heads of keys, or all but the last of each period.
    """
    none = [False] * counts.all
    rule = file.rules.get("recurrent")
    if rule is None:
        return none
    if isinstance(rule, str):
        heads = file.model.take(rule)
        if not isinstance(heads, list):
            return none
        return [place >= len(heads) or heads[place] == 0 for place in range(counts.all)]
    listed, key = file.model.take("attention.recurrent_layers"), "full_attention_interval"
    period = positive(key, file.model.take(key, rule))
    if listed is not None:
        return _listed("attention.recurrent_layers", listed, counts.all, False)
    return [place < counts.trunk and (place + 1) % period != 0 for place in range(counts.all)]


def _rotated_by_kind(file: Metadata, windows: list[bool]) -> list[bool]:
    """Whether layers rotate by what the architecture rotates.

    All, those with a sliding window, or those that a key lists.
    """
    rule = file.rules.get("rotated")
    if rule == "sliding" and has_windows(file):
        key = file.rules.get("rotated_first")
        first = 0 if key is None else _count_at(file.model, key, 0)
        return [place < first or slides for place, slides in enumerate(windows)]
    if rule is None or rule == "sliding":
        return [True] * len(windows)
    listed = file.model.take(rule)
    return [True] * len(windows) if listed is None else _listed(rule, listed, len(windows), True)


def _check_next_tokens(file: Metadata, counts: Counts, layers: list[Layer]) -> None:
    """Layers that predict further tokens rotate as the others.

    Where those differ, the table knows whether llama.cpp runs them at all.
    """
    alike = len(set(layers)) <= 1
    if counts.all != counts.trunk and not alike and not file.rules.get("next_tokens"):
        raise ValueError(
            f"nextn_predict_layers: not understood for '{file.architecture}': llama.cpp does not "
            "run these layers"
        )


def layers_of(file: Metadata) -> list[Layer]:
    """The layers in order: ``block_count`` of them.

    Or some, enough to see every kind, if the file does not give their number.
    """
    counts = _counts_of(file)
    windows, recurrent = _windows_of(file, counts), _recurrent_of(file, counts)
    rotated = _rotated_by_kind(file, windows)
    off = file.rules.get("switch")
    some = off is None or flag(off, file.rope.take(off, True))
    rule = file.rules.get("unrotated", {})  # one of every few layers does not rotate
    applies = rule and (has_windows(file) or not rule.get("windowed"))
    layers = []
    for place in range(counts.all):
        rotates = rotated[place] and not recurrent[place]
        rotates = rotates and not (applies and place % rule["every"] == rule["place"])
        ahead = place >= counts.trunk and bool(file.rules.get("next_tokens"))
        layers.append(Layer(windows[place], some and (rotates or ahead)))
    _check_next_tokens(file, counts, layers)
    return layers
