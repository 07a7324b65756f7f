"""posembed's operators in terms of PyTorch's own, for programs that run without posembed.

A runtime such as ONNX Runtime, ExecuTorch or Core ML knows only the operators of torch.aten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._python_dispatch import _disable_current_modes

import posembed._library  # noqa: F401  (registers the operators)

# ------------------------------------------------------------------------------------------ shared


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute: float32 for data of 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scalar(value: float, device: torch.device) -> Tensor:
    """A float64 scalar, built from an integer: the ONNX exporter rounds floats to float32."""
    mantissa, exponent = math.frexp(value)
    whole = torch.full((), int(mantissa * 2**53), dtype=torch.int64, device=device)
    return whole.double() * 2.0 ** (exponent - 53)


def frequencies_of(operator: Any, spec: str, device: torch.device) -> Tensor:
    """The frequencies of a specification in turns per position, in float64.

    A decomposition cannot add constants to a program, so it adds the steps that compute them.
    """
    with _disable_current_modes():
        values = [x * (0.5 / math.pi) for x in operator(spec).tolist()]
    ratio = values[1] / values[0] if len(values) > 1 and values[0] != 0 else 1.0
    if all(math.isclose(values[0] * ratio**i, x, rel_tol=1e-13) for i, x in enumerate(values)):
        steps = torch.arange(len(values), dtype=torch.float64, device=device)
        first = values[0] if values else 0.0
        return scalar(first, device) * scalar(ratio, device) ** steps
    return torch.stack([scalar(x, device) for x in values])  # for some scalings


def fields(operator: Any, spec: str) -> dict[str, Any]:
    """All fields of a specification; its text may omit defaults."""
    with _disable_current_modes():
        found: dict[str, Any] = json.loads(operator(spec))
    return found


def cosines_and_sines(turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of float64 angles, first reduced to one turn; float32 then suffices."""
    angles = (turns - turns.floor()).to(dtype) * (2 * math.pi)
    return angles.cos(), angles.sin()


def consecutive(count: Any, offset: Any, device: torch.device) -> Tensor:
    return torch.arange(offset, offset + count, device=device)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# ------------------------------------------------------------------------------------------ tables


def embedding(
    weight: Tensor,
    ids: Tensor,
    padding_idx: int,
    scale: float,
    scale_grad_by_freq: bool,
    vocabulary_start: int,
    gradient: str,
) -> Tensor:
    if vocabulary_start < 0:
        rows = torch.nn.functional.embedding(ids, weight)
    else:  # ids outside a vocabulary shard give rows of zeros
        local = ids - vocabulary_start
        known = (local >= 0) & (local < weight.shape[0])
        rows = torch.nn.functional.embedding(local * known, weight) * known.unsqueeze(-1)
    return rows if scale == 1.0 else rows * scale


def token_bag(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    padding_idx: int,
    include_last_offset: bool,
    mode: str,
    weights: Tensor | None,
    gradient: str,
) -> Tensor:
    counts_id = (ids != padding_idx).unsqueeze(-1)
    rows = torch.nn.functional.embedding(ids, weight).to(wide(weight.dtype))
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    # ids: [bags, tokens] without offsets, else [tokens]
    if offsets is None:
        pooled = (rows * counts_id).sum(1)
        sizes = counts_id.sum(1)
        largest = torch.where(counts_id, rows, -math.inf).amax(1)
    else:
        bags = offsets.shape[0] - int(include_last_offset)
        places = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
        bag = (places >= offsets[:bags]).sum(-1) - 1
        index = bag.unsqueeze(-1).expand_as(rows)
        pooled = rows.new_zeros(bags, rows.shape[1]).scatter_add(0, index, rows * counts_id)
        sizes = bag.new_zeros(bags).scatter_add(0, bag, counts_id.squeeze(-1).long()).unsqueeze(-1)
        lowest = rows.new_full((bags, rows.shape[1]), -math.inf)
        seen = torch.where(counts_id, rows, -math.inf)
        largest = lowest.scatter_reduce(0, index, seen, "amax")
    if mode == "mean":
        pooled = pooled / sizes.clamp_min(1)
    elif mode == "max":
        pooled = torch.where(sizes > 0, largest, 0.0)
    return pooled.to(weight.dtype)


def learned_add(
    x: Tensor, weight: Tensor, positions: Tensor | None, offset: Any, first_row: int
) -> Tensor:
    if positions is None:
        positions = consecutive(x.shape[1], offset, x.device)
    return x + learned_encode(weight, positions, first_row)


