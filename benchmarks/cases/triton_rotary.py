"""The rotation as one writes it in Triton: in place, a program per token, a table of angles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_heads(rows, cos, sin, heads, padded: tl.constexpr, half: tl.constexpr):
    head = tl.arange(0, padded)[:, None]
    place = head * 2 * half + tl.arange(0, half)[None, :]
    inside = head < heads
    first = tl.load(rows + place, mask=inside).to(tl.float32)
    second = tl.load(rows + place + half, mask=inside).to(tl.float32)
    kind = rows.dtype.element_ty
    tl.store(rows + place, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(rows + place + half, (second * cos + first * sin).to(kind), mask=inside)


@triton.jit
def rotate_token(
    query,
    key,
    cosines,
    sines,
    seq,
    query_heads,
    key_heads,
    query_padded: tl.constexpr,
    key_padded: tl.constexpr,
    half: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    angle = token % seq * half + tl.arange(0, half)
    cos = tl.load(cosines + angle)[None, :]
    sin = tl.load(sines + angle)[None, :]
    rotate_heads(query + token * query_heads * 2 * half, cos, sin, query_heads, query_padded, half)
    rotate_heads(key + token * key_heads * 2 * half, cos, sin, key_heads, key_padded, half)


def rotate_(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotates contiguous [batch, seq, heads, head_dim]; tables are float32 [seq, head_dim / 2]."""
    batch, seq, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    rotate_token[(batch * seq,)](
        query,
        key,
        cosines,
        sines,
        seq,
        query_heads,
        key_heads,
        triton.next_power_of_2(query_heads),
        triton.next_power_of_2(key_heads),
        head_dim // 2,
    )


def tables(seq: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(seq, device=device).float(), frequencies)
    return angles.cos(), angles.sin()
