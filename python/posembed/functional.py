"""The operators as functions: each enters the dispatcher once.

Modules hold options and parameters; everything they compute, they compute here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.overrides
from torch import Tensor

from posembed import _C
from posembed.specification import RotarySpec, SinusoidalSpec

Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
CacheLayout = Literal["nhd", "hnd"]
Gradient = Literal["dense", "rows"]


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    scale: float = 1.0,
    scale_grad_by_freq: bool = False,
    gradient: Gradient = "dense",
) -> Tensor:
    """``scale * weight[ids]``; the table's gradient is accumulated in float32 and repeatable.

    Args:
        ids: int32 or int64 of any shape, each from 0 to num_embeddings - 1.
        weight: float32, float64, bfloat16 or float16 [num_embeddings, embedding_dim].
        padding_idx: A row that gets no gradient.
        scale: Multiplies the result.
        scale_grad_by_freq: Divide a row's gradient by its id's count among ``ids``.
        gradient: "dense", or "rows" for a sparse gradient of the touched rows, each once, sorted by
            id; it has no second derivative.

    Returns:
        [..., embedding_dim] in the dtype of ``weight``.

    Raises:
        ValueError: Shapes or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: An id is outside the table.

    Examples:
        >>> import torch, posembed as pe
        >>> weight = torch.randn(100, 8)
        >>> vectors = pe.functional.embedding(torch.tensor([[1, 99]]), weight)
    """
    return torch.ops.posembed.embedding(  # type: ignore[no-any-return]
        weight,
        ids,
        padding_idx=padding_row(padding_idx, weight.shape[0]),
        scale=scale,
        scale_grad_by_freq=scale_grad_by_freq,
        gradient=gradient,
    )


def learned_add(
    x: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    *,
    offset: int = 0,
    first_row: int = 0,
) -> Tensor:
    """Adds rows of a table of learned positions to x.

    Args:
        x: float32, float64, bfloat16 or float16 [batch, seq, embedding_dim].
        weight: [first_row + max_positions, embedding_dim], dtype of ``x``.
        positions: int32 or int64 [seq] or [batch, seq], from -first_row to max_positions - 1. None:
            ``offset``, ``offset + 1``, and so on.
        offset: Position of the first token where no positions are given.
        first_row: The row of position 0.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: Shapes or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: A position has no row; the text names it.
    """
    return torch.ops.posembed.learned_add(  # type: ignore[no-any-return]
        x, weight, positions, offset=offset, first_row=first_row
    )


def learned_encode(weight: Tensor, positions: Tensor, *, first_row: int = 0) -> Tensor:
    """Rows of a table of learned positions: int32 or int64 [...] -> [..., embedding_dim].

    Arguments and errors as :func:`learned_add`.
    """
    return torch.ops.posembed.learned_encode(weight, positions, first_row=first_row)  # type: ignore[no-any-return]


def learned_extend(
    weight: Tensor,
    max_positions: int,
    *,
    first_row: int = 0,
    method: Literal["linear", "cubic", "repeat"] = "linear",
) -> Tensor:
    """A longer table of positions; see :meth:`posembed.LearnedPositionalEmbedding.extend`.

    Args:
        weight: Floating [first_row + positions, embedding_dim].
        max_positions: Positions that the result has rows for.
        first_row: The row of position 0.
        method: "linear", "cubic" or "repeat".

    Returns:
        [first_row + max_positions, embedding_dim].

    Raises:
        ValueError: ``max_positions`` is less than the table has, or another method.
    """
    return torch.ops.posembed.learned_extend(  # type: ignore[no-any-return]
        weight, max_positions, first_row=first_row, method=method
    )


def roberta_positions(ids: Tensor, padding_idx: int, *, past_length: int = 0) -> Tensor:
    """Positions of tokens among padding, as RoBERTa counts them.

    Args:
        ids: int32 or int64 [..., seq].
        padding_idx: The id of padding.
        past_length: Tokens that are in a cache.

    Returns:
        int64 [..., seq]: 0, 1, and so on for tokens, -1 for padding: the row before position 0 of a
        table with ``first_row = padding_idx + 1``.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.roberta_positions(torch.tensor([[0, 31414, 2, 1, 1]]), padding_idx=1)
        tensor([[ 0,  1,  2, -1, -1]])
    """
    return torch.ops.posembed.learned_positions(ids.ne(padding_idx), past=past_length)  # type: ignore[no-any-return]


def opt_positions(attention_mask: Tensor, *, past_length: int = 0) -> Tensor:
    """Positions of tokens among padding, as OPT counts them (``first_row = 2``).

    Args:
        attention_mask: bool, int32 or int64 [..., past_length + seq], 0 for padding.
        past_length: Tokens that are in a cache.

    Returns:
        int64 [..., seq]: positions of the tokens that are not, -1 for padding.

    Raises:
        ValueError: ``past_length`` is longer than the mask.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.opt_positions(torch.tensor([[0, 0, 1, 1, 1]]))
        tensor([[-1, -1,  0,  1,  2]])
    """
    return torch.ops.posembed.learned_positions(attention_mask, skip=past_length)  # type: ignore[no-any-return]


def fairseq_positions(ids: Tensor, padding_idx: int) -> Tensor:
    """Positions of tokens among padding, as fairseq counts them (``first_row = padding_idx + 1``).

    Arguments and result as :func:`roberta_positions`.
    """
    return roberta_positions(ids, padding_idx)


def input_embedding(
    ids: Tensor,
    token: Tensor,
    position: Tensor | None = None,
    positions: Tensor | None = None,
    token_type: Tensor | None = None,
    types: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    offset: int = 0,
    first_row: int = 0,
    sinusoid: SinusoidalSpec | None = None,
    norm: Literal["layer", "rms"] | None = None,
    eps: float = 1e-5,
    scale: float = 1.0,
    dropout: float = 0.0,
    padding_idx: int | None = None,
    gradient: Gradient = "dense",
) -> Tensor:
    """Adds up token, type and position rows, norms the sum and drops out, in one kernel.

    Args:
        ids: int32 or int64 [batch, seq].
        token: The token table [num_embeddings, embedding_dim].
        position: A table of learned positions [first_row + max_positions, embedding_dim].
        positions: int32 or int64 [seq] or [batch, seq]; None: ``offset``, ``offset + 1``, and so
            on.
        token_type: A table of token types [num_types, embedding_dim].
        types: int32 or int64 [batch, seq]; None: type 0.
        norm_weight: [embedding_dim].
        norm_bias: [embedding_dim], for ``norm="layer"``.
        offset: Position of the first token where no positions are given.
        first_row: The row of position 0.
        sinusoid: Sinusoidal positions instead of a table.
        norm: "layer" for LayerNorm, "rms" for RMSNorm, or None.
        eps: Added to the norm's variance.
        scale: Multiplies the token rows.
        dropout: Probability of dropping a component; its mask follows ``torch.manual_seed``.
        padding_idx: A token row that gets no gradient.
        gradient: Form of the token table's gradient, "dense" or "rows".

    Returns:
        [batch, seq, embedding_dim] in the dtype of ``token``.

    Raises:
        ValueError: Shapes or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: An id, position or type is outside its table.
    """
    seed = None
    if dropout > 0:
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device=ids.device)
    return torch.ops.posembed.input_embedding(  # type: ignore[no-any-return]
        token,
        ids,
        position,
        positions,
        token_type,
        types,
        norm_weight,
        norm_bias,
        seed,
        offset=offset,
        first_row=first_row,
        sinusoid="" if sinusoid is None else sinusoid.text,
        norm=norm or "none",
        eps=eps,
        scale=scale,
        dropout=dropout,
        padding_idx=padding_row(padding_idx, token.shape[0]),
        gradient=gradient,
    )


def padding_row(padding_idx: int | None, rows: int) -> int:
    """The row as operators take it, counted from the end where negative; -1: there is none."""
    if padding_idx is None:
        return -1
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx: expected {-rows} to {rows - 1}, got {padding_idx}")
    return padding_idx % rows


def eager(*arguments: Tensor | None) -> bool:
    """Whether a call may enter the dispatcher from C++, which is faster than through torch.ops.

    The compiler has to see the operator, and so have tensor types with ``__torch_function__``.
    """
    return not (torch.compiler.is_compiling() or torch.overrides.has_torch_function(arguments))


@overload
def rotary(
    query: Tensor,
    key: None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def rotary(
    query: Tensor,
    key: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]: ...


def rotary(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates query, or query and key in one launch, by their positions.

    Pair ``i`` of a head turns by ``position * frequency[i]`` radians. Angles are exact at every
    position. Su et al., "RoFormer", arXiv:2104.09864.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: The same with any number of heads, or None. Keys alone are given as ``query``; with
            xPos they need ``spec.for_keys()``. A head_dim of ``spec.rotary_dim`` says that a tensor
            holds the rotated components alone, as the key that all heads share in multi-head latent
            attention (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434).
        positions: int32 or int64 [seq], [batch, seq] or [tokens]; with sections also
            [axes, batch, seq] or [axes, tokens]; -1 on any axis leaves a token as it is.
            None: ``offset``, ``offset + 1``, and so on.
        spec: The rotation's numbers.
        layout: The order of dimensions; ``"thd"`` is [tokens, heads, head_dim].
        offset: Position of the first token where no positions are given.
        cu_seqlens: int32 or int64 [documents + 1], from 0 to the number of tokens: where documents
            begin that lie one behind the other (layout "thd", or a batch of 1). Positions restart
            there, at ``offset``; there are no ``positions`` then.
        frequencies: float32 or float64 [rotary_dim / 2]: radians per position instead of the
            specification's, each taken as the exact number it is. Gradients flow to them.
        inverse: Undo the rotation instead.
        out: Memory for the result, (query, key) where there is a key, for inference: any strides
            with a contiguous last dimension. It may be the input itself, but not overlap otherwise.

    Returns:
        The rotated query, or (query, key): shapes and dtypes as given; ``out`` where given.

    Raises:
        ValueError: Shapes, layouts or options do not fit; or, with ``out``, an argument requires
            grad in grad mode or tensors overlap in memory.
        TypeError: A dtype is not supported.
        IndexError: A position is below -1.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(64, base=500000.0)
        >>> query, key = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64)
        >>> query, key = pe.functional.rotary(query, key, spec=spec)
    """
    if out is not None:
        given = (positions, frequencies, cu_seqlens)
        rotary_out(out, query, key, given, (spec.text, layout, offset, inverse))
        return out
    if eager(query, key, positions, frequencies, cu_seqlens):
        return _C.rotary(
            query, key, positions, spec.text, layout, offset, inverse, frequencies, cu_seqlens
        )
    given = (positions, frequencies, cu_seqlens)
    options = {"spec": spec.text, "layout": layout, "offset": offset, "inverse": inverse}
    if key is None:
        return torch.ops.posembed.rotary(query, *given, **options)  # type: ignore[no-any-return]
    return torch.ops.posembed.rotary_pair(query, key, *given, **options)  # type: ignore[no-any-return]


