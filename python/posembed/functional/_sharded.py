"""Functions for DTensors: each process calls the operator with its shard of every argument.

The shards are DTensor's local tensors, so gradients need no sharding rules. torch's own sharding
rules would not work: their cache ignores strings such as the layout, and a rule does not know the
first row or position of a process's shard.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from posembed.functional._split import Split

LAYOUTS = {"bshd": "bsh.", "bhsd": "bhs.", "sbhd": "sbh.", "thd": "sh."}


def _call(name: str, in_place: bool, *arguments: Any) -> Any:
    return getattr(torch.ops.posembed, name + "_" * in_place).default(*arguments)


def _differ(query: Tensor, key: Tensor | None) -> bool:
    """Whether query and key need separate calls, for example if only one has split heads."""
    both = isinstance(query, DTensor) and isinstance(key, DTensor)
    return both and query.placements != key.placements  # type: ignore[attr-defined, union-attr]


def _letters_of(layout: str) -> str:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'bshd', 'bhsd', 'sbhd' or 'thd', got {layout!r}")
    return LAYOUTS[layout]


def _pair(query: Tensor, key: Tensor | None, letters: str) -> dict[str, tuple[Tensor, str]]:
    pair = {"query": (query, letters)}
    return pair if key is None else {**pair, "key": (key, letters.replace("h", "k"))}


def _positions(
    split: Split, positions: Tensor | None, offset: int, letters: str
) -> tuple[Tensor | None, int]:
    """This process's positions; consecutive ones need a tensor if the sequence is split."""
    if positions is None and split.has("s"):
        end = offset + split.sizes["s"]
        positions, offset = torch.arange(offset, end, device=split.device), 0
    if positions is None:
        return None, offset
    names = ".bs" if "b" in letters else "..s"
    return split.local("positions", positions, names[-positions.dim() :], "bshk"), offset


def rotary(
    query: Tensor,
    key: Tensor | None,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: int,
    inverse: bool,
    cu_seqlens: Tensor | None,
    frequencies: Tensor | None,
    in_place: bool = False,
) -> Any:
    """:func:`posembed.functional.rotary`; heads, batch and sequence may be split."""
    options = (positions, layout, offset, inverse, cu_seqlens, frequencies, in_place)
    if key is not None and _differ(query, key):
        of_key = torch.ops.posembed.rotary_for_keys.default(spec)
        return rotary(query, None, spec, *options), rotary(key, None, of_key, *options)
    letters = _letters_of(layout)
    pair = _pair(query, key, letters)
    split = Split(pair, independent="hk")
    if cu_seqlens is not None and split.has("s"):
        raise ValueError("cu_seqlens: expected positions instead where the sequence is split")
    positions, offset = _positions(split, positions, offset, letters)
    result = _call(
        "rotary" if key is None else "rotary_pair",
        in_place,
        *(split.local(name, *each) for name, each in pair.items()),
        spec,
        positions,
        layout,
        offset,
        inverse,
        split.local("cu_seqlens", cu_seqlens, "."),
        split.local("frequencies", frequencies, ".", "bsh"),
    )
    return _rotated(split, pair, result, in_place)


def _rotated(split: Split, pair: dict[str, tuple[Tensor, str]], result: Any, in_place: bool) -> Any:
    """The input tensors if in place, otherwise the results as DTensors."""
    if in_place:
        given = tuple(tensor for tensor, _ in pair.values())
    else:
        parts = (result,) if isinstance(result, Tensor) else result
        given = tuple(
            split.result(part, letters, tensor.shape)
            for part, (tensor, letters) in zip(parts, pair.values(), strict=True)
        )
    return given[0] if len(given) == 1 else given


def mla_rotary(
    query: Tensor,
    key_rope: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: int,
    inverse: bool,
) -> Any:
    """:func:`posembed.functional.mla_rotary`; batch, sequence and the query's heads may be split.

    All heads share the key, so it is replicated if heads are split.
    """
    letters = _letters_of(layout)
    of_key = letters.replace("h", "." if key_rope.dim() == query.dim() else "")
    drivers = {"query": (query, letters), "key_rope": (key_rope, of_key)}
    split = Split(drivers)
    positions, offset = _positions(split, positions, offset, letters)
    result = torch.ops.posembed.mla_rotary.default(
        split.local("query", query, letters),
        split.local("key_rope", key_rope, of_key),
        spec,
        positions,
        layout,
        offset,
        inverse,
    )
    return _rotated(split, drivers, result, in_place=False)


def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: int,
    eps: float,
    weight_offset: float,
    in_place: bool = False,
) -> Any:
    """:func:`posembed.functional.norm_rotary`; heads, batch and sequence may be split."""
    letters = _letters_of(layout)
    pair = _pair(query, key, letters)
    split = Split(pair, independent="hk")
    positions, offset = _positions(split, positions, offset, letters)
    result = _call(
        "norm_rotary",
        in_place,
        *(split.local(name, *each) for name, each in pair.items()),
        split.local("query_weight", query_weight, ".", "bsh"),
        split.local("key_weight", key_weight, ".", "bsk"),
        spec,
        positions,
        layout,
        offset,
        eps,
        weight_offset,
    )
    return _rotated(split, pair, result, in_place)


