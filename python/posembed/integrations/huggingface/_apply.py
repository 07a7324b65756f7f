"""The function that most transformers models use, with posembed's kernel."""

from __future__ import annotations

from torch import Tensor

from posembed import functional


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates query and key like transformers' function of the same name, bit for bit.

    Tables narrower than the head rotate its first components, as in GPT-NeoX.

    Args:
        q: float32, float64, bfloat16 or float16 [batch, heads, tokens, head_dim], or [batch,
            tokens, heads, head_dim].
        k: Keys, in the layout of the queries; the number of heads may differ.
        cos: Cosines [batch or 1, tokens, rotary_dim].
        sin: Sines, of the same shape.
        unsqueeze_dim: Where to insert the head dimension into the tables: 1 or 2.

    Returns:
        The rotated queries and keys, in the dtype that they and the tables promote to. Gradients
        flow to all arguments.

    Raises:
        ValueError: Shapes are incompatible.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch
        >>> from posembed.integrations.huggingface import apply_rotary_pos_emb
        >>> q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
        >>> angles = torch.rand(1, 3, 4).repeat(1, 1, 2)
        >>> rotated, _ = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
        >>> rotated.shape
        torch.Size([1, 4, 3, 8])
    """
    heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.dim() - 1
    query, key = functional.rotary_tables(q, k, cos, sin, unsqueeze_dim=heads)
    return query, key
