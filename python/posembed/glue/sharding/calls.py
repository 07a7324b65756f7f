"""Calls of operators with DTensors: each process passes its shard of every argument.

The shards are DTensor's local tensors, so gradients need no sharding rules. torch's own sharding
rules would not work: their cache ignores strings such as the layout, and a rule does not know the
first row or position of a process's shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posembed.glue.dimensions import ARGUMENTS, TABLE, letters_of
from posembed.glue.sharding.split import Split


class Call:
    """A call of the operator ``name``, or of its in-place variant, with arguments in order."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name = name
        own = name.removesuffix("_")
        self.given = dict(zip(ARGUMENTS[own], arguments, strict=False))
        self.known = TABLE[own].arranged(self.given.get("layout"))
        if self.given.get("all_heads"):
            self.known = self.known.with_whole_heads()
        self.letters = self.known.letters()
        drivers = {each: self._driver(each) for each in self.known.leading}
        leading = {*"".join(TABLE[own].leading.values()), ".", "?", "~"}
        for each, letters in self.known.following.items():  # a table has letters of its own
            has_own = not leading.issuperset(letters.partition("/")[0])
            if has_own and isinstance(self.given.get(each), DTensor):
                drivers[each] = self._driver(each)
        self.split = Split(drivers, independent="hk")

    def _driver(self, name: str) -> tuple[Tensor, str]:
        return self.given[name], letters_of(self.letters[name], self.given[name].dim())

    def _number_tokens(self) -> None:
        """Passes positions to processes that have a part of the sequence."""
        if "offset" in self.given and self.split.has("s"):
            if self.given.get("cu_seqlens") is not None:
                raise ValueError(
                    "cu_seqlens: expected positions instead where the sequence is split"
                )
            if self.given["positions"] is None:
                start, device = self.given["offset"], self.split.device
                end = start + self.split.sizes["s"]
                self.given["positions"] = torch.arange(start, end, device=device)
                self.given["offset"] = 0

    def local(self, name: str) -> Tensor | None:
        """This process's shard of a tensor."""
        tensor = self.given.get(name)
        if tensor is None:
            return None
        given = self.letters[name]
        of_samples = name == "slopes" and tensor.dim() == 3  # ALiBi's
        letters = "b.h" if of_samples else letters_of(given, tensor.dim())
        if len(letters) != tensor.dim():
            letters = "." * tensor.dim()  # the operator refuses it
        apart = given.partition("/")[2] + "k" * ("h" in letters) + "h" * ("k" in letters)
        return self.split.local(name, tensor, letters, set(self.split.sizes) - set(apart))

    def run(self) -> Any:
        """Calls the operator; its results are DTensors."""
        self._number_tokens()
        for name in self.letters:
            if name in self.given:
                self.given[name] = self.local(name)
        operator = getattr(torch.ops.posembed, self.name).default
        results = operator(*self.given.values())
        if results is None or isinstance(results, Tensor):
            return results if results is None else self._whole(results, self.known.results[0])
        return tuple(self._whole(*each) for each in zip(results, self.known.results, strict=True))

    def _whole(self, part: Tensor, like: str) -> Tensor:
        """A DTensor: a partial sum where the mesh splits a dimension that no result has."""
        letters = self.split.drivers.get(like) or letters_of(like, part.dim())
        summed = set(self.split.sizes) - set("".join(self.known.results_letters()))
        return self.split.result(part, letters, summed)


def call(name: str, *arguments: Any) -> Any:
    """Calls an operator, or one of the functions below, which also have other work."""
    if name in BY_HAND:
        return BY_HAND[name](name, *arguments)
    return Call(name, *arguments).run()


def rotated_pair(name: str, query: Tensor, key: Tensor, *options: Any) -> Any:
    """Rotates query and key together, or apart if they are split differently."""
    both = isinstance(query, DTensor) and isinstance(key, DTensor)
    if not both or query.placements == key.placements:  # type: ignore[attr-defined]
        return Call(name, query, key, *options).run()
    single, of_key = name.replace("_pair", ""), options
    if not single.startswith("rotary_tables"):  # xPos scales keys by the inverse
        of_key = (torch.ops.posembed.rotary_for_keys.default(options[0]), *options[1:])
    return Call(single, query, *options).run(), Call(single, key, *of_key).run()


