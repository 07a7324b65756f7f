"""Attention with ALiBi's bias: FlashAttention-2, compiled flex attention, or posembed's softmax.

FlashAttention-2: Dao, arXiv:2307.08691. Flex attention: Dong et al., arXiv:2412.05496.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

if TYPE_CHECKING:
    from posembed.alibi import ALiBi
    from posembed.places import Places


def check(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
    """Checks as the C++ module does: matrix products would not name the argument, or broadcast."""
    for name, tensor, shape in (
        ("query", query, "[batch, num_heads, seq, head_dim]"),
        ("key", key, "[batch, heads, keys, head_dim]"),
        ("value", value, "[batch, heads, keys, value_dim]"),
    ):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected {shape}, got {list(tensor.shape)}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(
                f"{name}: expected the dtype of query, {query.dtype}, got {tensor.dtype}"
            )
    for name, size, expected, dimension in (
        ("key", key.shape[0], query.shape[0], "batch"),
        ("key", key.shape[3], query.shape[3], "head_dim"),
        ("value", value.shape[0], query.shape[0], "batch"),
        ("value", value.shape[1], key.shape[1], "heads"),
        ("value", value.shape[2], key.shape[2], "keys"),
    ):
        if size != expected:
            raise ValueError(f"{name}: expected {dimension} {expected}, got {size}")
    heads, key_heads = query.shape[1], key.shape[1]
    if key_heads == 0 or heads % key_heads != 0:
        raise ValueError(
            f"key: expected heads that divide those of query, {heads}, got {key_heads}"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout: expected 0 to 1, got {dropout}")


def backend_for(alibi: ALiBi, query: Tensor, dropout: float, places: Places) -> str:
    """The fastest backend that takes these arguments."""
    given = {name for name, value in places.items() if value is not None}
    if not query.is_cuda or alibi.learned or given - {"query_offset"}:
        return "fused"
    if query.shape[-2] == 1:  # one row of scores: nothing to save
        return "fused"
    half = query.dtype in (torch.bfloat16, torch.float16)
    if half and not given and alibi._derived.dim() == 1 and _has_flash():
        return "flash"
    # Flex attention's CUDA kernel does not take these.
    narrow = query.shape[-1] < 16 or query.dtype == torch.float64
    return "fused" if dropout or narrow else "flex"


def fused(
    alibi: ALiBi,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    places: Places,
) -> Tensor:
    """Attention with scores in memory, and one kernel for scale, bias, mask and softmax."""
    batch, heads, queries, head_dim = query.shape
    key_heads, keys = key.shape[1:3]
    # [batch, key heads, queries of its group, head_dim]: grouping queries avoids copies of keys.
    grouped = query.reshape(batch, key_heads, heads // key_heads * queries, head_dim)
    scores = (grouped @ key.mT).view(batch, heads, queries, keys)
    # Do not ask whether scores require grad: inside torch.func transforms they do not say so.
    if torch.is_grad_enabled():
        scores = alibi.softmax(scores, scale=scale, **places)
    else:
        alibi.softmax_(scores, scale=scale, **places)
    if dropout:
        scores = F.dropout(scores, dropout)
    mixed = scores.view(batch, key_heads, heads // key_heads * queries, keys) @ value
    return mixed.view(batch, heads, queries, value.shape[-1])


def flex(
    alibi: ALiBi,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    query_offset: int | None,
) -> Tensor:
    """Attention with the bias computed inside flex attention's kernel."""
    keys = key.shape[-2]
    offset = keys - query.shape[-2] if query_offset is None else query_offset
    # A branch, because the compiler compares symbols and flex attention takes a bool.
    grouped = True if query.shape[-3] != key.shape[-3] else False  # noqa: SIM210
    bias = alibi.score_mod(query_offset=offset, key_length=keys)
    result: Tensor = _compiled_flex()(
        query, key, value, score_mod=bias, scale=scale, enable_gqa=grouped
    )
    return result


def flash(
    alibi: ALiBi, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float
) -> Tensor:
    """Attention by FlashAttention-2, which takes slopes."""
    result: Tensor = importlib.import_module("flash_attn").flash_attn_func(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        dropout_p=dropout,
        softmax_scale=scale,
        causal=alibi.causal,
        alibi_slopes=alibi._slopes(key.shape[-2]),
    )
    return result.transpose(1, 2)


@functools.cache
def _has_flash() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


@functools.cache
def _compiled_flex() -> Any:
    """Compiled flex attention; uncompiled, it would write the scores to memory."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
