"""Hashes of n-grams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def ngram_ids(
    ids: Tensor,
    multipliers: Sequence[int],
    moduli: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    boundary: int | None,
    padding: int | None,
    rule: str,
    history: Tensor | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    count = len(multipliers) - 1 if rule == "xor" else len(moduli) // len(multipliers)
    sizes = sizes or range(2, count + 2)
    longest, heads = sizes[-1], len(moduli) // len(sizes)
    fill = padding if padding is not None else 0 if boundary is None else boundary
    tokens = ids.long().reshape(-1, ids.shape[-1])  # [batch, seq]
    text = None if mask is None else mask.reshape(tokens.shape) != 0
    past = _before(tokens, history, cu_seqlens, text, fill)

    # Numbers stay numbers: a program has no constants for them.
    seeds = [0] if rule == "xor" else list(multipliers)  # heads share a hash of products
    hashes = [torch.zeros_like(tokens)] * len(seeds)
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    columns: list[Tensor] = []
    text_before: list[Tensor] = []  # newest first
    for back in range(longest):
        token = past(back)
        if boundary is not None and back > 0:
            ended = ended | (token == boundary)
            token = torch.where(ended, fill, token)
        if text is not None:
            token = torch.where(text, token, fill)
        text_before.append(token)
        if rule == "rolling":
            hashes = [hash * seed + token for hash, seed in zip(hashes, seeds, strict=True)]
        elif rule == "xor":
            hashes = [hashes[0] ^ (token * multipliers[back])]
        if back + 1 in sizes and rule == "modular":
            these = moduli[len(columns) : len(columns) + heads]
            columns += [
                _modular(text_before, seed, modulus)
                for seed, modulus in zip(seeds, these, strict=True)
            ]
        elif back + 1 in sizes:
            columns += hashes * (heads if rule == "xor" else 1)
    starts = offsets or [0] * len(moduli)
    rows = [
        torch.remainder(hash, modulus) + start
        for hash, modulus, start in zip(columns, moduli, starts, strict=True)
    ]
    return torch.stack(rows, -1).view(*ids.shape, len(moduli))


def _modular(tokens: Sequence[Tensor], multiplier: int, modulus: int) -> Tensor:
    """The polynomial whose highest power has the last token, reduced before each product."""
    result = tokens[-1]
    for token in reversed(tokens[:-1]):
        result = torch.remainder(result, modulus) * multiplier + token
    return result


def _before(
    tokens: Tensor,
    history: Tensor | None,
    cu_seqlens: Tensor | None,
    text: Tensor | None,
    fill: int,
) -> Callable[[int], Tensor]:
    """A function of k that gives the k-th token of text before each, in its document or history."""
    batch, seq = tokens.shape
    at = torch.arange(seq, device=tokens.device)
    document, begin, documents = torch.zeros_like(at), torch.zeros_like(at), 1
    if cu_seqlens is not None:
        document = (at.unsqueeze(-1) >= cu_seqlens[1:]).sum(-1)
        begin, documents = cu_seqlens[document].long(), cu_seqlens.shape[0] - 1
    at, begin = at.expand(batch, seq), begin.expand(batch, seq)
    if text is not None:
        # Text moves to the front of its row, where tokens are counted.
        tokens = tokens.gather(1, text.logical_not().byte().argsort(dim=1, stable=True))
        at = text.cumsum(1) - text.long()
        begin = at.gather(1, begin)

    def before(back: int) -> Tensor:
        place = at - back - begin
        inside = tokens.gather(1, (at - back).clamp_min(0))
        if history is None:
            return torch.where(place >= 0, inside, fill)
        width = history.shape[-1]
        last = history.long().reshape(-1, documents, width).expand(batch, documents, width)
        rows = torch.arange(batch, device=tokens.device).unsqueeze(1)
        found = last[rows, document, (place + width).clamp(0, width - 1)]
        return torch.where(place >= 0, inside, found)

    return before