def _check_gradient(gradient: str, weight: Tensor) -> None:
    if gradient == "rows" and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("gradient: expected 'dense', as a DTensor has no sparse parts, got 'rows'")


def embedding(
    name: str,
    weight: Tensor,
    ids: Tensor,
    padding_idx: int,
    scale: float,
    scale_grad_by_freq: bool,
    vocabulary_start: int,
    gradient: str,
) -> Any:
    """Looks up rows; if rows are split, the result is a partial sum, as with torch's own tables."""
    options = (padding_idx, scale, scale_grad_by_freq, vocabulary_start, gradient)
    call = Call(name, weight, ids, *options)
    letters = letters_of("*", ids.dim())
    if vocabulary_start >= 0:
        raise ValueError(f"vocabulary_start: expected none for DTensors, got {vocabulary_start}")
    _check_gradient(gradient, weight)
    if scale_grad_by_freq and any(call.split.has(letter) for letter in letters):
        raise ValueError(
            "scale_grad_by_freq: expected ids that are not split, because each process counts its "
            f"own, got {call.split.placements(letters)}"
        )
    if call.split.has("V"):
        # An id outside the whole table must raise; one outside this shard is in another's.
        nothing = call.local("weight").detach().new_zeros(()).expand(weight.shape[0], 1)  # type: ignore[union-attr]
        torch.ops.posembed.embedding.default(nothing, call.local("ids"))
        call.given["vocabulary_start"] = call.split.first("V")
    return call.run()


def token_bag(name: str, weight: Tensor, *arguments: Any) -> Any:
    """Pools rows."""
    call = Call(name, weight, *arguments)
    _check_gradient(call.given.get("gradient", "dense"), weight)
    return call.run()


def norm_rotary(name: str, query: Tensor, key: Tensor, *arguments: Any) -> Any:
    """Norms and rotates; tables whose gradients are sums over heads need both split alike."""
    call = Call(name, query, key, *arguments)
    learned = [
        each for each in ("cos", "sin") if getattr(call.given.get(each), "requires_grad", False)
    ]
    if learned and torch.is_grad_enabled() and query.placements != key.placements:  # type: ignore[attr-defined]
        raise ValueError(
            f"{learned[0]}: expected no gradient where query and key are split differently, got "
            f"query {query.placements}, key {key.placements}"  # type: ignore[attr-defined]
        )
    return call.run()


def ngram_ids(name: str, ids: Tensor, *arguments: Any) -> Any:
    """Hashes n-grams, which need the tokens before: the sequence must be whole."""
    call = Call(name, ids, *arguments)
    if call.split.has("s"):
        raise ValueError(
            f"ids: expected a sequence in one piece, as n-grams reach back, got {ids.placements}"  # type: ignore[attr-defined]
        )
    if call.given["history"] is not None and call.given["cu_seqlens"] is not None:
        raise ValueError("history: expected none with cu_seqlens for DTensors")
    return call.run()


def alibi_attention(name: str, query: Tensor, key: Tensor, *arguments: Any) -> Any:
    """Attends; a single key head stays replicated, and several are split like the query heads.

    So each process has the keys of its queries.
    """
    dropout = dict(zip(ARGUMENTS[name], (query, key, *arguments), strict=False))["dropout"]
    if dropout > 0:
        raise ValueError(f"dropout: expected 0 for DTensors, got {dropout}")
    call = Call(name, query, key, *arguments)
    split = call.split
    heads, key_heads = query.shape[1], key.shape[1]
    parts = math.prod(split.mesh.size(dim) for dim, has in enumerate(split.letters) if "h" in has)
    if key_heads not in (1, heads) and (heads % parts or key_heads % parts):
        raise ValueError(
            f"key: expected heads that {parts} processes split evenly, got {key_heads} for "
            f"{heads} heads of the query"
        )
    return call.run()


BY_HAND: dict[str, Callable[..., Any]] = {
    "rotary_pair": rotated_pair,
    "rotary_pair_": rotated_pair,
    "rotary_tables_pair": rotated_pair,
    "rotary_tables_pair_": rotated_pair,
    "embedding": embedding,
    "token_bag": token_bag,
    "ngram_ids": ngram_ids,
    "norm_rotary": norm_rotary,
    "alibi_attention": alibi_attention,
}
