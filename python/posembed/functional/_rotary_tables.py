"""Rotation by given cosine and sine tables, for models that compute them."""

from __future__ import annotations

from typing import Literal, TypedDict, TypeVar, cast, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from posembed.glue.gate import Pair, check_tensors, gated

_ROTARY_TABLES = gated(torch.ops.posembed.rotary_tables.default, sharded=True)
_ROTARY_TABLES_PAIR = cast(Pair, gated(torch.ops.posembed.rotary_tables_pair.default, sharded=True))
_ROTARY_TABLES_OUT = gated(torch.ops.posembed.rotary_tables_out.default)
_ROTARY_TABLES_PAIR_OUT = gated(torch.ops.posembed.rotary_tables_pair_out.default)
_ROTARY_TABLES_ = gated(torch.ops.posembed.rotary_tables_.default, sharded=True)
_ROTARY_TABLES_PAIR_ = gated(torch.ops.posembed.rotary_tables_pair_.default, sharded=True)

TableNumerics = Literal["float32", "float32_product"]
Given = TypeVar("Given", Tensor, Tensor | None)

# The layout of a query, by its rank and its head dimension.
LAYOUTS = {(4, -3): "bhsd", (4, -2): "bshd", (3, -2): "thd", (3, -3): "htd"}


class TablesCall(TypedDict, total=False):
    """Options of :func:`rotary_tables`, for type checkers."""

    interleaved: bool
    half_width: bool
    unsqueeze_dim: int
    start: int
    numerics: TableNumerics
    out: Tensor | tuple[Tensor, Tensor] | None


@overload
def rotary_tables(
    query: Tensor, key: None, cos: Tensor, sin: Tensor | None = None, **options: Unpack[TablesCall]
) -> Tensor: ...


@overload
def rotary_tables(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    **options: Unpack[TablesCall],
) -> tuple[Tensor, Tensor]: ...


