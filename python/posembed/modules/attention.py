"""Other attention backends with ALiBi bias, and the choice among them.

FlashAttention-2: Dao, arXiv:2307.08691. Flex attention: Dong et al., arXiv:2412.05496.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posembed.glue.sharding import is_sharded
from posembed.specifications.score_positions import ScorePositions


def backend_for(
    query: Tensor, two_sided: bool, learned: bool, dropout: float, positions: ScorePositions
) -> str:
    """The fastest backend that supports these arguments."""
    given = {name for name, value in positions.items() if value is not None}
    if isinstance(positions.get("query_offset"), Tensor):
        return "fused"
    if not query.is_cuda or is_sharded(query) or learned or given - {"query_offset"}:
        return "fused"
    if query.dim() != 4 or query.shape[-2] == 1:  # rejected later; one row of scores
        return "fused"
    half = query.dtype in (torch.bfloat16, torch.float16)
    if half and not given and not two_sided and _has_flash():
        return "flash"
    # Flex attention's CUDA kernel does not support these.
    narrow = query.shape[-1] < 16 or query.dtype == torch.float64
    return "fused" if dropout or narrow else "flex"


def check_backend(
    backend: str, query: Tensor, sample_slopes: Tensor | None, positions: ScorePositions
) -> None:
    """Raises ValueError for arguments that flex or flash attention would ignore or misread."""
    for name, value in positions.items():
        taken = name == "query_offset" and backend == "flex" and not isinstance(value, Tensor)
        if value is not None and not taken and not (name == "apply_mask" and value is True):
            number = "a number" if name == "query_offset" and backend == "flex" else "none"
            raise ValueError(
                f"{name}: expected {number} with backend={backend!r}; only 'fused' takes it"
            )
    if sample_slopes is not None and sample_slopes.shape[:1] != query.shape[:1]:
        raise ValueError(
            f"sample_slopes: expected batch {query.shape[0]}, got {list(sample_slopes.shape)}"
        )


def flex(
    query: Tensor, key: Tensor, value: Tensor, bias: Callable[..., Tensor], scale: float
) -> Tensor:
    """Flex attention, with the bias as a score_mod inside its kernel."""
    # A branch, because the compiler compares symbolically and flex attention needs a bool.
    grouped = True if query.shape[-3] != key.shape[-3] else False  # noqa: SIM210
    result: Tensor = _compiled_flex()(
        query, key, value, score_mod=bias, scale=scale, enable_gqa=grouped
    )
    return result


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """FlashAttention-2, which takes slopes."""
    result: Tensor = importlib.import_module("flash_attn").flash_attn_func(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        dropout_p=dropout,
        softmax_scale=scale,
        causal=causal,
        alibi_slopes=slopes,
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