def rotary_tables(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    layout: str,
    *options: Any,
    in_place: bool = False,
) -> Any:
    """:func:`posembed.functional.rotary_tables`; heads, batch and sequence may be split."""
    if key is not None and _differ(query, key):
        tables = (cos, sin, layout, *options)
        rotated = rotary_tables(query, None, *tables, in_place=in_place)
        return rotated, rotary_tables(key, None, *tables, in_place=in_place)
    letters = _letters_of(layout)
    pair = _pair(query, key, letters)
    split = Split(pair, independent="hk")
    of_table = "bs."[-cos.dim() :]
    result = _call(
        "rotary_tables" if key is None else "rotary_tables_pair",
        in_place,
        *(split.local(name, *each) for name, each in pair.items()),
        split.local("cos", cos, of_table, "bsh"),
        split.local("sin", sin, of_table, "bsh"),
        layout,
        *options,
    )
    return _rotated(split, pair, result, in_place)


def learned_add(
    x: Tensor, weight: Tensor, positions: Tensor | None, offset: int, first_row: int
) -> Tensor:
    """:func:`posembed.functional.learned_add`; batch, sequence and columns may be split."""
    split = Split({"x": (x, "bsD")})
    positions, offset = _positions(split, positions, offset, "bsD")
    part = torch.ops.posembed.learned_add.default(
        split.local("x", x, "bsD"),
        split.local("weight", weight, ".D", "bs"),
        positions,
        offset,
        first_row,
    )
    return split.result(part, "bsD", x.shape)


def learned_encode(weight: Tensor, positions: Tensor, first_row: int) -> Tensor:
    """:func:`posembed.functional.learned_encode`; positions and columns may be split."""
    letters, split = _looked_up("positions", positions, weight, ".D")
    part = torch.ops.posembed.learned_encode.default(
        split.local("weight", weight, ".D", letters),
        split.local("positions", positions, letters),
        first_row,
    )
    return split.result(part, letters + "D", (*positions.shape, weight.shape[1]))


def sinusoidal(
    x: Tensor, spec: str, positions: Tensor | None, offset: int, scale: Tensor | None
) -> Tensor:
    """:func:`posembed.functional.sinusoidal`; batch and sequence may be split."""
    letters = "s." if x.dim() == 2 else "bs."
    split = Split({"x": (x, letters)})
    positions, offset = _positions(split, positions, offset, letters)
    part = torch.ops.posembed.sinusoidal_add.default(
        split.local("x", x, letters),
        spec,
        positions,
        offset,
        split.local("scale", scale, ".", "bs"),
    )
    return split.result(part, letters, x.shape)


def sinusoidal_encode(
    positions: Tensor, spec: str, scale: Tensor | None, dtype: torch.dtype | None, width: int
) -> Tensor:
    """:func:`posembed.functional.sinusoidal_encode`; all dimensions of positions may be split."""
    letters = string.ascii_lowercase[: positions.dim()]
    split = Split({"positions": (positions, letters)})
    part = torch.ops.posembed.sinusoidal_encode.default(
        split.local("positions", positions, letters),
        spec,
        split.local("scale", scale, ".", letters),
        dtype=dtype,
    )
    return split.result(part, letters + ".", (*positions.shape, width))


def _looked_up(name: str, ids: Tensor, weight: Tensor, of_weight: str) -> tuple[str, Split]:
    """The letters of ids, and the split of a lookup; plain tables are replicated."""
    letters = string.ascii_lowercase[: ids.dim()]
    drivers = {name: (ids, letters)}
    if isinstance(weight, DTensor):
        drivers["weight"] = (weight, of_weight)
    return letters, Split(drivers)


def _check_gradient(gradient: str, weight: Tensor) -> None:
    if gradient == "rows" and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("gradient: expected 'dense', as a DTensor has no sparse parts, got 'rows'")


def embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int,
    scale: float,
    scale_grad_by_freq: bool,
    vocabulary_start: int,
    gradient: str,
) -> Tensor:
    """:func:`posembed.functional.embedding`; ids, rows or columns may be split.

    If rows are split, the result is a partial sum, as with torch's own tables.
    """
    letters, split = _looked_up("ids", ids, weight, "VD")
    if vocabulary_start >= 0:
        raise ValueError(f"vocabulary_start: expected none for DTensors, got {vocabulary_start}")
    _check_gradient(gradient, weight)
    if scale_grad_by_freq and any(split.has(letter) for letter in letters):
        raise ValueError(
            "scale_grad_by_freq: expected ids that are not split, because each process counts its "
            f"own, got {split.placements(letters)}"
        )
    own_ids = split.local("ids", ids, letters)
    table: Tensor = split.local("weight", weight, "VD", letters)  # type: ignore[assignment]
    if split.has("V"):
        # An id outside the whole table must raise; one outside this shard is in another's.
        nothing = table.detach().new_zeros(()).expand(weight.shape[0], 1)
        torch.ops.posembed.embedding.default(nothing, own_ids)
        vocabulary_start = split.first("V")
    part = torch.ops.posembed.embedding.default(
        table, own_ids, padding_idx, scale, scale_grad_by_freq, vocabulary_start, gradient
    )
    return split.result(part, letters + "D", (*ids.shape, weight.shape[1]), "V")