def rotary_out(
    out: Tensor | tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor | None,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[str, Layout, int, bool],
) -> None:
    """:func:`rotary` with ``out``.

    Args:
        out: Memory for the results, as :func:`rotary` takes it.
        query: As there.
        key: As there.
        given: Positions, frequencies, cu_seqlens.
        options: Text of the specification, layout, offset, inverse.
    """
    if isinstance(out, tuple) == (key is None):
        expected = "a tensor" if key is None else "(query_out, key_out)"
        raise ValueError(f"out: expected {expected}, got {type(out).__name__}")
    query_out, key_out = out if isinstance(out, tuple) else (out, None)
    if eager(query_out, key_out, query, key, *given):
        _C.rotary_out(query_out, key_out, query, key, given[0], *options, *given[1:])
        return
    named = dict(zip(("spec", "layout", "offset", "inverse"), options, strict=True))
    if key is None:
        torch.ops.posembed.rotary_out(query_out, query, *given, **named)
    else:
        torch.ops.posembed.rotary_pair_out(query_out, key_out, query, key, *given, **named)


def rerotate_(
    key: Tensor,
    old_positions: Tensor,
    new_positions: Tensor,
    *,
    spec: RotarySpec,
    new_spec: RotarySpec | None = None,
    layout: Layout = "bshd",
    frequencies: Tensor | None = None,
) -> None:
    """Moves rotated keys to other positions, or to another specification, in place.

    For context shifts, prefixes that move, and scalings that change with the length: keys are as
    if rotated anew, but for one rounding to their dtype. Works on a float64 copy.

    Args:
        key: Rotated keys in ``layout``.
        old_positions: Where they were rotated, as :func:`rotary` takes positions.
        new_positions: Where they shall be.
        spec: What rotated them.
        new_spec: What shall have rotated them; default: the same.
        layout: The order of dimensions.
        frequencies: Those of :func:`rotary`, where it had them; ``new_spec`` is without.

    Raises:
        ValueError, TypeError, IndexError: As :func:`rotary_`.

    Examples:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(64)
        >>> positions = torch.arange(100, 110)
        >>> cache = pe.functional.rotary(torch.randn(1, 10, 2, 64), positions=positions, spec=spec)
        >>> pe.functional.rerotate_(cache, positions, positions - 100, spec=spec)
    """
    if not key.is_floating_point():
        raise TypeError(f"key: expected float32, float64, bfloat16 or float16, got {key.dtype}")
    if torch.is_grad_enabled() and key.requires_grad:
        raise ValueError("key: requires grad, and an in-place operator keeps no history")
    wide = key.to(torch.float64, copy=True)
    old = None if frequencies is None else frequencies.detach()
    new = old if new_spec is None else None
    before, after = spec.for_keys(), (new_spec or spec).for_keys()
    rotary_(
        wide, positions=old_positions, spec=before, layout=layout, frequencies=old, inverse=True
    )
    rotary_(wide, positions=new_positions, spec=after, layout=layout, frequencies=new)
    key.copy_(wide)


