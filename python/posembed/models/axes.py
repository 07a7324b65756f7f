"""Positions with several axes: M-RoPE in text models, rows and columns in vision towers.

Functions here change or return fields of a RotarySpec that is being read.
"""

from __future__ import annotations

import math
from typing import Any

from posembed.models.fields import Fields, Keys, same, shown, whole, wholes
from posembed.models.widths import check_rotated
from posembed.specifications import RotarySpec, Sections

# -------------------------------------------------------------------------------------- text models


def in_turns(sizes: list[int], pairs: int) -> Sections:
    """Alternating axes as in Qwen3-VL: the first axis gets all pairs that no later axis takes."""
    if not sizes:
        raise ValueError("mrope_section: expected sizes, got none")
    first = max(sizes[0], pairs - sum(sizes[1:]))
    axes = Sections((first, *sizes[1:]), interleaved=True).axis_of_pair[: max(pairs, 0)]
    return Sections(axis_of_pair=list(axes), axes=len(sizes))  # the last may rotate no pair


def sections_of_text(rope: Keys, axes: Any, pairs: int) -> Sections | None:
    """M-RoPE of a text model: alternating or contiguous, as the catalogue's entry says."""
    names = ("mrope_section", "xdrope_section")
    key, sizes = rope.stated(*names), rope.same(*names)
    turns = rope.same("mrope_interleaved", "interleaved")
    rule: Fields = axes or {}
    order = rule.get("order")
    if order == "two_in_turns":
        return Sections(axis_of_pair=[pair % 2 for pair in range(pairs)])
    if order is None and sizes is not None:
        raise ValueError(f"{key}: the model's code has no sections, got {shown(sizes)}")
    if order is None or (sizes is None and rule.get("if_stated")):
        return None
    given = wholes(key, sizes or rule.get("sizes"))
    if order == "time_last":  # ERNIE-4.5-VL: height and width alternate, time has the slowest
        height = given[0] if given else -1
        if [*given[:2], sum(given)] != [height, height, pairs] or len(given) != 3 or min(given) < 0:
            raise ValueError(f"{key}: expected (n, n, t) of {pairs} pairs, got {shown(given)}")
        return Sections(axis_of_pair=[1, 2] * height + [0] * given[2], axes=3)
    same("mrope_interleaved", (order == "alternating", turns))
    return in_turns(given, pairs) if order == "alternating" else Sections(given)


# ------------------------------------------------------------------------------------ vision towers


def _size_along(config: Keys, key: str, axis: int) -> int:
    """The size of an image or a patch along an axis, from one number or a list of one per axis."""
    sizes = config.need(key)
    if not isinstance(sizes, list):
        return whole(key, sizes)
    if len(sizes) <= axis:
        raise ValueError(f"{key}: expected two numbers, got {shown(sizes)}")
    return whole(key, sizes[axis])


def _set_normalised_grid(spec: Fields, config: Keys) -> None:
    """DINOv3: an image is two units wide, and the fastest pair turns twice across it.

    Patch i of n has the coordinate (2 i + 1 - n) / n. Here its position is the integer 2 i + 1, and
    tokens that are not patches have position n on each axis. Scores are the same, because they
    depend only on differences. The configuration's image_size determines n.
    """
    pairs = spec["head_dim"] // 4
    frequencies = []
    for axis in range(2):
        image = _size_along(config, "image_size", axis)
        patch = _size_along(config, "patch_size", axis)
        if patch <= 0 or image < patch:
            raise ValueError(
                f"patch_size: expected a positive number up to image_size, got {patch}"
            )
        patches = image // patch
        turns = (math.pow(spec["base"], -pair / pairs) for pair in range(pairs))
        frequencies += [2 * math.pi * turn / patches for turn in turns]
    spec["sections"] = Sections((pairs, pairs))
    spec["custom_frequencies"] = frequencies


def set_axes_of_tower(spec: Fields, config: Keys, grid: str, axis: str | None) -> None:
    """Sets the axes of a vision tower, as the catalogue's entry names its grid.

    In most, each axis has the whole series of frequencies. ``axis``: that of a window alone.
    """
    head_dim = spec["head_dim"]
    pairs = head_dim // 4
    if grid == "window_of_axis":
        _set_windows(spec, axis)
    elif grid == "whole_grid":  # EfficientLoFTR: all heads are one, and rows and columns alternate
        width = whole("hidden_size", config.need("hidden_size"))
        check_rotated(width)
        spec["head_dim"] = spec["rotary_dim"] = width
        spec["sections"] = Sections(axis_of_pair=[0, 1] * (width // 4), restart=True)
    elif grid == "normalised":
        _set_normalised_grid(spec, config)
    elif grid == "shared_series":  # Pixtral: height has the even members of one series
        series = RotarySpec(head_dim, base=spec["base"]).frequencies().tolist()
        spec["sections"] = Sections((pairs, pairs))
        spec["custom_frequencies"] = [*series[0::2], *series[1::2]]
    elif grid == "time_height_width":  # what remains after the division is not rotated
        pairs = head_dim // 6
        spec["rotary_dim"] = 6 * pairs
        spec["sections"] = Sections((pairs, pairs, pairs), restart=True)
    else:
        orders = {
            "width_height": [1] * pairs + [0] * pairs,
            "width_height_in_turns": [1, 0] * pairs,
        }
        axes = orders.get(grid, [0] * pairs + [1] * pairs)
        spec["sections"] = Sections(axis_of_pair=axes, restart=True)


def _set_windows(spec: Fields, axis: str | None) -> None:
    """Gemma-4's tower: each axis has its own window, one after the other, and pairs its halves.

    With an axis, "height" or "width", its window alone.
    """
    head_dim = spec["head_dim"]
    if axis is None:
        sizes = (head_dim // 4, head_dim // 4)
        spec["sections"] = Sections(sizes, restart=True, within_axes=True)
        return
    if axis not in ("height", "width"):
        raise ValueError(
            "layer_type: expected None for both axes, 'height' or 'width', got " + shown(axis)
        )
    spec["rotary_dim"] = head_dim // 2
    spec["rotary_start"] = 0 if axis == "height" else head_dim // 2
