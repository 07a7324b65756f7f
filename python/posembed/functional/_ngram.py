"""Functional n-gram hashing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from posembed.functional._options import NgramRule
from posembed.glue.gate import gated

_NGRAM_IDS = gated(torch.ops.posembed.ngram_ids.default, sharded=True)
_NGRAM_MASK = gated(torch.ops.posembed.ngram_mask.default)
Whole = Callable[..., list[int]]
_NGRAM_MULTIPLIERS = cast(Whole, gated(torch.ops.posembed.ngram_multipliers.default))
_NGRAM_PRIMES = cast(Whole, gated(torch.ops.posembed.ngram_primes.default))
Numbers = Sequence[int] | Tensor
Table = Sequence[Sequence[int]] | Tensor


def ngram_ids(
    ids: Tensor,
    *,
    multipliers: Numbers,
    moduli: Table,
    offsets: Table | None = None,
    boundary: int | None = None,
    history: Tensor | None = None,
    padding: int | None = None,
    rule: NgramRule = "xor",
    sizes: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Rows of a table for the n-grams that end at each token.

    An n-gram of size s becomes one number, in 64 bits that wrap. "xor" is the exclusive or of
    ``token[i - k] * multipliers[k]`` over k < s (Cheng et al., "Conditional Memory via Scalable
    Lookup", arXiv:2601.07372). "rolling" is the polynomial in a head's multiplier whose highest
    power has the newest token (Pagnoni et al., "Byte Latent Transformer", arXiv:2412.09871).
    "modular" is the sum of ``token[i - k] * multiplier**k``, whose powers do not wrap (Liu et al.,
    "Scaling Embeddings Outperforms Scaling Experts in Language Models", LongCat, arXiv:2601.21204;
    for ids within ±2^62). The number modulo ``moduli``, as in ``torch.remainder``, plus ``offsets``
    is the row.

    Args:
        ids: int32 or int64 [batch, seq] or [seq]; any numbers.
        multipliers: [n]: one for each distance from the newest token, for n-grams up to size n.
            For "rolling" and "modular" [heads]. At most 64; for "modular" from 1 on, and times its
            modulus below 2^62.
        moduli: [sizes, heads]: rows of each head, 1 or more; at most 128.
        offsets: [sizes, heads]: first row of each head; default: 0.
        boundary: A token that ends a text: for later tokens, it and those before it count as
            ``padding``.
        history: int32 or int64 [batch, n - 1]: the tokens before ``ids``, such as the last of an
            earlier call; default: padding. With ``cu_seqlens``: [batch * documents, n - 1]. A batch
            of 1 serves every row.
        padding: What tokens before the text count as; default: ``boundary``, or 0 if there is none.
        rule: "xor", "rolling" or "modular".
        sizes: Sizes of the n-grams, ascending; default: 2, 3, … as many as ``moduli`` has rows.
        cu_seqlens: int32 or int64 [documents + 1]: boundaries of texts packed in each row. No
            n-gram spans two.
        mask: bool or integers, in the shape of ``ids``: 0 for what is not text, such as the padding
            of a batch on any side. N-grams reach over it, and its own consist of padding.
        lengths: int32 or int64 [batch], or [] for ids [seq], instead of ``mask``: the tokens of
            each row before its padding. They are checked on the CPU.

    Numbers may be sequences or tensors; tensors are read, which waits for their device, and cannot
    be compiled.

    Returns:
        int64 [batch, seq, sizes * heads], or [seq, sizes * heads]; the heads of a size are
        neighbours.

    Raises:
        ValueError: Shapes or numbers do not fit together.
        TypeError: Ids, history, cu_seqlens or lengths are not int32 or int64, or the mask is not
            of integers.

    Examples:
        >>> import torch, posembed as pe
        >>> hash = dict(multipliers=(3, 5), moduli=((11, 13),), offsets=((0, 11),), boundary=0)
        >>> pe.functional.ngram_ids(torch.tensor([[7, 2, 0, 4]]), **hash).tolist()
        [[[10, 19], [4, 22], [10, 21], [1, 23]]]
        >>> last = torch.tensor([[2]])  # the token before: a call for one token more
        >>> pe.functional.ngram_ids(torch.tensor([[0]]), history=last, **hash).tolist()
        [[[10, 21]]]
    """
    numbers = lists(multipliers, moduli, () if offsets is None else offsets, sizes or (), rule)
    text = text_mask(ids, mask, lengths)
    return hashed(ids, *numbers, boundary, padding, rule, history, cu_seqlens, text)


def text_mask(ids: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Which ids are text; None for all. Both arguments, or lengths that do not fit, are errors."""
    if lengths is None:
        return mask
    if mask is not None:
        raise ValueError("lengths: expected none beside a mask")
    return _NGRAM_MASK(ids, lengths)


def hashed(ids: Tensor, *options: Any) -> Tensor:
    """:func:`ngram_ids` with the operator's arguments, which are slow to make for one token."""
    return _NGRAM_IDS(ids, *options)


def lists(
    multipliers: Numbers, moduli: Table, offsets: Table, sizes: Sequence[int], rule: str
) -> tuple[Sequence[int], ...]:
    """Multipliers, moduli, offsets and sizes as the operator takes them.

    Raises ValueError if tables do not have a row for each size and a number for each head.
    """
    numbers = multipliers.tolist() if isinstance(multipliers, Tensor) else multipliers
    heads = 0 if rule == "xor" else len(numbers)
    rows = len(sizes) or (len(numbers) - 1 if rule == "xor" else 0)
    return (
        numbers,
        _flattened("moduli", moduli, rows, heads),
        () if len(offsets) == 0 else _flattened("offsets", offsets, rows, heads),
        sizes,
    )


def _flattened(name: str, table: Table, rows: int, heads: int) -> Sequence[int]:
    """The numbers of ``table`` in one list; 0 rows or heads are any number of them."""
    nested = table.tolist() if isinstance(table, Tensor) else table
    widths = {len(row) if isinstance(row, Sequence) else 0 for row in nested}
    fits = len(widths) == 1 and 0 not in widths and (heads or max(widths)) in widths
    if not fits or (rows or len(nested)) != len(nested):
        raise ValueError(
            f"{name}: expected [{rows or 'sizes'}, {heads or 'heads'}] numbers, got {nested!s:.200}"
        )
    return [number for row in nested for number in row]


def derived_multipliers(count: int, vocab_size: int, layer: int, seed: int) -> list[int]:
    """The multipliers of a layer of qwen4_exp."""
    return _NGRAM_MULTIPLIERS(count, vocab_size, layer, seed)


def derived_primes(count: int, start: int, skip: int) -> list[int]:
    """The primes from ``start`` on, without the first ``skip``."""
    return _NGRAM_PRIMES(count, start, skip)
