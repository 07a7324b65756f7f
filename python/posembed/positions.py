"""Positions of tokens, before any embedding: images, videos and audio among text, grids, packing.

Images have positions of three axes, time, height and width, and text goes on after them: Wang et
al., "Qwen2-VL", arXiv:2409.12191 (M-RoPE). Models differ in a few numbers, their rule.
"""

from posembed.functional import opt_positions as from_mask
from posembed.functional._positions import (
    MropePositions,
    ZigzagPart,
    grid,
    mrope,
    packed,
    packed_grids,
    rules,
    zigzag,
)
from posembed.specifications import MropeRule

__all__ = [
    "MropePositions",
    "MropeRule",
    "ZigzagPart",
    "from_mask",
    "grid",
    "mrope",
    "packed",
    "packed_grids",
    "rules",
    "zigzag",
]