def learned_encode(weight: Tensor, positions: Tensor, first_row: int) -> Tensor:
    return torch.nn.functional.embedding(positions + first_row, weight)


# --------------------------------------------------------------------------------------- sinusoids


def encodings(positions: Tensor, spec: str, order: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal encodings of a specification, with its scale: [..., embedding_dim]."""
    numbers = fields(torch.ops.posembed.sinusoidal_specification.default, spec)
    dim, preset = numbers["embedding_dim"], numbers["preset"]
    operator = torch.ops.posembed.sinusoidal_frequencies.default
    frequencies = frequencies_of(operator, spec, positions.device)
    padding = numbers["padding_idx"]
    if padding is None:
        padding = 1 if preset == "fairseq" else -1
    places = positions.double().unsqueeze(-1)
    turns = (places + padding + 1) * frequencies + order / 4
    cosines, sines = cosines_and_sines(turns, dtype)
    if order:
        factor = ((frequencies * (2 * math.pi)) ** order).to(dtype)
        cosines, sines = cosines * factor, sines * factor
    pairs = (cosines, sines) if numbers["cos_first"] else (sines, cosines)
    interleaved = preset == "vaswani"
    columns = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    if columns.shape[-1] < dim:
        columns = torch.nn.functional.pad(columns, (0, dim - columns.shape[-1]))
    columns = columns[..., :dim] * numbers["scale"]
    return columns if padding < 0 else torch.where(places == -1, 0.0, columns)


def sinusoidal_encode(
    positions: Tensor,
    spec: str,
    scale: Tensor | None,
    order: int,
    dtype: torch.dtype | None,
) -> Tensor:
    if dtype is None:
        dtype = positions.dtype if positions.is_floating_point() else torch.float32
    result = encodings(positions, spec, order, wide(dtype))
    return (result if scale is None else result * scale).to(dtype)


def sinusoidal_add(
    x: Tensor,
    spec: str,
    positions: Tensor | None,
    offset: Any,
    scale: Tensor | None,
) -> Tensor:
    if positions is None:
        positions = consecutive(x.shape[-2], offset, x.device)
    added = encodings(positions, spec, 0, wide(x.dtype))
    return (x + (added if scale is None else added * scale)).to(x.dtype)


# ------------------------------------------------------------------------------------------ rotary


def rotary_cosines_and_sines(
    places: Tensor,
    numbers: dict[str, Any],
    spec: str,
    frequencies: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., pairs]; with float32 angles if the specification says so."""
    device = places.device
    if frequencies is None:
        operator = torch.ops.posembed.rotary_frequencies.default
        turns = frequencies_of(operator, spec, device)
    else:
        turns = frequencies.double() * scalar(0.5 / math.pi, device)
    if numbers["numerics"] == "exact":
        return cosines_and_sines(places.double() * turns, dtype)
    angles = places.float() * (turns * scalar(2 * math.pi, device)).float()
    return angles.cos(), angles.sin()


def amplitude(positions: Tensor, numbers: dict[str, Any], is_key: bool) -> Tensor | float:
    """The factor of rotated pairs: xPos's, by position, or the same for all."""
    scaling = numbers["scaling"]
    if scaling is None or scaling["type"] != "xpos":
        return 1.0
    dim = numbers["rotary_dim"]
    device = positions.device
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    zeta = (steps + scalar(0.4, device)) / scalar(1.4, device)
    distance = (positions.double() - scaling["center"]) / scaling["scale_base"]
    return torch.pow(zeta, -distance if is_key else distance)


def of_tokens(table: Tensor, layout: str) -> Tensor:
    """Reshapes tables [(batch,) seq, pairs] to broadcast with tensors of a layout."""
    if layout == "bhsd":
        return table if table.dim() == 2 else table.unsqueeze(1)
    if layout == "sbhd":
        table = table.unsqueeze(1) if table.dim() == 2 else table.transpose(0, 1)
    return table.unsqueeze(-2)


def turn(
    x: Tensor, cosines: Tensor, sines: Tensor, start: int, dim: int, interleaved: bool
) -> Tensor:
    """Rotates the components from ``start`` to ``start + dim`` of the last dimension."""
    window = x[..., start : start + dim].to(cosines.dtype)
    if interleaved:
        first, second = window[..., 0::2], window[..., 1::2]
    else:
        first, second = window.chunk(2, -1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    rotated = rotated.to(x.dtype)
    if dim == x.shape[-1]:
        return rotated
    return torch.cat([x[..., :start], rotated, x[..., start + dim :]], -1)


def tokens_in(x: Tensor, layout: str) -> Any:
    return x.shape[{"bshd": 1, "bhsd": 2, "sbhd": 0, "thd": 0}[layout]]


def rotate(
    x: Tensor,
    is_key: bool,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    inverse: bool,
    cu_seqlens: Tensor | None,
    frequencies: Tensor | None,
    transpose: bool,
) -> Tensor:
    numbers = fields(torch.ops.posembed.rotary_specification.default, spec)
    if positions is None:
        positions = consecutive(tokens_in(x, layout), offset, x.device)
    if cu_seqlens is not None:
        index = consecutive(tokens_in(x, layout), 0, x.device).unsqueeze(-1)
        document = (index >= cu_seqlens[1:-1]).sum(-1)
        positions = positions - cu_seqlens[document]
    of_axes = numbers["sections"] is not None and positions.dim() == (2 if layout == "thd" else 3)
    # [(batch,) seq, pairs or 1]
    if of_axes:
        axes = positions.unbind(0)
        places = torch.stack([axes[axis] for axis in numbers["sections"]["axis_of_pair"]], -1)
        untouched = (positions < 0).any(0).unsqueeze(-1)
    else:
        places = positions.unsqueeze(-1)
        untouched = places < 0
    dtype = wide(x.dtype)
    cosines, sines = rotary_cosines_and_sines(places, numbers, spec, frequencies, dtype)
    with _disable_current_modes():
        factor = torch.ops.posembed.rotary_attention_factor.default(spec)
    size = amplitude(places, numbers, is_key != inverse) * (1 / factor if inverse else factor)
    if (inverse != transpose) != numbers["reverse"]:
        sines = -sines
    cosines, sines = (of_tokens((table * size).to(dtype), layout) for table in (cosines, sines))
    start, dim = numbers["rotary_start"], numbers["rotary_dim"]
    if x.shape[-1] != numbers["head_dim"]:  # only the window
        start = 0
    rotated = turn(x, cosines, sines, start, dim, numbers["interleaved"])
    if positions.is_floating_point():
        return rotated
    return torch.where(of_tokens(untouched, layout), x, rotated)


def rotary(query: Tensor, *given: Any) -> Tensor:
    return rotate(query, False, *given)


def rotary_pair(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return rotate(query, False, *given), rotate(key, True, *given)


def mla_rotary(
    query: Tensor,
    key_rope: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    given = (spec, positions, layout, offset, inverse, None, None, False)
    heads = {"bhsd": 1}.get(layout, -2)
    lacks_heads = key_rope.dim() < query.dim()
    key = key_rope.unsqueeze(heads) if lacks_heads else key_rope
    key = rotate(key, True, *given)
    return rotate(query, False, *given), key.squeeze(heads) if lacks_heads else key


def norm_rotary(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    spec: str,
    positions: Tensor | None,
    layout: str,
    offset: Any,
    eps: float,
    weight_offset: float,
) -> tuple[Tensor, Tensor]:
    def normed(x: Tensor, weight: Tensor) -> Tensor:
        dtype = wide(x.dtype)
        return rms(x.to(dtype), eps) * (weight.to(dtype) + weight_offset)

    where = (spec, positions, layout, offset, False, None, None, False)
    return (
        rotate(normed(query, query_weight), False, *where).to(query.dtype),
        rotate(normed(key, key_weight), True, *where).to(key.dtype),
    )


def rotary_tables(
    query: Tensor,
    cos: Tensor,
    sin: Tensor | None,
    layout: str,
    interleaved: bool,
    half_width: bool,
    start: int,
    numerics: str,
    transpose: bool,
) -> Tensor:
    if sin is None:  # complex
        cos, sin = torch.view_as_real(cos).unbind(-1)
        half_width = True
    pairs = cos.shape[-1] if half_width else cos.shape[-1] // 2
    if not half_width:
        halves = slice(0, None, 2) if interleaved else slice(0, pairs)
        cos, sin = cos[..., halves], sin[..., halves]
    dtype = wide(query.dtype)
    cosines, sines = (of_tokens(table.to(dtype), layout) for table in (cos, sin))
    sines = -sines if transpose else sines
    return turn(query, cosines, sines, start, 2 * pairs, interleaved)


def rotary_tables_pair(query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return rotary_tables(query, *given), rotary_tables(key, *given)


# ------------------------------------------------------------------------------------------- ALiBi


def distances(
    query_length: Any,
    key_length: Any,
    device: torch.device,
    causal: bool,
    query_offset: Any,
    attention_mask: Tensor | None,
    positions_from_mask: bool,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Query position minus key position, and which keys are hidden: [(batch, 1,) query, key]."""
    offset = key_length - query_length if query_offset is None else query_offset
    places = consecutive(query_length, offset, device)
    if positions_from_mask:
        visible = (attention_mask != 0).long()  # type: ignore[union-attr]
        key_positions = (visible.cumsum(-1) - 1) * visible
        if 0 <= offset <= key_length - query_length:  # otherwise the mask lacks the queries
            query_positions = key_positions.narrow(-1, offset, query_length)
    queries = places if query_positions is None else query_positions.long()
    keys = consecutive(key_length, 0, device) if key_positions is None else key_positions.long()
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if cu_seqlens is not None:
        documents = [
            (rows.unsqueeze(-1) >= cu_seqlens[1:]).sum(-1)
            for rows in (places, consecutive(key_length, 0, device))
        ]
        hidden = hidden | (documents[0].unsqueeze(-1) != documents[1])
        hidden = hidden | ((places < 0) | (places >= key_length)).unsqueeze(-1)
    if attention_mask is not None:
        hidden = hidden | (attention_mask == 0).unsqueeze(-2)
    if distance.dim() == 3:
        distance = distance.unsqueeze(1)
    return distance, hidden.unsqueeze(1) if hidden.dim() == 3 else hidden


def alibi_line(slopes: Tensor, query_length: Any, key_length: Any, *options: Any) -> Tensor:
    """The bias [(batch,) heads, query, key], in the dtype that slopes are computed in."""
    *options, apply_mask = options  # type: ignore[assignment]
    distance, hidden = distances(query_length, key_length, slopes.device, *options)
    dtype = wide(slopes.dtype)
    distance, slopes = distance.to(dtype), slopes.to(dtype)
    left, right = slopes.unbind(0) if slopes.dim() == 2 else (slopes, slopes)
    slope = torch.where(distance >= 0, -left[:, None, None], right[:, None, None])
    return torch.where(hidden, -math.inf if apply_mask else 0.0, slope * distance)


def alibi_scaled_slopes(slopes: Tensor, key_length: Any, train_length: int) -> Tensor:
    length = torch.full((), key_length, dtype=torch.int64, device=slopes.device)
    return slopes / (length.to(slopes.dtype) / train_length).clamp_min(1)


def alibi_bias(
    slopes: Tensor,
    query_length: Any,
    key_length: Any,
    dtype: torch.dtype | None,
    *options: Any,
) -> Tensor:
    line = alibi_line(slopes, query_length, key_length, *options)
    return line.to(slopes.dtype if dtype is None else dtype)


def biased(scores: Tensor, slopes: Tensor, scale: float, options: tuple[Any, ...]) -> Tensor:
    dtype = wide(scores.dtype)
    return scores.to(dtype) * scale + alibi_line(slopes.to(dtype), *scores.shape[-2:], *options)


def alibi_add(scores: Tensor, slopes: Tensor, scale: float, *options: Any) -> Tensor:
    return biased(scores, slopes, scale, options).to(scores.dtype)


def alibi_softmax(scores: Tensor, slopes: Tensor, scale: float, *options: Any) -> Tensor:
    values = biased(scores, slopes, scale, options)
    sees = (values > -math.inf).any(-1, keepdim=True)  # if all keys are masked, weights are 0
    weights = torch.where(sees, values, 0.0).softmax(-1)
    return torch.where(sees, weights, 0.0).to(scores.dtype)


def alibi_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    scale: float | None,
    dropout: float,
    *options: Any,
) -> Tensor:
    # query: [batch, heads, queries, head_dim]; keys of fewer heads serve groups of queries
    groups = key.shape[1]
    grouped = query.reshape(query.shape[0], groups, -1, query.shape[3])
    scores = (grouped @ key.transpose(-2, -1)).reshape(*query.shape[:3], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.dropout(alibi_softmax(scores, slopes, scale, *options), dropout, dropout > 0)
    weighted = weights.reshape(query.shape[0], groups, -1, key.shape[2]) @ value
    return weighted.reshape(*query.shape[:3], value.shape[-1])


# ------------------------------------------------------------------------------------------- input


def input_embedding(
    token: Tensor,
    ids: Tensor,
    position: Tensor | None,
    positions: Tensor | None,
    token_type: Tensor | None,
    types: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    offset: Any,
    first_row: int,
    sinusoid: str,
    norm: str,
    eps: float,
    scale: float,
    dropout: float,
    *_: Any,
) -> Tensor:
    if dropout > 0:
        raise ValueError(
            "decompose: expected dropout 0, whose mask only posembed draws; export in eval mode"
        )
    dtype = wide(token.dtype)
    x = torch.nn.functional.embedding(ids, token).to(dtype) * scale
    if token_type is not None:
        if types is None:
            types = torch.zeros_like(ids)
        x = x + torch.nn.functional.embedding(types, token_type)
    if positions is None:
        positions = consecutive(ids.shape[1], offset, ids.device)
    if position is not None:
        x = x + learned_encode(position, positions, first_row)
    if sinusoid:
        x = x + encodings(positions, sinusoid, 0, dtype)
    return normed(x, norm, eps, norm_weight, norm_bias).to(token.dtype)


def normed(x: Tensor, norm: str, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weight = None if weight is None else weight.to(x.dtype)
    if norm == "layer":
        bias = None if bias is None else bias.to(x.dtype)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if norm == "rms":
        x = rms(x, eps)
    return x if weight is None else x * weight


# ---------------------------------------------------------------------------------------- programs

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "alibi_add": alibi_add,
    "alibi_attention": alibi_attention,
    "alibi_bias": alibi_bias,
    "alibi_scaled_slopes": alibi_scaled_slopes,
    "alibi_softmax": alibi_softmax,
    "embedding": embedding,
    "input_embedding": input_embedding,
    "learned_add": learned_add,
    "learned_encode": learned_encode,
    "mla_rotary": mla_rotary,
    "norm_rotary": norm_rotary,
    "rotary": rotary,
    "rotary_pair": rotary_pair,
    "rotary_tables": rotary_tables,
    "rotary_tables_pair": rotary_tables_pair,
    "sinusoidal_add": sinusoidal_add,
    "sinusoidal_encode": sinusoidal_encode,
    "token_bag": token_bag,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Functions of PyTorch's own operators, by the posembed operator that they replace."""
    # Composite operators decompose by themselves.
    found: dict[Any, Callable[..., Any]] = {
        operator: function
        for operator, function in torch.export.default_decompositions().items()  # type: ignore[no-untyped-call]
        if operator.namespace == "posembed"
    }
    for name, function in DECOMPOSITIONS.items():
        operator = getattr(torch.ops.posembed, name).default
        found[operator] = with_every_argument(operator, function)
    return found


def with_every_argument(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that receives all of an operator's arguments in order, with defaults."""

    def call(*args: Any, **named: Any) -> Any:
        others = operator._schema.arguments[len(args) :]
        return function(*args, *(named.get(a.name, a.default_value) for a in others))

    return call


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Replaces posembed's operators in a program with PyTorch's own.

    The result runs without posembed: pass it to ``torch.onnx.export``, or lower it with ExecuTorch
    or Core ML. Results differ from posembed's by rounding errors: exact angles are reduced to one
    turn in float64, and their cosines and sines are computed in float32.

    Args:
        program: The result of ``torch.export.export`` for a model in eval mode.

    Raises:
        ValueError: The program has a posembed operator that writes in place, such as those for
            paged caches, computes a gradient, or draws a dropout mask. The message names it.

    Examples:
        >>> import torch, posembed as pe
        >>> rope = pe.RotaryEmbedding(64)
        >>> query, key = torch.randn(1, 5, 4, 64), torch.randn(1, 5, 4, 64)
        >>> program = pe.decompose(torch.export.export(rope, (query, key)))
        >>> any("posembed" in str(node.target) for node in program.graph.nodes)
        False
    """
    with torch.no_grad():
        result: ExportedProgram = program.run_decompositions(decompositions())
    remaining = sorted(
        {
            name
            for node in result.graph.nodes
            for name in (str(node.target), *map(str, node.args))
            if name.startswith("posembed.")
        }
    )
    if remaining:
        raise ValueError(
            f"decompose: expected operators that PyTorch's own can replace, got {remaining}"
        )
    return result
