"""Positions with several axes: M-RoPE of text models, rows and columns of vision towers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posembed.configuration import conventions
from posembed.configuration.keys import Fields, Keys, same
from posembed.specification import RotarySpec, Sections

# ------------------------------------------------------------------------------------- text models


def in_turns(sizes: Sequence[int], pairs: int) -> Sections:
    """Qwen3-VL's: pairs that no later axis takes are the first axis's, however many there are."""
    first_size = max(sizes[0], pairs - sum(sizes[1:]))
    axes = Sections((first_size, *sizes[1:]), interleaved=True).axis_of_pair
    return Sections(axis_of_pair=axes[:pairs], axes=len(sizes))


def time_last(sizes: Sequence[int], pairs: int) -> Sections:
    """ERNIE-4.5-VL: height and width share the faster pairs in turns, time has the slowest.

    Its configuration gives the sections as (height, width, time).
    """
    height, width, time = sizes
    if height != width or height + width + time != pairs:
        raise ValueError(f"mrope_section: expected (n, n, t) of {pairs} pairs, got {sizes}")
    return Sections(axis_of_pair=(1, 2) * height + (0,) * time, axes=3)


def of_text(rope: Keys, model_type: str, pairs: int) -> Sections | None:
    """M-RoPE: in turns or one axis after the other, as the model has it."""
    sizes = rope.same("mrope_section", "xdrope_section")
    turns = rope.same("mrope_interleaved", "interleaved")
    if model_type in conventions.TIME_LAST:
        return time_last(sizes or conventions.TIME_LAST[model_type], pairs)
    if model_type in conventions.ALTERNATING_AXES:
        return Sections(axis_of_pair=[pair % 2 for pair in range(pairs)])
    if model_type in conventions.INTERLEAVED_SECTIONS:
        same("mrope_interleaved", True, turns)
        return in_turns(sizes or conventions.INTERLEAVED_SECTIONS[model_type], pairs)
    if model_type in conventions.CONTIGUOUS_SECTIONS:
        same("mrope_interleaved", False, turns)
        return Sections(sizes or conventions.CONTIGUOUS_SECTIONS[model_type])
    if sizes is None:
        return None
    if model_type not in conventions.OPTIONAL_SECTIONS:
        raise ValueError(f"mrope_section: {model_type!r} is not known to have sections")
    turns = same("mrope_interleaved", conventions.OPTIONAL_SECTIONS[model_type], turns)
    return in_turns(sizes, pairs) if turns else Sections(sizes)


# ----------------------------------------------------------------------------------- vision towers


def whole_grid(config: Keys, head_dim: int, base: float) -> Fields:
    """EfficientLoFTR: all heads are rotated as one, rows and columns in turns."""
    width = int(config.need("hidden_size"))
    return {
        "head_dim": width,
        "rotary_dim": width,
        "sections": Sections(axis_of_pair=(0, 1) * (width // 4), restart=True),
    }


def normalised_grid(config: Keys, head_dim: int, base: float) -> Fields:
    """DINOv3: an image is two units wide whatever its size, and the fastest pair turns twice in it.

    Patch i of n has the coordinate (2 i + 1 - n) / n. Here its position is the whole number
    2 i + 1, and that of tokens that are no patches is n on each axis: scores, which know only
    differences, are the same. The configuration's image_size fixes n.
    """
    patches = []
    for axis in range(2):
        image, patch = (config.need(key) for key in ("image_size", "patch_size"))
        sizes = [size if isinstance(size, int) else size[axis] for size in (image, patch)]
        patches.append(sizes[0] // sizes[1])
    n = head_dim // 4
    turns = [base ** (-i / n) for i in range(n)]
    frequencies = [2 * math.pi * turn / count for count in patches for turn in turns]
    return {"sections": Sections((n, n)), "custom_frequencies": frequencies}


def shared_series(config: Keys, head_dim: int, base: float) -> Fields:
    """Pixtral: height has the even members of one series, width the odd ones."""
    n = head_dim // 4
    whole = RotarySpec(head_dim, base=base).frequencies().tolist()
    return {"sections": Sections((n, n)), "custom_frequencies": whole[::2] + whole[1::2]}


def time_height_width(config: Keys, head_dim: int, base: float) -> Fields:
    """Video: three axes, and the components that three do not divide are left."""
    n = head_dim // 6
    return {"rotary_dim": 6 * n, "sections": Sections((n, n, n), restart=True)}


def window_of_axis(head_dim: int, axis: str | None) -> Fields:
    """Gemma-4's tower: each axis pairs halves of a window of its own, one after the other."""
    windows = {"height": 0, "width": head_dim // 2}
    if axis not in windows:
        raise ValueError(
            "layer_type: expected 'height' or 'width', which rotate one after the other, "
            f"got {axis!r}"
        )
    return {"rotary_dim": head_dim // 2, "rotary_start": windows[axis]}


OWN_FIELDS = {
    **dict.fromkeys(conventions.WHOLE_GRID, whole_grid),
    **dict.fromkeys(conventions.NORMALISED_GRID, normalised_grid),
    **dict.fromkeys(conventions.SHARED_SERIES, shared_series),
    **dict.fromkeys(conventions.TIME_HEIGHT_WIDTH, time_height_width),
}


def of_tower(config: Keys, model_type: str, head_dim: int, base: float) -> Fields:
    """Fields of a vision tower's specification: each axis has the whole series of frequencies."""
    if model_type in OWN_FIELDS:
        return OWN_FIELDS[model_type](config, head_dim, base)
    n = head_dim // 4
    axes = (0,) * n + (1,) * n
    if model_type in conventions.WIDTH_THEN_HEIGHT:
        axes = (1,) * n + (0,) * n
    elif model_type in conventions.WIDTH_AND_HEIGHT_IN_TURNS:
        axes = (1, 0) * n
    return {"sections": Sections(axis_of_pair=axes, restart=True)}
