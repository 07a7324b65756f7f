"""The rule of operators whose dimensions are known: copies become a larger dimension."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from posembed.glue.dimensions import ARGUMENTS, TABLE, letters_of
from posembed.glue.vmap.copies import loop_rule

# Copies are merged into the first of these that every mapped tensor and every result has. Only
# mapped positions of tokens without a batch lead to "s", so positions are then never consecutive.
ORDER = "*hbsD"


def front(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """Moves the mapped dimension to the front; None: expands the tensor to ``size`` views."""
    if mapped is None:
        return tensor.unsqueeze(0).expand(size, *tensor.shape)
    return tensor.movedim(mapped, 0)


def _together(given: str) -> str:
    """The heads of query and key take copies together."""
    return given.partition("/")[0].replace("k", "h")


class Merging:
    """A mapped call, and the dimension ``into`` that its copies are merged into, if any."""

    def __init__(self, name: str, size: int, in_dims: tuple[int | None, ...], args: Any) -> None:
        names = ARGUMENTS[name]
        given = dict(zip(names, args, strict=False))
        known = TABLE[name].arranged(given.get("layout", names.get("layout")))
        order = ORDER
        if given.get("all_heads"):
            known = known.with_whole_heads()
        if given.get("all_heads") or "order" in names:  # tokens of copies would be counted on
            order = order.replace("s", "")
        self.letters = {each: _together(given) for each, given in known.letters().items()}
        self.results = [_together(given) for given in known.results_letters()]
        self.leading = known.leading
        self.size = size
        self.tensors = {
            each: (arg, dim)
            for each, arg, dim in itertools.zip_longest(names, args, in_dims)
            if isinstance(arg, Tensor)
        }
        mapped = [each for each, (_, dim) in self.tensors.items() if dim is not None]
        self.shared = not any(each in known.following for each in mapped)
        everywhere = [*self.results, *(self._mergeable(each) for each in mapped)]
        self.into = next((x for x in order if all(x in given for given in everywhere)), "")
        if given.get("by_sample") or not all(map(self._fits, self.tensors)):
            self.into = ""  # ALiBi's slopes of each sample
        self.sizes = {
            front(tensor, dim, 1).shape[1 + self._own(each).index(self.into)]
            for each, (tensor, dim) in self.tensors.items()
            if self.into and self.into in self._own(each)
        }

    def _fits(self, name: str) -> bool:
        tensor, mapped = self.tensors[name]
        return len(self._own(name)) == tensor.dim() - (mapped is not None)

    def _mergeable(self, name: str) -> str:
        """The letters that can take copies: what all heads share gets no heads of its own."""
        own, letters = self._own(name), self.letters[name]
        tensor, mapped = self.tensors[name]
        several = "h" in own and front(tensor, mapped, 1).shape[1 + own.index("h")] > 1
        return letters if name in self.leading or several else letters.replace("h", "")

    def _own(self, name: str, more: int = 0) -> str:
        """The letters of a tensor's dimensions without the mapped one, and with ``more``."""
        tensor, mapped = self.tensors[name]
        return letters_of(self.letters[name], tensor.dim() - (mapped is not None) + more)

    def argument(self, name: str) -> Tensor:
        """The tensor of all copies, or the one that they share."""
        tensor, mapped = self.tensors[name]
        if self.into not in self.letters[name]:
            return tensor
        copies = front(tensor, mapped, self.size)
        if self.into == "*":
            return copies
        follows = self.shared and name not in self.leading
        letters = self._own(name)
        if self.into not in letters:
            if follows:
                return tensor
            letters = self._own(name, more=1)
            copies = copies.unsqueeze(1 + letters.index(self.into))
        dim = letters.index(self.into)
        copies = copies.movedim(0, dim)
        if (
            self.into == "h"
            and "h~" in self.letters[name]
            and copies.shape[dim + 1] == 1
            and follows
        ):
            return tensor  # one table for every head
        if self.into == "b" and copies.shape[dim + 1] == 1:  # one row for every sequence
            if follows:
                return tensor
            rows = max(self.sizes - {1}, default=1)
            copies = copies.expand(*copies.shape[: dim + 1], rows, *copies.shape[dim + 2 :])
        return copies.flatten(dim, dim + 1)

    def split(self, letters: str, result: Tensor) -> tuple[Tensor, int]:
        """A result with the mapped dimension, and the index of that."""
        if self.into == "*":
            return result, 0
        dim = letters_of(letters, result.dim()).index(self.into)
        copies = torch.unflatten(result, dim, (self.size, result.shape[dim] // self.size))
        return copies if self.sizes else copies.squeeze(dim + 1), dim


def merged_rule(
    name: str, operator: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any, **options: Any
) -> Any:
    """Calls an operator once, or once per copy where no dimension can take the copies."""
    call = Merging(name, info.batch_size, in_dims, args)
    if not call.into:
        return loop_rule(operator, info, in_dims, *args, **options)
    merged = [
        call.argument(each) if each in call.tensors else arg
        for each, arg in zip(ARGUMENTS[name], args, strict=False)
    ]
    results = operator(*merged, **options)
    if isinstance(results, Tensor):
        return call.split(call.results[0], results)
    parts = (call.split(*each) for each in zip(call.results, results, strict=True))
    return tuple(zip(*parts, strict=True))


def ngram_ids_rule(
    info: Any, in_dims: tuple[int | None, ...], ids: Tensor, *given: Any, **options: Any
) -> Any:
    """ngram_ids: mapped sequences become more sequences.

    A history of packed documents has rows of batch and documents together.
    """
    operator = torch.ops.posembed.ngram_ids.default
    history_of_documents = len(given) > 8 and given[7] is not None and given[8] is not None
    if history_of_documents:
        return loop_rule(operator, info, in_dims, ids, *given, **options)
    return merged_rule("ngram_ids", operator, info, in_dims, ids, *given, **options)
