"""The function that most models of transformers have, with posembed's kernel."""

from __future__ import annotations

from torch import Tensor

from posembed import functional


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates query and key as the function of that name in transformers does, bit for bit.

    Tables narrower than the head rotate its first part, as in GPT-NeoX.

    Args:
        q: float32, float64, bfloat16 or float16 [batch, heads, tokens, head_dim], or [batch,
            tokens, heads, head_dim].
        k: Keys, in the layout of the queries; the number of heads may differ.
        cos: Cosines [batch or 1, tokens, rotary_dim]; the second half repeats the first.
        sin: Sines, of the same shape.
        unsqueeze_dim: The dimension of the heads that the tables lack: 1 or 2.

    Returns:
        The rotated queries and keys, in the dtype to which they and the tables promote. Gradients
        flow to all arguments.

    Raises:
        ValueError: Shapes do not fit.
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
