"""The whole input embedding as one function."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posembed import _C
from posembed.functional._eager import eager
from posembed.functional._options import Gradient, sinusoidal_text
from posembed.functional._token import padding_row
from posembed.specification import SinusoidalSpec


def input_embedding(
    ids: Tensor,
    token: Tensor,
    position: Tensor | None = None,
    positions: Tensor | None = None,
    token_type: Tensor | None = None,
    types: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    offset: int = 0,
    first_row: int = 0,
    sinusoid: SinusoidalSpec | None = None,
    norm: Literal["layer", "rms"] | None = None,
    eps: float = 1e-5,
    scale: float = 1.0,
    dropout: float = 0.0,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    gradient: Gradient | Literal["own"] = "dense",
    seed: Tensor | None = None,
    first_token: int = 0,
) -> Tensor:
    """Sums token, type and position rows and applies norm and dropout, in one kernel.

    Args:
        ids: int32 or int64 [batch, seq].
        token: The token table [num_embeddings, embedding_dim].
        position: A table of learned positions [first_row + max_positions, embedding_dim].
        positions: int32 or int64 [seq] or [batch, seq]; None: ``offset``, ``offset + 1``, and so
            on.
        token_type: A table of token types [num_types, embedding_dim].
        types: int32 or int64 [batch, seq]; None: type 0.
        norm_weight: [embedding_dim].
        norm_bias: [embedding_dim], for ``norm="layer"``.
        offset: The position of the first token, without ``positions``.
        first_row: The row of position 0.
        sinusoid: Sinusoidal positions instead of a table.
        norm: "layer" for LayerNorm, "rms" for RMSNorm, or None.
        eps: Added to the norm's variance.
        scale: Multiplies the token rows.
        dropout: Probability of dropping a component.
        padding_idx: The token row that gets no gradient.
        position_padding_idx: The row of ``position``, before ``first_row``, that gets no gradient.
        gradient: Form of the token table's gradient, "dense" or "rows". "own", for
            :class:`posembed.InputEmbedding` with ``token_dim`` or ``inputs_embeds``: ``token`` has
            a row for each id, and ids count up from 0.
        seed: The seed of dropout's mask: int64 with one element, on the device of ``ids``; None:
            drawn from torch's generator for that device.
        first_token: Index of the first of these tokens in the mask. Parts of a batch that pass the
            same ``seed`` and their indices draw the mask of the whole, on any device.

    Returns:
        [batch, seq, embedding_dim] in the dtype of ``token``.

    Raises:
        ValueError: Shapes or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: An id, position or type is outside its table.

    Examples:
        >>> import torch, posembed as pe
        >>> token, position = torch.randn(30522, 768), torch.randn(512, 768)
        >>> ids = torch.randint(30522, (2, 128))
        >>> y = pe.functional.input_embedding(ids, token, position, norm="layer")
    """
    if dropout > 0 and seed is None:
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=ids.device)
    tables = (position, positions, token_type, types, norm_weight, norm_bias)
    spec = "" if sinusoid is None else sinusoidal_text(sinusoid, "sinusoid")
    padding = padding_row(padding_idx, token)
    position_padding = -1 if position_padding_idx is None else position_padding_idx
    kind = norm or "none"
    if gradient != "own" and eager(ids, token, *tables, seed):
        return _C.input_embedding(
            ids,
            token,
            *tables,
            offset,
            first_row,
            spec,
            kind,
            eps,
            scale,
            dropout,
            padding,
            position_padding,
            gradient,
            seed,
            first_token,
        )
    return torch.ops.posembed.input_embedding(  # type: ignore[no-any-return]
        token,
        ids,
        *tables,
        seed if dropout > 0 else None,
        offset=offset,
        first_row=first_row,
        sinusoid=spec,
        norm=kind,
        eps=eps,
        scale=scale,
        dropout=dropout,
        padding_idx=padding,
        position_padding_idx=position_padding,
        gradient=gradient,
        first_token=first_token,
    )
