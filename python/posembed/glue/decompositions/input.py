"""Input layers: token, type and position rows, then a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posembed.glue.decompositions.learned import learned_encode
from posembed.glue.decompositions.shared import consecutive, rms, wide
from posembed.glue.decompositions.sinusoidal import encodings


def input_embedding(
    token: Tensor,
    ids: Tensor,
    position: Tensor | None,
    positions: Tensor | None,
    token_type: Tensor | None,
    types: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    offset: Any,
    first_row: int,
    sinusoid: str,
    norm: str,
    eps: float,
    scale: float,
    dropout: float,
    *_: Any,
) -> Tensor:
    if dropout > 0:
        raise ValueError(
            "decompose: expected dropout 0, whose mask only posembed draws; export in eval mode"
        )
    dtype = wide(token.dtype)
    x = torch.nn.functional.embedding(ids, token).to(dtype)
    x = x if scale == 1 else x * scale
    if token_type is not None:
        if types is None:
            types = torch.zeros_like(ids)
        x = x + torch.nn.functional.embedding(types, token_type)
    signed = positions is not None
    if positions is None:
        positions = consecutive(ids.shape[1], offset, ids.device)
    if position is not None:
        x = x + learned_encode(position, positions, first_row)
    if sinusoid:
        x = x + encodings(positions, sinusoid, 0, dtype, signed)
    return normed(x, norm, eps, norm_weight, norm_bias).to(token.dtype)


def normed(x: Tensor, norm: str, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weight = None if weight is None else weight.to(x.dtype)
    if norm == "layer":
        bias = None if bias is None else bias.to(x.dtype)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if norm == "rms":
        return rms(x, eps, weight)
    return x if weight is None else x * weight
