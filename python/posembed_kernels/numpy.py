"""Rotary embeddings, sinusoids, ALiBi and rows of tables for NumPy arrays, without torch.

Arrays are float32, float64, float16, or ml_dtypes' bfloat16; results have the bits of posembed's
operators. ``set_num_threads`` lets large calls use several threads; the default is one.
"""

import collections
import contextlib
import ctypes
import json
import threading
from typing import Any

import numpy as np

import posembed_kernels as kernels

__all__ = [
    "alibi_bias",
    "alibi_slopes",
    "embedding",
    "rotary",
    "rotary_tables",
    "set_num_threads",
    "sinusoidal",
    "sinusoidal_encode",
]

Array = np.ndarray[Any, Any]
Spec = kernels.Spec

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_OTHER = 3  # the kernels refuse it
_threads = 1


def set_num_threads(count: int) -> None:
    """Sets how many threads a call may use; their number does not change results."""
    global _threads
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    _threads = count


def _callback(interrupts: list[BaseException]) -> Any:
    """A parallel_for on new threads, which a fork cannot lose; nothing may leave it early."""

    def parallel_for(_: object, count: int, grain: int, task: Any, work: Any) -> None:
        step = max(grain, -(-count // _threads))
        parts = collections.deque(range(0, count, step))

        def take() -> None:
            with contextlib.suppress(IndexError):  # no part is left
                while True:
                    begin = parts.popleft()
                    task(work, begin, min(begin + step, count))

        others: list[threading.Thread] = []
        with contextlib.suppress(RuntimeError):  # the system has no more threads: these do
            for _other in range(min(_threads, len(parts)) - 1):
                thread = threading.Thread(target=take)
                thread.start()
                others.append(thread)
        while True:
            try:
                take()
                for thread in others:
                    thread.join()
                return
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)

    return kernels.PARALLEL_FOR(parallel_for)


def _tensor(array: Array) -> Any:
    code = 4 if array.dtype.name == "bfloat16" else _CODES.get(array.dtype.kind, _OTHER)
    if not array.dtype.isnative:
        code = _OTHER
    sizes = ctypes.c_int64 * array.ndim
    return kernels.Tensor(
        data=array.ctypes.data,
        device_type=1,
        ndim=array.ndim,
        code=code,
        bits=8 * array.itemsize,
        lanes=1,
        shape=sizes(*array.shape),
        strides=sizes(*(stride // array.itemsize for stride in array.strides)),
    )


def _readable(given: Any) -> Array:
    """An array, copied if the kernels cannot read it: its last dimension must be contiguous."""
    array: Array = np.asarray(given)
    whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    dense = array.ndim == 0 or array.shape[-1] <= 1 or array.strides[-1] == array.itemsize
    return array if whole and dense and array.flags.aligned else array.copy()


def _run(function: str, fields: kernels.Fields, **tensors: Array | None) -> None:
    given = {name: array for name, array in tensors.items() if array is not None}
    made = {name: _tensor(array) for name, array in given.items()}
    call = kernels.struct(function, fields)
    for name, tensor in made.items():
        setattr(call, name, ctypes.addressof(tensor))
    pointer, interrupts = None, list[BaseException]()
    if _threads > 1:
        size, callback = ctypes.sizeof(kernels.Threads), _callback(interrupts)
        pointer = ctypes.byref(kernels.Threads(size, callback, None))
    kernels.check(getattr(kernels.library(), function)(ctypes.byref(call), pointer))
    if interrupts:
        raise interrupts[0]


def _optional(array: Any) -> Array | None:
    return None if array is None else _readable(array)


def _result(out: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) or not out.flags.writeable:
        raise ValueError("out: expected a writable array")
    if any(stride % out.itemsize for stride in out.strides):
        raise ValueError(f"out: expected strides of whole elements, got {out.strides} bytes")
    return out


def _pair(out: Any) -> tuple[Any, Any]:
    return out if isinstance(out, tuple) else (out, None)


def _rotate(query: Any, key: Any, fields: kernels.Fields, out: Any, **tensors: Any) -> Any:
    query_out, key_out = _pair(out)
    query = query if query_out is query else _readable(query)
    key = key if key is None or key_out is key else _readable(key)
    results = {"query_out": _result(query_out, query.shape, query.dtype)}
    if key is not None:
        results["key_out"] = _result(key_out, key.shape, key.dtype)
    tensors = {name: _optional(array) for name, array in tensors.items()}
    _run("posembed_rotary", fields, query=query, key=key, **results, **tensors)
    return tuple(results.values()) if key is not None else results["query_out"]


def rotary(
    query: Any,
    key: Any = None,
    positions: Any = None,
    *,
    spec: Spec = None,
    layout: str = "bshd",
    offset: int = 0,
    cu_seqlens: Any = None,
    frequencies: Any = None,
    inverse: bool = False,
    transpose: bool = False,
    out: Array | tuple[Array, Array] | None = None,
) -> Any:
    """Rotates query, or query and key, by position times frequency.

    Args:
        query: ``[batch, seq, heads, head_dim]``, or as `layout` says.
        key: The same with heads of its own.
        positions: Integers or fractions ``[seq]``, ``[batch or 1, seq]`` or, with sections,
            ``[axes, batch or 1, seq]``; -1 leaves a token as it is. None: `offset`, `offset` + 1, …
        spec: Fields of ``posembed.RotarySpec`` that differ from its defaults, such as
            ``{"base": 500000.0, "interleaved": True}``, or the text of its ``to_json()``. Scalings:
            linear, ntk, yarn, llama3, xpos; instead of others give ``custom_frequencies``.
        layout: "bshd", "bhsd", "sbhd" or "thd" (``[tokens, heads, head_dim]``).
        offset: The first position.
        cu_seqlens: ``[documents + 1]``; positions restart in each document.
        frequencies: Radians per position in place of the specification's, such as learned ones:
            ``[rotary_dim / 2]``, ``[heads, rotary_dim / 2]`` or ``[axes, heads, rotary_dim / 2]``.
        inverse: Undoes the rotation.
        transpose: The backward pass: query and key are gradients of the results.
        out: Memory for the result, or for both; `query` and `key` themselves rotate in place.

    Returns:
        The rotated query, or the rotated query and key.

    Raises:
        ValueError: A shape or an option does not fit.
        TypeError: A dtype is not offered.
        IndexError: A position is below -1 or not finite.

    Examples:
        >>> import numpy as np
        >>> from posembed_kernels.numpy import rotary
        >>> query = np.ones((1, 4, 2, 8), np.float32)
        >>> bool((abs(rotary(rotary(query), inverse=True) - query) < 1e-6).all())
        True
    """
    fields = {**kernels.rotation(spec, np.shape(query)[-1] if np.ndim(query) else 0)}
    fields |= {"layout": kernels.layout_number(layout), "offset": offset}
    fields |= {"inverse": inverse, "transpose": transpose}
    tensors = {"positions": positions, "cu_seqlens": cu_seqlens, "learned_frequencies": frequencies}
    return _rotate(query, key, fields, out, **tensors)


def rotary_tables(
    query: Any,
    key: Any,
    cos: Any,
    sin: Any,
    *,
    layout: str = "bhsd",
    interleaved: bool = False,
    half_width: bool = False,
    start: int = 0,
    numerics: str = "float32",
    transpose: bool = False,
    out: Array | tuple[Array, Array] | None = None,
) -> Any:
    """Rotates by given cosines and sines, with the roundings of a PyTorch program.

    Args:
        query: ``[batch, heads, seq, head_dim]``, or as `layout` says.
        key: The same with heads of its own, or None.
        cos: ``[seq, width]``, ``[batch or 1, seq, width]`` or ``[batch or 1, seq, heads, width]``.
        sin: The same.
        layout: As for ``rotary``.
        interleaved: Pairs are (2i, 2i + 1).
        half_width: `width` is the number of pairs, not of components.
        start: The first rotated component.
        numerics: "float32", which rounds products to query's dtype, or "float32_product".
        transpose: The backward pass.
        out: As for ``rotary``.

    Returns:
        The rotated query, or the rotated query and key.

    Raises:
        ValueError: A shape or an option does not fit.
        TypeError: A dtype is not offered, or tables are wider than query with numerics "float32".

    Examples:
        >>> import numpy as np
        >>> from posembed_kernels.numpy import rotary_tables
        >>> angles = np.outer(np.arange(3), [1.0, 0.01])  # [seq, head_dim / 2]
        >>> query = np.ones((1, 8, 3, 4))
        >>> turned = rotary_tables(query, None, np.cos(angles), np.sin(angles), half_width=True)
        >>> turned[0, 0, 1].round(2).tolist()
        [-0.3, 0.99, 1.38, 1.01]
    """
    fields: kernels.Fields = {
        "layout": kernels.layout_number(layout),
        "rotary_dim": np.shape(cos)[-1] * (2 if half_width else 1),
        "rotary_start": start,
        "interleaved": interleaved,
        "half_width": half_width,
        "transpose": transpose,
        "wide_products": kernels.choice("numerics", numerics, ("float32", "float32_product")),
    }
    return _rotate(query, key, fields, out, cosines=cos, sines=sin)


def _encode(x: Array | None, out: Array, positions: Any, offset: int, spec: Spec) -> Array:
    fields = {**kernels.sinusoid(spec, out.shape[-1]), "offset": offset}
    _run("posembed_sinusoidal", fields, x=x, out=out, positions=_optional(positions))
    return out


def sinusoidal(x: Any, positions: Any = None, *, spec: Spec = None, offset: int = 0) -> Array:
    """Adds sinusoidal encodings.

    Args:
        x: ``[batch, seq, embedding_dim]`` or ``[seq, embedding_dim]``.
        positions: ``[seq]`` or ``[batch or 1, seq]``. None: `offset`, `offset` + 1, …
        spec: Fields of ``posembed.SinusoidalSpec`` with one axis that differ from its defaults, or
            the text of its ``to_json()``.
        offset: The first position.

    Returns:
        `x` plus encodings, in its shape and dtype.

    Raises:
        ValueError: A shape or an option does not fit.
        TypeError: A dtype is not offered.
        IndexError: A position is not finite.

    Examples:
        >>> import numpy as np
        >>> from posembed_kernels.numpy import sinusoidal
        >>> sinusoidal(np.zeros((2, 4)), offset=1).round(2).tolist()
        [[0.84, 0.54, 0.01, 1.0], [0.91, -0.42, 0.02, 1.0]]
    """
    rows = _readable(x)
    if rows.ndim not in (2, 3):
        expected = "[batch, seq, embedding_dim] or [seq, embedding_dim]"
        raise ValueError(f"x: expected {expected}, got {list(rows.shape)}")
    return _encode(rows, np.empty(rows.shape, rows.dtype), positions, offset, spec)


def sinusoidal_encode(positions: Any, *, spec: Spec, dtype: Any = np.float32) -> Array:
    """Encodings ``[*positions.shape, embedding_dim]`` of ``[seq]`` or ``[batch, seq]``.

    Args:
        positions: Integers or fractions.
        spec: As for ``sinusoidal``, with ``embedding_dim``.
        dtype: Of the result.

    Raises:
        ValueError: A shape or an option does not fit.
        TypeError: A dtype is not offered.
        IndexError: A position is not finite.

    Examples:
        >>> from posembed_kernels.numpy import sinusoidal_encode
        >>> sinusoidal_encode([0, 0.5], spec={"embedding_dim": 2}, dtype=float).round(2).tolist()
        [[0.0, 1.0], [0.48, 0.88]]
    """
    dim = json.loads(kernels.text_of(spec)).get("embedding_dim", 0)
    return _encode(None, np.empty((*np.shape(positions), dim), dtype), positions, 0, spec)


def alibi_slopes(num_heads: int, *, kind: str = "paper", max_bias: float = 8.0) -> Array:
    """The slopes ``[num_heads]`` of a model, float32; `kind` is "paper" or "geometric".

    Raises:
        ValueError: There are no heads or too many, or `kind` or `max_bias` is wrong.

    Examples:
        >>> from posembed_kernels.numpy import alibi_slopes
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    slopes = np.empty(max(num_heads, 0), np.float32)
    number = kernels.choice("kind", kind, ("paper", "geometric"))
    call, memory = kernels.library().posembed_alibi_slopes, ctypes.c_void_p(slopes.ctypes.data)
    kernels.check(call(ctypes.c_int64(num_heads), ctypes.c_double(max_bias), number, memory))
    return slopes


def alibi_bias(
    slopes: Any,
    query_length: int,
    key_length: int,
    *,
    causal: bool = True,
    dtype: Any = None,
    query_offset: int | None = None,
    query_positions: Any = None,
    key_positions: Any = None,
    attention_mask: Any = None,
    apply_mask: bool = True,
) -> Array:
    """The bias ``-slope * distance``: ``posembed.functional.alibi_bias``.

    Args:
        slopes: ``[heads]``, ``[2, heads]`` (before, after) or ``[batch, sides, heads]``.
        query_length: Rows.
        key_length: Columns.
        query_offset: Position of the first query. Default: the last query is at the last key.
        causal: Keys after the query are hidden.
        apply_mask: Hidden keys get -infinity, otherwise 0.
        query_positions: ``[query_length]`` or ``[batch, query_length]``.
        key_positions: The same of keys.
        attention_mask: bool ``[key_length]`` or ``[batch, key_length]``; False: hidden.
        dtype: Of the result; None: that of `slopes`.

    Returns:
        ``[heads, query_length, key_length]``, after a batch where an argument has one.

    Raises:
        ValueError: A shape or an option does not fit.
        TypeError: A dtype is not offered.
        IndexError: A position is beyond int32.

    Examples:
        >>> from posembed_kernels.numpy import alibi_bias
        >>> alibi_bias([0.5], query_length=2, key_length=3).tolist()
        [[[-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]]
    """
    slopes = np.asarray(slopes, order="C")
    if slopes.ndim == 0:
        raise ValueError("slopes: expected [heads], [2, heads] or [batch, sides, heads], got []")
    rows = {"query_positions": query_positions, "key_positions": key_positions}
    rows["attention_mask"] = None if attention_mask is None else np.asarray(attention_mask) != 0
    arrays = {
        name: None if row is None else np.asarray(row, order="C") for name, row in rows.items()
    }
    batches = [each.shape[0] for each in arrays.values() if each is not None and each.ndim == 2]
    batches += [slopes.shape[0]] if slopes.ndim == 3 else []
    shape = (max(batches),) if batches else ()
    out = np.empty((*shape, slopes.shape[-1], query_length, key_length), dtype or slopes.dtype)
    fields: kernels.Fields = {"not_causal": not causal, "no_mask": not apply_mask}
    if query_offset is not None:
        fields["query_offset"] = np.array([query_offset], np.int64)
    _run("posembed_alibi_bias", fields, slopes=slopes, out=out, **arrays)
    return out


def embedding(ids: Any, weight: Any, *, scale: float = 1.0, out: Array | None = None) -> Array:
    """The rows ``scale * weight[ids]`` of a table.

    Args:
        ids: int32 or int64 of any shape.
        weight: ``[rows, embedding_dim]``.
        scale: Multiplies rows.
        out: Memory for the result, contiguous.

    Returns:
        ``[*ids.shape, embedding_dim]``

    Raises:
        ValueError: A shape does not fit.
        TypeError: A dtype is not offered.
        IndexError: An id is not a row; the text names it and its place.

    Examples:
        >>> import numpy as np
        >>> from posembed_kernels.numpy import embedding
        >>> embedding([2, 0], np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]), scale=10.0).tolist()
        [[40.0, 50.0], [0.0, 10.0]]
    """
    weight, ids = _readable(weight), np.asarray(ids, order="C")
    out = _result(out, (*ids.shape, weight.shape[-1] if weight.ndim else 0), weight.dtype)
    _run(
        "posembed_embedding",
        {"scale": kernels.nonzero("scale", scale)},
        weight=weight,
        ids=ids,
        out=out,
    )
    return out