def rotary_(
    query: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    cu_seqlens: Tensor | None = None,
    frequencies: Tensor | None = None,
    inverse: bool = False,
) -> None:
    """Rotates query, and key where given, in place: for inference.

    Arguments as :func:`rotary`; strides are free but for a contiguous last dimension.

    Raises:
        ValueError: As :func:`rotary`; or grad mode is on and an argument requires grad; or tensors
            overlap in memory.

    Examples:
        >>> import torch, posembed as pe
        >>> cache = torch.randn(1, 10, 2, 64)
        >>> pe.functional.rotary_(cache, spec=pe.RotarySpec(64), offset=7)
    """
    if eager(query, key, positions, frequencies, cu_seqlens):
        _C.rotary_(
            query, key, positions, spec.text, layout, offset, inverse, frequencies, cu_seqlens
        )
        return
    given = (positions, frequencies, cu_seqlens)
    options = {"spec": spec.text, "layout": layout, "offset": offset, "inverse": inverse}
    if key is None:
        torch.ops.posembed.rotary_(query, *given, **options)
    else:
        torch.ops.posembed.rotary_pair_(query, key, *given, **options)


def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of query and key, then rotary, in one launch.

    QK-norm: Henry et al., arXiv:2010.04245; with RMSNorm in Qwen 3, Gemma 3 and others. Computes in
    float32 (float64 data: float64) and rounds once. Gradients flow to all four tensors; those of
    the weights are accumulated in float32 and repeatable. Only the norms' divisors are kept.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [batch, seq, heads, head_dim].
        key: The same with any number of heads.
        query_weight: [head_dim], dtype of ``query``.
        key_weight: [head_dim], dtype of ``query``.
        positions: As :func:`rotary` takes them; a token at -1 is normed and not rotated.
        spec: The rotation's numbers, exact and without xPos; a head_dim of at most 1024.
        layout: The order of dimensions.
        offset: Position of the first token where no positions are given.
        eps: Added to the mean square.
        weight_offset: Added to the weights: 1 for Gemma.

    Returns:
        Query and key: shapes and dtypes as given.

    Raises:
        ValueError: Shapes, layouts or options do not fit.
        TypeError: A dtype is not supported.
        IndexError: A position is below -1.

    Example:
        >>> import torch, posembed as pe
        >>> query, key = torch.randn(1, 10, 8, 64), torch.randn(1, 10, 2, 64)
        >>> weight = torch.ones(64)
        >>> query, key = pe.functional.norm_rotary(
        ...     query, key, weight, weight, spec=pe.RotarySpec(64)
        ... )
    """
    return torch.ops.posembed.norm_rotary(  # type: ignore[no-any-return]
        query,
        key,
        query_weight,
        key_weight,
        positions,
        spec=spec.text,
        layout=layout,
        offset=offset,
        eps=eps,
        weight_offset=weight_offset,
    )


def norm_rotary_(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> None:
    """As :func:`norm_rotary`, in place: for inference.

    Strides are free but for a contiguous last dimension.

    Raises:
        ValueError: As :func:`norm_rotary`; or grad mode is on and an argument requires grad; or
            tensors overlap in memory.
    """
    torch.ops.posembed.norm_rotary_(
        query,
        key,
        query_weight,
        key_weight,
        positions,
        spec=spec.text,
        layout=layout,
        offset=offset,
        eps=eps,
        weight_offset=weight_offset,
    )


def scale_options(name: str, scale: float | Tensor) -> dict[str, Any]:
    """A scale as operators take it: a number, or a tensor that no host has to read."""
    return {f"{name}_tensor": scale} if isinstance(scale, Tensor) else {name: scale}


def rotary_cache_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "thd",
    cache_layout: CacheLayout = "nhd",
    offset: int = 0,
    rotate_key: bool = False,
    query_out: Tensor | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
) -> None:
    """Rotates query in place, and writes the rotated key and the value to a paged cache.

    One launch, no host synchronisation: for inference. Pages as in Kwon et al., "PagedAttention",
    arXiv:2309.06180. Strides are free but for a contiguous last dimension.

    Args:
        query: float32, float64, bfloat16 or float16 in ``layout``; by default
            [tokens, heads, head_dim].
        key: The same with any number of heads.
        value: The key's heads, any head_dim.
        key_cache: [pages, page_size, heads, head_dim], or [pages, heads, page_size, head_dim] for
            ``cache_layout="hnd"``; dtype of the data, or float8_e4m3fn.
        value_cache: The same with the value's head_dim.
        slot_mapping: int32 or int64 [tokens], [batch, seq] in other layouts: ``page * page_size +
            place in the page``, each slot once; -1 keeps a token out of the cache.
        positions: As :func:`rotary` takes them; a token at -1 is not rotated, but kept.
        spec: The rotation's numbers, exact and without xPos.
        layout: The order of dimensions of query, key and value.
        cache_layout: The order of dimensions of the caches.
        offset: Position of the first token where no positions are given.
        rotate_key: Leave the rotated key in ``key`` also, for attention that reads it there.
        query_out: Where the rotated query goes, instead of in place.
        key_scale: float8: keys are divided by it in float32 and rounded to nearest even, numbers
            beyond 448 become 448. A float, or a float32 tensor of one element.
        value_scale: The same for values.

    Raises:
        ValueError: Shapes, layouts or options do not fit; or tensors that are written share memory;
            or grad mode is on and an argument requires grad.
        TypeError: A dtype is not supported.
        IndexError: A position is below -1, or a slot outside the cache.

    Example:
        >>> import torch, posembed as pe
        >>> key_cache, value_cache = torch.zeros(2, 10, 16, 2, 64).unbind()  # 10 pages of 16 slots
        >>> query, key, value = torch.randn(3, 8, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        >>> slots, positions = torch.tensor([32, 33, -1]), torch.tensor([7, 8, 9])
        >>> pe.functional.rotary_cache_(
        ...     query, key, value, key_cache, value_cache, slots, positions, spec=pe.RotarySpec(64)
        ... )
        >>> torch.equal(value_cache[2, 0], value[0])
        True
    """
    torch.ops.posembed.rotary_cache_(
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        positions,
        query_out,
        spec=spec.text,
        layout=layout,
        cache_layout=cache_layout,
        offset=offset,
        rotate_key=rotate_key,
        **scale_options("key_scale", key_scale),
        **scale_options("value_scale", value_scale),
    )


def mla_rotary(
    query: Tensor,
    key_rope: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "bshd",
    offset: int = 0,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates the query's window and the key's rotated part, which all heads share.

    For multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434. Gradients flow to
    both.

    Args:
        query: In ``layout``; the window that ``spec`` names is rotated.
        key_rope: ``spec.rotary_dim`` components in ``layout`` with one head, or without the
            dimension of heads: [batch, seq, rotary_dim], [tokens, rotary_dim].
        positions: As :func:`rotary`, with the other arguments.
        spec: The query's head_dim, with ``rotary_dim`` and ``rotary_start`` of the window.
        layout: The order of dimensions.
        offset: Position of the first token where no positions are given.
        inverse: Undo the rotation instead.

    Returns:
        Rotated query and key_rope: shapes and dtypes as given.

    Raises:
        ValueError, TypeError, IndexError: As :func:`rotary`.

    Example:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(192, rotary_dim=64, rotary_start=128, interleaved=True)
        >>> query, key_rope = torch.randn(1, 5, 16, 192), torch.randn(1, 5, 64)
        >>> query, key_rope = pe.functional.mla_rotary(query, key_rope, spec=spec)
    """
    return torch.ops.posembed.mla_rotary(  # type: ignore[no-any-return]
        query, key_rope, positions, spec=spec.text, layout=layout, offset=offset, inverse=inverse
    )


def mla_rotary_cache_(
    query: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    *,
    spec: RotarySpec,
    layout: Layout = "thd",
    offset: int = 0,
    query_out: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> None:
    """As :func:`mla_rotary` with the query in place; writes [latent, key_rope] to a paged cache.

    Args:
        query: In ``layout``; by default [tokens, heads, head_dim].
        latent: What was compressed of keys and values: [tokens, latent_dim], or with one head.
        key_rope: [tokens, rotary_dim], or with one head; not changed.
        cache: [pages, page_size, latent_dim + rotary_dim], dtype of the data or float8_e4m3fn.
        slot_mapping: As in :func:`rotary_cache_`, with the other arguments.
        positions: As :func:`rotary` takes them.
        spec: As :func:`mla_rotary` takes it, exact and without xPos.
        layout: The order of dimensions.
        offset: Position of the first token where no positions are given.
        query_out: Where the rotated query goes, instead of in place.
        scale: float8: what rows are divided by, a float or a float32 tensor of one element.

    Raises:
        ValueError, TypeError, IndexError: As :func:`rotary_cache_`.

    Example:
        >>> import torch, posembed as pe
        >>> spec = pe.RotarySpec(192, rotary_dim=64, rotary_start=128, interleaved=True)
        >>> cache, slots = torch.zeros(10, 16, 512 + 64), torch.tensor([32, 33])
        >>> query, latent = torch.randn(2, 16, 192), torch.randn(2, 512)
        >>> key_rope = torch.randn(2, 64)
        >>> pe.functional.mla_rotary_cache_(query, latent, key_rope, cache, slots, spec=spec)
    """
    torch.ops.posembed.mla_rotary_cache_(
        query,
        latent,
        key_rope,
        cache,
        slot_mapping,
        positions,
        query_out,
        spec=spec.text,
        layout=layout,
        offset=offset,
        **scale_options("scale", scale),
    )


def sinusoidal(
    x: Tensor,
    positions: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    offset: int = 0,
) -> Tensor:
    """Adds sinusoidal encodings; gradients flow to x, to floating positions and to scale.

    Vaswani et al., "Attention Is All You Need", arXiv:1706.03762. Exact at every position.

    Args:
        x: float32, float64, bfloat16 or float16, [batch, seq, embedding_dim] or
            [seq, embedding_dim].
        positions: int32, int64 or floating [seq] or [batch, seq]. None: ``offset``, ``offset + 1``,
            and so on.
        scale: Floating, one number that multiplies the encodings: a learned scale.
        spec: The encoding's numbers.
        offset: Position of the first row where no positions are given.

    Returns:
        x plus encodings: shape and dtype of x.

    Raises:
        ValueError: Shapes or options do not fit.
        TypeError: A dtype is not supported.

    Examples:
        >>> import torch, posembed as pe
        >>> y = pe.functional.sinusoidal(torch.randn(2, 16, 512), spec=pe.SinusoidalSpec(512))
    """
    return torch.ops.posembed.sinusoidal_add(  # type: ignore[no-any-return]
        x, positions, scale, spec=spec.text, offset=offset
    )


def sinusoidal_encode(
    positions: Tensor,
    scale: Tensor | None = None,
    *,
    spec: SinusoidalSpec,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sinusoidal encodings of positions; gradients flow to floating positions and to scale.

    Args:
        positions: int32, int64 or floating [...].
        scale: Floating, one number that multiplies the encodings: a learned scale.
        spec: The encoding's numbers.
        dtype: Default: that of floating positions, else float32.

    Returns:
        [..., embedding_dim]; NaN where a position is not finite.

    Examples:
        >>> import torch, posembed as pe
        >>> time = pe.SinusoidalSpec(64, preset="ddpm")
        >>> pe.functional.sinusoidal_encode(torch.tensor([998.39]), spec=time).shape
        torch.Size([1, 64])
    """
    return torch.ops.posembed.sinusoidal_encode(  # type: ignore[no-any-return]
        positions, scale, spec=spec.text, dtype=dtype
    )


def sinusoidal_shift_matrix(distance: float, *, spec: SinusoidalSpec) -> Tensor:
    """The matrix that moves an encoding by ``distance`` positions, which rotates each pair.

    Args:
        distance: Positions.
        spec: The encoding's numbers.

    Returns:
        float64 [embedding_dim, embedding_dim] M with encode(p + distance) = encode(p) @ M.T.

    Raises:
        ValueError: A sine has no cosine beside it.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.sinusoidal_shift_matrix(3, spec=pe.SinusoidalSpec(64)).shape
        torch.Size([64, 64])
    """
    return torch.ops.posembed.sinusoidal_shift_matrix(  # type: ignore[no-any-return]
        distance, spec=spec.text
    )


def alibi_slopes(
    num_heads: int,
    *,
    kind: str = "press",
    max_bias: float = 8.0,
    total_heads: int | None = None,
    head_start: int = 0,
    values: Sequence[float] = (),
    factor: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """The slopes of ALiBi's heads, correctly rounded. Press et al., arXiv:2108.12409.

    Args:
        num_heads: How many.
        kind: "press": the paper's series, interleaved where the head count is no power of two.
            "geometric": ``2 ** (-max_bias * (head + 1) / total_heads)``.
        max_bias: The last of a power of two of heads has slope ``2 ** -max_bias``.
        total_heads: Heads of the whole model, where these are a part of them.
        head_start: The first of these heads among them.
        values: The slopes themselves, one for each of total_heads, or two: left of the query, then
            right of it.
        factor: What all are divided by.
        device: Default: CPU.

    Returns:
        float32 [num_heads], or [2, num_heads] where two values are given for each.

    Raises:
        ValueError: No heads, heads outside total_heads, or another number of values.
    """
    return torch.ops.posembed.alibi_slopes(  # type: ignore[no-any-return]
        num_heads,
        kind=kind,
        max_bias=max_bias,
        total_heads=total_heads,
        head_start=head_start,
        values=list(values),
        factor=factor,
        device=None if device is None else torch.device(device),
    )


def alibi_positions(attention_mask: Tensor) -> Tensor:
    """Positions that count visible keys alone, from 0, as Bloom has them; others are at 0.

    Args:
        attention_mask: bool or integers [key_length] or [batch, key_length]; 0: padding, on either
            side or in between.

    Returns:
        int64, shaped like attention_mask.

    Examples:
        >>> import torch, posembed as pe
        >>> pe.functional.alibi_positions(torch.tensor([0, 0, 1, 1, 0, 1]))
        tensor([0, 0, 0, 1, 0, 2])
    """
    return torch.ops.posembed.alibi_positions(attention_mask)  # type: ignore[no-any-return]


def alibi_bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    *,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The bias of attention scores; gradients flow to slopes.

    Computed from distances, in float32 and rounded once, so that it is right at any position.

    Args:
        slopes: Floating [heads]; [2, heads]: for keys left and right of the query.
        query_length: Queries.
        key_length: Keys.
        query_offset: Position of the first query among the keys; default: the last query stands at
            the last key.
        query_positions: Positions of the queries, int32 or int64 [query_length] or
            [batch, query_length]; default: one after the other.
        key_positions: Those of the keys, [key_length] or [batch, key_length].
        cu_seqlens: Documents packed one after the other: int32 or int64 [documents + 1] boundaries
            from 0 to key_length. Keys of other documents than the query's are hidden.
        attention_mask: bool or integers [key_length] or [batch, key_length]; 0: hidden.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        hide: Hidden keys get -inf; otherwise 0.
        dtype: Default: that of slopes.

    Returns:
        [heads, query_length, key_length]; [batch, heads, query_length, key_length] where positions
        or mask have a batch.

    Raises:
        ValueError: Shapes or lengths do not fit, or a distance has more than 31 bits.
        TypeError: A dtype is not supported.
        IndexError: A position has more than 31 bits.

    Examples:
        >>> import posembed as pe
        >>> pe.functional.alibi_bias(pe.functional.alibi_slopes(8), 2, 3)[0]
        tensor([[-0.5000,  0.0000,    -inf],
                [-1.0000, -0.5000,  0.0000]])
    """
    return torch.ops.posembed.alibi_bias(  # type: ignore[no-any-return]
        slopes,
        query_length,
        key_length,
        query_positions,
        key_positions,
        cu_seqlens,
        attention_mask,
        query_offset=query_offset,
        causal=causal,
        hide=hide,
        dtype=dtype,
    )


def alibi_add(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> Tensor:
    """Scores times scale plus bias in one pass over memory; gradients flow to scores and slopes.

    Args:
        scores: Floating [batch, heads, query, key] or [heads, query, key].
        slopes: As in :func:`alibi_bias`, with the other arguments.
        scale: Multiplies the scores, not the bias.
        query_offset: Position of the first query among the keys; default: ends aligned.
        query_positions: As in :func:`alibi_bias`.
        key_positions: As in :func:`alibi_bias`.
        cu_seqlens: As in :func:`alibi_bias`.
        attention_mask: As in :func:`alibi_bias`.
        causal: ``-slope * (i - j)``, and keys after the query are hidden; otherwise
            ``-slope * abs(i - j)``.
        hide: Hidden keys get -inf, whatever their score; otherwise nothing is added to them.

    Returns:
        Shape and dtype of scores.
    """
    return torch.ops.posembed.alibi_add(  # type: ignore[no-any-return]
        scores,
        slopes,
        query_positions,
        key_positions,
        cu_seqlens,
        attention_mask,
        query_offset=query_offset,
        causal=causal,
        hide=hide,
        scale=scale,
    )


def alibi_add_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> None:
    """:func:`alibi_add` in place: for inference.

    Strides of scores are free but for a contiguous last dimension.

    Raises:
        ValueError: Shapes do not fit; or grad mode is on and an argument requires grad.
    """
    torch.ops.posembed.alibi_add_(
        scores,
        slopes,
        query_positions,
        key_positions,
        cu_seqlens,
        attention_mask,
        query_offset=query_offset,
        causal=causal,
        hide=hide,
        scale=scale,
    )


def alibi_softmax(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> Tensor:
    """Attention weights, softmax(scores * scale + bias) over keys; scores are read once.

    Gradients flow to scores and slopes. Arguments as :func:`alibi_add`.

    Returns:
        Shape and dtype of scores. A query that sees no key has weights 0.

    Examples:
        >>> import torch, posembed as pe
        >>> slopes = pe.functional.alibi_slopes(8)
        >>> pe.functional.alibi_softmax(torch.zeros(8, 2, 3), slopes)[0]
        tensor([[0.3775, 0.6225, 0.0000],
                [0.1863, 0.3072, 0.5065]])
    """
    return torch.ops.posembed.alibi_softmax(  # type: ignore[no-any-return]
        scores,
        slopes,
        query_positions,
        key_positions,
        cu_seqlens,
        attention_mask,
        query_offset=query_offset,
        causal=causal,
        hide=hide,
        scale=scale,
    )


def alibi_softmax_(
    scores: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    query_offset: int | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = True,
    hide: bool = True,
) -> None:
    """:func:`alibi_softmax` in place: for inference.

    Strides of scores are free but for a contiguous last dimension.

    Raises:
        ValueError: Shapes do not fit; or grad mode is on and an argument requires grad.
    """
    torch.ops.posembed.alibi_softmax_(
        scores,
        slopes,
        query_positions,
        key_positions,
        cu_seqlens,
        attention_mask,
        query_offset=query_offset,
        causal=causal,
        hide=hide,
        scale=scale,
    )


def alibi_lse_correction(
    slopes: Tensor,
    query_length: int,
    *,
    query_start: int,
    key_start: int,
    form: str = "distance",
    causal: bool = True,
) -> Tensor:
    """What the log-sum-exp of a block lacks whose biases were made from indices within the block.

    Ring and blocked attention computes blocks of keys apart and merges them by their log-sum-exps.
    A kernel that knows indices within its block only is off by a bias that does not change along
    a row: outputs of the block are right, and its log-sum-exp plus this correction is that of the
    whole's biases, ``-slope * abs(query position - key position)``.

    Args:
        slopes: Floating [heads] or [2, heads].
        query_length: Queries of the block.
        query_start: Position of the first of them.
        key_start: Position of the block's first key.
        form: What the kernel added to the score of query i and key j, counted within the block:
            "distance": ``slope * (j - i)``; "key": ``slope * j``, as FlashAttention-2 does where it
            is causal. For keys after the queries the negative.
        causal: The correction is -inf where the block begins after the query: it has no part.

    Returns:
        [heads, query_length], to add to log-sum-exps of queries.
    """
    return torch.ops.posembed.alibi_lse_correction(  # type: ignore[no-any-return]
        slopes,
        query_length,
        query_start=query_start,
        key_start=key_start,
        form=form,
        causal=causal,
    )


def check_errors() -> None:
    """Waits for the CUDA devices and raises the first id or position error that a kernel recorded.

    A CUDA kernel that meets a bad id or position writes zeros (or leaves the token as it is) and
    goes on; the error is raised here or at posembed's next CUDA call. Returns at once on machines
    without CUDA.

    Raises:
        IndexError: Names what was out of range, its value, its place and the range.
    """
    torch.ops.posembed.check_errors()