def rotary_tables(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    half_width: bool = False,
    unsqueeze_dim: int = 1,
    start: int = 0,
    numerics: TableNumerics = "float32",
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates query, or query and key in one kernel launch, by given cosines and sines.

    This is what transformers models call ``apply_rotary_pos_emb``, bit for bit by default. Su et
    al., "RoFormer", arXiv:2104.09864. To compute exact angles in the kernel instead, without
    tables, use :func:`rotary`.

    Args:
        query: float32, float64, bfloat16 or float16 [batch, heads, seq, head_dim] or, with
            ``unsqueeze_dim=2``, [batch, seq, heads, head_dim]; without a batch, [tokens, heads,
            head_dim] or, with ``unsqueeze_dim=0``, [heads, tokens, head_dim]. Components that
            the tables do not cover are copied.
        key: Like ``query`` with any number of heads, or None.
        cos: Floating-point [batch or 1, seq, width] or [seq, width]. The width is the number of
            rotated components, rotary_dim. The columns of a pair (``i`` and ``i + rotary_dim / 2``,
            or adjacent ones if ``interleaved``) are usually equal; otherwise each component is
            turned by its own. Or complex ``freqs_cis`` with a column for each pair, without
            ``sin``. With another dimension, of the size of the heads or 1, where ``query`` has its
            heads, each head has its own table: [batch or 1, heads, seq, width] for
            ``unsqueeze_dim=1``.
        sin: Like ``cos``, or None if ``cos`` is complex.
        interleaved: Pairs (2i, 2i + 1), as GPT-J; otherwise (i, i + rotary_dim / 2), as Llama.
        half_width: Real tables have only one column for each pair.
        unsqueeze_dim: Where to insert the head dimension into the tables: 1 or 2, or 1 or 0 for
            tensors without a batch; negative counts from the end of the unsqueezed table.
        start: The first rotated component.
        numerics: "float32": bit for bit PyTorch's expression, ``query * cos + rotate_half(query) *
            sin`` in the dtype that query and tables promote to, or the complex product in
            float32. "float32_product": float32 throughout, rounded once to the dtype of query.
        out: Output tensor, or (query, key) if there is a key, for inference.

    Returns:
        The rotated query, or (query, key); or ``out``. Gradients flow to query, key and tables.

    Raises:
        ValueError: Shapes or options are incompatible; or, with ``out``, an argument requires grad
            in grad mode or tensors overlap in memory.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> query, key = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 10, 64)
        >>> angles = torch.outer(torch.arange(10.0), pe.RotarySpec(64).frequencies().float())
        >>> query, key = pe.functional.rotary_tables(
        ...     query, key, angles.cos(), angles.sin(), half_width=True
        ... )
    """
    layout = _layout(query, unsqueeze_dim)
    cos, sin = _heads_last(cos, layout), _heads_last(sin, layout)
    options = (interleaved, half_width, start, numerics)
    if layout == "htd":
        swapped = _swapped(query), _swapped(key)
        into = _swapped(out) if isinstance(out, Tensor) else out and tuple(map(_swapped, out))
        result = rotated_by_tables(*swapped, into, cos, sin, "thd", *options)
        if isinstance(result, Tensor):
            return _swapped(result)
        return _swapped(result[0]), _swapped(result[1])
    return rotated_by_tables(query, key, out, cos, sin, layout, *options)


def rotary_tables_(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    half_width: bool = False,
    unsqueeze_dim: int = 1,
    start: int = 0,
    numerics: TableNumerics = "float32",
) -> Tensor | tuple[Tensor, Tensor]:
    """In-place :func:`rotary_tables` for inference; returns query, and key if passed.

    Arguments are as in :func:`rotary_tables`. Tensors may have any strides, but the last dimension
    must be contiguous.

    Returns:
        The same tensors: query, or (query, key).

    Raises:
        ValueError: As in :func:`rotary_tables`; or grad mode is on and an argument requires grad;
            or tensors overlap in memory.
        TypeError: As in :func:`rotary_tables`; or the result would have another dtype, because the
            tables have a wider dtype than query and numerics is "float32".

    Examples:
        >>> import torch, posembed as pe
        >>> query, angles = torch.randn(1, 8, 10, 64), torch.randn(10, 32)
        >>> pe.functional.rotary_tables_(
        ...     query, None, angles.cos(), angles.sin(), half_width=True
        ... ) is query
        True
    """
    layout = _layout(query, unsqueeze_dim)
    cos, sin = _heads_last(cos, layout), _heads_last(sin, layout)
    rows, key_rows = query, key
    if layout == "htd":
        layout, rows, key_rows = "thd", _swapped(query), _swapped(key)
    options = (cos, sin, layout, interleaved, half_width, start, numerics)
    if key is None:
        _ROTARY_TABLES_(rows, *options)
    else:
        _ROTARY_TABLES_PAIR_(rows, key_rows, *options)
    return query if key is None else (query, key)


def _layout(query: Tensor, unsqueeze_dim: int) -> str:
    if type(query) is not Tensor:
        check_tensors(query=query)
    heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - query.dim()
    layout = LAYOUTS.get((query.dim(), heads))
    if layout is None:
        raise ValueError(
            "unsqueeze_dim: expected 1 or 2 for a query [batch, ., ., head_dim], 0 or 1 for one "
            f"without a batch, got {unsqueeze_dim} for {query.dim()} dimensions"
        )
    return layout


def _heads_last(table: Given, layout: str) -> Given:
    """A table with heads as [batch, seq, heads, width], for a query in ``layout``."""
    if isinstance(table, Tensor) and table.dim() == 4 and layout in ("bhsd", "htd"):
        return table.transpose(1, 2)
    return table


def _swapped(tensor: Given) -> Given:
    """[heads, tokens, head_dim] as [tokens, heads, head_dim], or back."""
    return None if tensor is None else tensor.transpose(0, 1)


def rotated_by_tables(
    query: Tensor,
    key: Tensor | None,
    out: Tensor | tuple[Tensor, ...] | None,
    *options: Tensor | str | float | None,
) -> Tensor | tuple[Tensor, Tensor]:
    if out is None:
        if key is None:
            return _ROTARY_TABLES(query, *options)
        return _ROTARY_TABLES_PAIR(query, key, *options)
    if key is None:
        if not isinstance(out, Tensor):
            raise ValueError(f"out: expected a tensor, got {type(out).__name__}")
        _ROTARY_TABLES_OUT(out, query, *options)
        return out
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(f"out: expected (query_out, key_out), got {type(out).__name__}")
    _ROTARY_TABLES_PAIR_OUT(*out, query, key, *options)
    return out
