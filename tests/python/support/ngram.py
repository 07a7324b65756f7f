"""N-gram hashes by their definition, in Python's integers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from support.case import OperatorCase


def signed(number: int) -> int:
    """A number wrapped to 64 bits, as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


def hashed(tokens: Sequence[int], multipliers: Sequence[int], head: int, rule: str) -> int:
    """The hash of an n-gram, newest token first."""
    if rule == "rolling":
        oldest_first = reversed(tokens)
        return signed(sum(t * multipliers[head] ** i for i, t in enumerate(oldest_first)))
    if rule == "modular":
        return sum(t * multipliers[head] ** i for i, t in enumerate(tokens))
    result = 0
    for token, multiplier in zip(tokens, multipliers, strict=False):
        result ^= (token * multiplier) % 2**64
    return signed(result)


def before(text: list[int], boundary: int | None, padding: int) -> list[int]:
    """What each of the last tokens counts as, for the newest."""
    if boundary is not None and boundary in text[:-1]:
        last = len(text) - 2 - text[-2::-1].index(boundary)
        text = [padding] * (last + 1) + text[last + 1 :]
    return text


def reference(
    ids: Tensor,
    *,
    multipliers: Sequence[int],
    moduli: Sequence[Sequence[int]],
    offsets: Sequence[Sequence[int]] | None = None,
    boundary: int | None = None,
    history: Tensor | None = None,
    padding: int | None = None,
    rule: str = "xor",
    sizes: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The ids of ``functional.ngram_ids``, token by token."""
    sizes = sizes or range(2, len(moduli) + 2)
    longest, fill = sizes[-1], padding if padding is not None else boundary or 0
    ends = [ids.shape[-1]] if cu_seqlens is None else cu_seqlens.tolist()[1:]
    if lengths is not None:
        mask = torch.arange(ids.shape[-1], device=ids.device) < lengths.unsqueeze(-1)
    is_text = (torch.ones_like(ids) if mask is None else mask).reshape(-1, ids.shape[-1]).tolist()
    lasts = None if history is None else history.reshape(-1, longest - 1).tolist()
    result = []
    for row, tokens in enumerate(ids.reshape(-1, ids.shape[-1]).tolist()):
        begin = 0
        for document, end in enumerate(ends):
            last = [fill] * (longest - 1)
            if lasts is not None:
                last = lasts[(row * len(ends) + document) % len(lasts)]
            text = last
            for at in range(begin, end):
                newest_first = [fill] * longest
                if is_text[row][at]:
                    text = [*text, tokens[at]]
                    newest_first = before(text[-longest:], boundary, fill)[::-1]
                result += [
                    hashed(newest_first[:size], multipliers, head, rule) % modulus
                    + (0 if offsets is None else offsets[i][head])
                    for i, size in enumerate(sizes)
                    for head, modulus in enumerate(moduli[i])
                ]
            begin = end
    return torch.tensor(result).view(*ids.shape, -1).to(ids.device)


# From integers to integers: ngram/test_ngram_ids.py has what the shared tests have.
CASES: list[OperatorCase] = []
