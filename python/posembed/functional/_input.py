"""The functional input embedding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posembed.functional._offset import positions_from
from posembed.functional._options import Gradient, sinusoidal_text
from posembed.functional._token import padding_row
from posembed.glue.gate import check_tensors, gated
from posembed.specifications import SinusoidalSpec

_INPUT_EMBEDDING = gated(torch.ops.posembed.input_embedding.default)

_PLAIN = (-1, -1, "dense", 0, False)  # the defaults of the operator's last options


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
    offset: int | Tensor = 0,
    first_row: int = 0,
    sinusoid: SinusoidalSpec | None = None,
    norm: Literal["layer", "rms"] | None = None,
    eps: float | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    gradient: Gradient = "dense",
    seed: Tensor | None = None,
    first_token: int = 0,
    cu_seqlens: Tensor | None = None,
    own_rows: bool = False,
) -> Tensor:
    """Sums token, type and position rows and applies norm and dropout, in one kernel.

    Args:
        ids: int32 or int64 [batch, seq].
        token: The token table [num_embeddings, embedding_dim].
        position: A learned position table [first_row + max_positions, embedding_dim].
        positions: int32 or int64 [seq] or [batch, seq]; None: ``offset``, ``offset + 1``, and so
            on.
        token_type: A token-type table [num_types, embedding_dim].
        types: int32 or int64 [batch, seq]; None: type 0.
        norm_weight: [embedding_dim].
        norm_bias: [embedding_dim], for ``norm="layer"``.
        offset: Position of the first token if ``positions`` is None; int32 or int64 [batch]: that
            of each sample's.
        first_row: The row of position 0.
        sinusoid: Specification of sinusoidal positions, instead of a position table.
        norm: "layer" for LayerNorm, "rms" for RMSNorm, or None.
        eps: Added to the norm's variance; default: 1e-5.
        scale: Multiplies the token rows.
        dropout: Probability of dropping a component.
        padding_idx: The token row that gets no gradient.
        position_padding_idx: A row of ``position`` before ``first_row`` that gets no gradient.
        gradient: Form of the token table's gradient, "dense" or "rows".
        seed: Dropout seed: int64 with one element, on the device of ``ids``; None: drawn from
            torch's generator for that device.
        first_token: Index of this call's first token in the dropout mask. Shards of a batch that
            pass the same ``seed`` and their own index draw the mask of the whole batch, on any
            device.
        cu_seqlens: Packed documents, with batch 1: int32 or int64 [documents + 1], the token at
            which each begins, then the number of tokens. Positions restart at ``offset``, a number
            or [documents], in each.
        own_rows: ``token`` holds computed vectors, one row per token, and ids are 0, 1, 2, and so
            on. :class:`posembed.InputEmbedding` uses it for ``inputs_embeds``.

    Returns:
        [batch, seq, embedding_dim] in the dtype of ``token``.

    Raises:
        ValueError: Shapes or options are incompatible.
        TypeError: A dtype is not supported.
        IndexError: An id, position or type is outside its table.

    Examples:
        >>> import torch, posembed as pe
        >>> token, position = torch.randn(30522, 768), torch.randn(512, 768)
        >>> ids = torch.randint(30522, (2, 128))
        >>> y = pe.functional.input_embedding(ids, token, position, norm="layer")
    """
    if isinstance(offset, Tensor) or cu_seqlens is not None:
        positions, offset = positions_from(offset, positions, ids, 0, 1, cu_seqlens), 0
    if eps is not None and norm is None:
        raise ValueError(f"eps: expected none without a norm, got {eps}")
    if dropout > 0 and seed is None:
        check_tensors(ids=ids)
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=ids.device)
    if padding_idx is not None:
        check_tensors(token=token)
    rare = (
        padding_row(padding_idx, token),
        -1 if position_padding_idx is None else position_padding_idx,
        gradient,
        first_token,
        own_rows,
    )
    eps, seed = 1e-5 if eps is None else eps, seed if dropout > 0 else None
    waves = "" if sinusoid is None else sinusoidal_text(sinusoid, "sinusoid")
    return _INPUT_EMBEDDING(
        token, ids, position, positions, token_type, types, norm_weight, norm_bias, seed, offset,
        first_row, waves, norm or "none", eps, scale, dropout, *(() if rare == _PLAIN else rare),
    )  # fmt: skip
