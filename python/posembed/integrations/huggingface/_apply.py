"""The function that most transformers models use, with posembed's kernel."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from posembed import functional
from posembed.integrations.huggingface._rotation import PLANS, repeats

_checked: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # the last table and its version
_shapes: set[tuple[torch.Size, torch.dtype]] = set()  # of tables on a GPU


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotates query and key like transformers' function of the same name, bit for bit.

    Tables narrower than the head rotate its first components, as in GPT-NeoX. Their halves are
    compared whenever they are new; on a GPU, to avoid synchronization, at the first call with each
    shape. Compiled code assumes that they are equal.

    Args:
        q: float32, float64, bfloat16 or float16 [batch, heads, tokens, head_dim], or [batch,
            tokens, heads, head_dim].
        k: Keys, in the layout of the queries; the number of heads may differ.
        cos: Cosines [batch or 1, tokens, rotary_dim]; the second half repeats the first.
        sin: Sines, of the same shape.
        unsqueeze_dim: Where to insert the head dimension into the tables: 1 or 2.

    Returns:
        The rotated queries and keys, in the dtype that they and the tables promote to. Gradients
        flow to all arguments.

    Raises:
        ValueError: Shapes are incompatible, or the halves of a table differ.
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
    if not torch.compiler.is_compiling():
        _check_halves(cos, "cos")
        _check_halves(sin, "sin")
    heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.dim() - 1
    query, key = functional.rotary_tables(q, k, cos, sin, unsqueeze_dim=heads)
    return query, key


def _check_halves(table: Tensor, name: str) -> None:
    """Refuses tables that turn the two components of a pair by different angles."""
    if table.is_cuda:
        kind = table.shape, table.dtype
        if kind in _shapes or torch.cuda.is_current_stream_capturing():
            return
        if len(_shapes) >= PLANS:
            _shapes.clear()
        _shapes.add(kind)
    elif not table.is_inference():  # whose changes are not counted
        last = _checked.get(name)
        if last is not None and last[0]() is table and last[1] == table._version:
            return
        _checked[name] = weakref.ref(table), table._version
    if not repeats(table, adjacent=False):
        _checked.pop(name, None)
        raise ValueError(f"{name}: expected a second half equal to the first, got other values")
