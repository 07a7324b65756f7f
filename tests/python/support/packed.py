"""Packed projections as programs take them apart, for the tests of their operators."""

from typing import Any

import posembed as pe
import torch
from torch import Tensor

DIM = 8
SPEC = pe.RotarySpec(DIM, rotary_dim=4)
GIVEN = torch.tensor([[3, 5, -1, 0, 9], [1, 2, 40, 41, 7]])  # positions


def parts_of(qkv: Tensor, call: dict[str, Any]) -> list[Tensor]:
    """Query, key and value as programs take them apart, with copies of each head.

    Phi-3: transformers, ``Phi3Attention.forward``. Groups: Megatron-LM,
    ``SelfAttention.get_query_key_value_tensors``; with one query head each, transformers'
    ``GPTNeoXAttention``.
    """
    heads, key_heads = call["heads"], call.get("key_heads", call["heads"])
    columns = [qkv[..., i : i + DIM] for i in range(0, qkv.shape[-1], DIM)]
    if call.get("order", "blocks") == "blocks":
        ends = [heads, heads + key_heads]
        parts = [columns[: ends[0]], columns[ends[0] : ends[1]], columns[ends[1] :]]
    else:
        each = heads // key_heads + 2
        groups = [columns[i : i + each] for i in range(0, len(columns), each)]
        parts = [[h for g in groups for h in g[:-2]], [g[-2] for g in groups], [g[-1] for g in groups]]
    tensors = [torch.stack(part, -2) for part in parts]
    return [x.transpose(1, 2) for x in tensors] if call.get("layout") == "bhsd" else tensors


def projection(call: dict[str, Any], device: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    width = (call["heads"] + 2 * call.get("key_heads", call["heads"])) * DIM
    batch_and_seq = (5, 2) if call.get("layout") == "sbhd" else (2, 5)
    return torch.randn(*batch_and_seq, width, device=device, dtype=dtype)


def on(device: Any, call: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
