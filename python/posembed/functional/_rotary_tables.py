"""Rotation by tables that a model made, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def _tables(cos: Tensor, sin: Tensor | None, interleaved: bool, half: bool) -> tuple[Tensor, Tensor]:
    if sin is None:
        cos, sin, half = cos.real, cos.imag, True
    if half and interleaved:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)) if half else (cos, sin)


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary_tables(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    unsqueeze_dim: int = 1,
    start: int = 0,
    numerics: str = "float32",
    half_width: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates query and key by tables of cosines and sines."""
    if unsqueeze_dim >= 0:
        unsqueeze_dim -= query.dim()
    cos, sin = _tables(cos, sin, interleaved, half_width)
    width = cos.shape[-1]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotate(x: Tensor) -> Tensor:
        assert x.shape[unsqueeze_dim + (1 if unsqueeze_dim == -3 else -1)] == cos.shape[-2 if unsqueeze_dim == -3 else -3]
        part = x[..., start : start + width]
        assert part.shape[-1] == width
        if numerics == "float32_product":
            part, c, s = part.float(), cos.float(), sin.float()
        else:
            c, s = cos, sin
        part = part * c + _turned(part, interleaved) * s
        if numerics == "float32_product":
            part = part.to(x.dtype)
        if width == x.shape[-1]:
            return part
        return torch.cat((x[..., :start], part, x[..., start + width :]), -1)

    return rotate(query) if key is None else (rotate(query), rotate(key))