def token_bag(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    padding_idx: int,
    include_last_offset: bool,
    mode: str,
    weights: Tensor | None,
    gradient: str,
) -> Tensor:
    """:func:`posembed.functional.token_bag`; columns and bags of one size may be split."""
    of_ids = "b." if ids.dim() == 2 else "." * ids.dim()
    drivers = {"ids": (ids, of_ids)}
    if isinstance(weight, DTensor):
        drivers["weight"] = (weight, ".D")
    split = Split(drivers)
    _check_gradient(gradient, weight)
    part = torch.ops.posembed.token_bag.default(
        split.local("weight", weight, ".D", "b"),
        split.local("ids", ids, of_ids),
        split.local("offsets", offsets, "."),
        padding_idx,
        include_last_offset,
        mode,
        split.local("weights", weights, of_ids, "D"),
        gradient,
    )
    bags = ids.shape[0] if ids.dim() == 2 else part.shape[0]
    return split.result(part, "bD", (bags, weight.shape[1]))


def with_rows(function: Callable[[Tensor], Tensor], weight: Any) -> Tensor:
    """Applies a function that changes a table's rows; the table must be replicated.

    Randomly drawn rows are those of the first process.
    """
    for place in weight.placements:
        if not place.is_replicate():
            raise ValueError(
                f"weight: expected Replicate(), got {place!r}; change the number of rows before "
                "the table is sharded, or redistribute it"
            )
    return DTensor.from_local(
        function(weight.to_local()), weight.device_mesh, weight.placements, run_check=True
    )


def _local_options(split: Split, options: dict[str, Any]) -> dict[str, Any]:
    """Options with this process's shard of masks and positions, whose batch may be split."""
    local = dict(options)
    for name, value in options.items():
        if isinstance(value, Tensor):
            letters = "." if name == "cu_seqlens" else "b."[-value.dim() :]
            local[name] = split.local(name, value, letters)
    return local


def of_slopes(
    function: Callable[..., Tensor], slopes: Tensor, *lengths: int, **options: Any
) -> Tensor:
    """A function of slopes, such as the bias for given lengths; heads may be split."""
    letters = ".h"[-slopes.dim() :]
    split = Split({"slopes": (slopes, letters)})
    own = split.local("slopes", slopes, letters)
    part = function(own, *lengths, **_local_options(split, options))
    if not lengths:
        return split.result(part, letters, slopes.shape)
    dim = max(part.dim() - 3, 0)  # [heads, query, key] after a batch, or [heads, query]
    shape = list(part.shape)
    shape[dim] = slopes.shape[-1]
    return split.result(part, "." * dim + "h" + "." * (part.dim() - dim - 1), shape)


def of_scores(
    function: Callable[..., Tensor], scores: Tensor, slopes: Tensor, **options: Any
) -> Tensor:
    """A function of scores, such as their softmax; batch and heads may be split."""
    letters = "bh.."[-scores.dim() :]
    split = Split({"scores": (scores, letters)})
    part = function(
        split.local("scores", scores, letters),
        split.local("slopes", slopes, ".h"[-slopes.dim() :], "b"),
        **_local_options(split, options),
    )
    return split.result(part, letters, scores.shape)


def alibi_attention(
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    dropout: float,
    **options: Any,
) -> Tensor:
    """:func:`posembed.functional.alibi_attention`; batch and heads may be split.

    A single key head stays replicated. Several are split like the query heads, so each process has
    the keys of its queries.
    """
    if dropout > 0:
        raise ValueError(f"dropout: expected 0 for DTensors, got {dropout}")
    of_key = "b..." if key.shape[1] == 1 else "bh.."
    split = Split({"query": (query, "bh.."), "key": (key, of_key), "value": (value, of_key)})
    heads, key_heads = query.shape[1], key.shape[1]
    parts = math.prod(
        split.mesh.size(dim) for dim, split_here in enumerate(split.letters) if "h" in split_here
    )
    if key_heads not in (1, heads) and (heads % parts or key_heads % parts):
        raise ValueError(
            f"key: expected heads that {parts} processes split evenly, got {key_heads} for "
            f"{heads} heads of the query"
        )
    part = function(
        split.local("query", query, "bh.."),
        split.local("key", key, of_key, "h"),
        split.local("value", value, of_key, "h"),
        split.local("slopes", slopes, ".h"[-slopes.dim() :], "b"),
        **_local_options(split, options),
    )
    return split.result(part, "bh..", (*query.shape[:3], value.shape[3]))


def relative_bias(weight: Tensor, query_length: int, key_length: int, *options: Any) -> Tensor:
    """:func:`posembed.functional.relative_bias`; heads may be split."""
    split = Split({"weight": (weight, ".h")})
    part = torch.ops.posembed.relative_bias.default(
        split.local("weight", weight, ".h"), query_length, key_length, *options
    )
    return split.result(part, "h..", (weight.shape[1], query_length, key_length))
