"""Rotary embeddings, sinusoids, ALiBi and rows of tables for JAX, on the CPU.

The functions work under ``jax.jit``, ``jax.grad`` and ``jax.vmap``; values have the bits of
posembed's operators. The first call compiles jax_handler.cpp against jaxlib's headers (a C++
compiler is needed: ``c++``, or the one that CXX names) and keeps it in ``~/.cache/posembed``.
"""

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import posembed_kernels as kernels

__all__ = ["alibi_bias", "embedding", "rotary", "sinusoidal", "sinusoidal_encode"]

_FUNCTIONS = ("posembed_rotary", "posembed_sinusoidal", "posembed_alibi_bias", "posembed_embedding")
_SOURCE = Path(__file__).with_name("jax_handler.cpp")


def _compiled() -> Path:
    """The handler's library, compiled once for a jaxlib and a posembed."""
    header = kernels.include_dir() / "posembed_kernels.h"
    sources = _SOURCE.read_bytes() + header.read_bytes()
    setting = f"{jaxlib.__version__} {kernels.library_path()}".encode()
    name = f"jax-{hashlib.sha256(sources + setting).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "posembed"
    if (folder / name).is_file():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    library = kernels.library_path()
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        includes = [f"-I{jax.ffi.include_dir()}", f"-I{header.parent}"]
        options = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-Wl,-rpath,{library.parent}"]
        command = [compiler, *options, *includes, str(_SOURCE), str(library), "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ImportError(
                f"posembed_kernels.jax needs a C++ compiler, not {compiler}"
            ) from error
        except subprocess.CalledProcessError as error:
            raise ImportError(f"{compiler} could not compile {_SOURCE}: {error.stderr}") from error
        os.replace(made, folder / name)
    return folder / name


@functools.cache
def _register() -> None:
    handler = ctypes.CDLL(str(_compiled())).posembed_jax
    jax.ffi.register_ffi_target("posembed", jax.ffi.pycapsule(handler), platform="cpu")


def _words(data: bytes) -> Any:
    return np.frombuffer(data.ljust(-(-max(len(data), 1) // 8) * 8, b"\0"), np.int64)


def _run(
    function: str, fields: kernels.Fields, inputs: dict[str, Any], outputs: dict[str, Any]
) -> list[Any]:
    _register()
    kind = kernels.STRUCTS[function]
    given = {name: array for name, array in inputs.items() if array is not None}
    arrays = {name: each for name, each in fields.items() if isinstance(each, np.ndarray)}
    call = kernels.struct(function, {k: v for k, v in fields.items() if k not in arrays})
    pieces = [_words(array.tobytes()) for array in arrays.values()]
    starts = np.cumsum([0, *(len(piece) for piece in pieces)])
    places = [
        (getattr(kind, name).offset, int(start))
        for name, start in zip(arrays, starts, strict=False)
    ]
    attributes = {
        "function": np.int32(_FUNCTIONS.index(function)),
        "call": _words(bytes(call)),
        "tensors": np.array([getattr(kind, name).offset for name in (*given, *outputs)], np.int64),
        "memory": np.concatenate([*pieces, np.zeros(1, np.int64)]),
        "places": np.array(places, np.int64).reshape(-1),
    }
    kinds = list(outputs.values())
    results: list[Any] = jax.ffi.ffi_call("posembed", kinds, vmap_method="sequential")(
        *given.values(), **attributes
    )
    return results


def _like(array: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(array), array.dtype)


_Call = tuple[Any, ...]  # what is fixed when a function is traced


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(call: _Call, rotated: list[Any], rows: dict[str, Any]) -> list[Any]:
    text, layout, offset, inverse, transpose = call
    fields = {**kernels.rotation(text, rotated[0].shape[-1]), "offset": offset, "inverse": inverse}
    fields |= {"layout": kernels.layout_number(layout), "transpose": transpose}
    names = ("query", "key")[: len(rotated)]
    inputs = {**dict(zip(names, rotated, strict=True)), **rows}
    outputs = {f"{name}_out": _like(each) for name, each in zip(names, rotated, strict=True)}
    return _run("posembed_rotary", fields, inputs, outputs)


def _rotate_forward(call: _Call, rotated: list[Any], rows: dict[str, Any]) -> Any:
    return _rotate(call, rotated, rows), rows


def _rotate_backward(call: _Call, rows: dict[str, Any], gradients: list[Any]) -> Any:
    return _rotate((*call[:-1], not call[-1]), gradients, rows), None


_rotate.defvjp(_rotate_forward, _rotate_backward)


def rotary(
    query: Any,
    key: Any = None,
    positions: Any = None,
    *,
    spec: kernels.Spec = None,
    layout: str = "bshd",
    offset: int = 0,
    cu_seqlens: Any = None,
    inverse: bool = False,
) -> Any:
    """Rotates query, or query and key: ``posembed_kernels.numpy.rotary`` for JAX.

    `positions` and `cu_seqlens` may be traced and have no gradient; the rest is fixed when the
    function is traced. The backward pass is the inverse rotation, on the same kernel.

    Args:
        query: ``[batch, seq, heads, head_dim]``, or as `layout` says.
        key: The same with heads of its own.
        positions: ``[seq]``, ``[batch or 1, seq]`` or, with sections, ``[axes, batch or 1, seq]``.
            None: `offset`, `offset` + 1, …
        spec: Fields of ``posembed.RotarySpec``, or the text of its ``to_json()``.
        layout: "bshd", "bhsd", "sbhd" or "thd" (``[tokens, heads, head_dim]``).
        offset: The first position.
        cu_seqlens: ``[documents + 1]``; positions restart in each document.
        inverse: Undoes the rotation.

    Returns:
        The rotated query, or the rotated query and key.

    Raises:
        ValueError: The specification or the layout is wrong.
        jax.errors.JaxRuntimeError: The kernels refuse a shape, a dtype or a value, such as a
            position below -1, when the program runs.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from posembed_kernels.jax import rotary
        >>> query = jnp.ones((1, 4, 2, 8))
        >>> turned = jax.jit(lambda q: rotary(q, spec={"base": 500000.0}, offset=7))(query)
        >>> bool(jnp.allclose((turned**2).sum(-1), 8.0))
        True
    """
    call = (kernels.text_of(spec), layout, offset, inverse, False)
    rotated = [jnp.asarray(each) for each in (query, key) if each is not None]
    rows = {"positions": positions, "cu_seqlens": cu_seqlens}
    given = {name: jnp.asarray(row) for name, row in rows.items() if row is not None}
    result = _rotate(call, rotated, given)
    return result[0] if key is None else tuple(result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add(call: _Call, x: Any, positions: Any) -> Any:
    text, offset = call
    fields = {**kernels.sinusoid(text, x.shape[-1]), "offset": offset}
    return _run("posembed_sinusoidal", fields, {"x": x, "positions": positions}, {"out": _like(x)})[
        0
    ]


_add.defvjp(
    lambda call, x, positions: (_add(call, x, positions), None),
    lambda call, _, gradient: (gradient, None),
)


def sinusoidal(x: Any, positions: Any = None, *, spec: kernels.Spec = None, offset: int = 0) -> Any:
    """Adds sinusoidal encodings: ``posembed_kernels.numpy.sinusoidal`` for JAX.

    Args:
        x: ``[batch, seq, embedding_dim]`` or ``[seq, embedding_dim]``.
        positions: ``[seq]`` or ``[batch or 1, seq]``, without a gradient. None: `offset`, …
        spec: Fields of ``posembed.SinusoidalSpec``, or the text of its ``to_json()``.
        offset: The first position.

    Returns:
        `x` plus encodings, in its shape and dtype.

    Raises:
        ValueError: The specification is wrong.
        jax.errors.JaxRuntimeError: As for ``rotary``.

    Examples:
        >>> import jax.numpy as jnp
        >>> from posembed_kernels.jax import sinusoidal
        >>> sinusoidal(jnp.ones((1, 4))).tolist()
        [[1.0, 2.0, 1.0, 2.0]]
    """
    rows = None if positions is None else jnp.asarray(positions)
    return _add((kernels.text_of(spec), offset), jnp.asarray(x), rows)


def sinusoidal_encode(positions: Any, *, spec: kernels.Spec, dtype: Any = jnp.float32) -> Any:
    """The encodings of positions: ``posembed_kernels.numpy.sinusoidal_encode`` for JAX.

    Args:
        positions: ``[seq]`` or ``[batch, seq]``, integers or fractions.
        spec: As for ``sinusoidal``, with ``embedding_dim``.
        dtype: Of the result.

    Returns:
        ``[*positions.shape, embedding_dim]``

    Raises:
        ValueError: The specification is wrong.
        jax.errors.JaxRuntimeError: As for ``rotary``.

    Examples:
        >>> import jax.numpy as jnp
        >>> from posembed_kernels.jax import sinusoidal_encode
        >>> sinusoidal_encode(jnp.array([0]), spec={"embedding_dim": 4}).tolist()
        [[0.0, 1.0, 0.0, 1.0]]
    """
    dim = json.loads(kernels.text_of(spec)).get("embedding_dim", 0)
    rows = jnp.asarray(positions)
    out = jax.ShapeDtypeStruct((*rows.shape, dim), dtype)
    fields = kernels.sinusoid(spec, dim)
    return _run("posembed_sinusoidal", fields, {"positions": rows}, {"out": out})[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bias(call: _Call, slopes: Any, rows: dict[str, Any]) -> Any:
    shape, dtype, causal, apply_mask, query_offset = call
    fields: kernels.Fields = {"not_causal": not causal, "no_mask": not apply_mask}
    if query_offset is not None:
        fields["query_offset"] = np.array([query_offset], np.int64)
    outputs = {"out": jax.ShapeDtypeStruct(shape, dtype)}
    return _run("posembed_alibi_bias", fields, {"slopes": slopes, **rows}, outputs)[0]


def _bias_forward(call: _Call, slopes: Any, rows: dict[str, Any]) -> Any:
    return _bias(call, slopes, rows), (slopes, rows)


def _bias_backward(call: _Call, saved: Any, gradient: Any) -> Any:
    """Sums the gradient times minus the distance, which is the bias of slope 1; 0 where hidden."""
    slopes, rows = saved
    shape, _, causal, _, query_offset = call
    sides = slopes.shape[-2] if slopes.ndim > 1 else 1
    parts = []
    for side in range(sides):
        one_side = np.arange(sides) == side
        units = jnp.broadcast_to(one_side[:, None] if slopes.ndim > 1 else 1.0, slopes.shape)
        wide = jnp.promote_types(gradient.dtype, jnp.float32)
        distances = _bias((shape, wide, causal, False, query_offset), units.astype(wide), rows)
        parts.append(jnp.where(distances == 0, 0, gradient * distances).sum((-2, -1)))
    result = jnp.stack(parts, -2) if slopes.ndim > 1 else parts[0]
    while result.ndim > slopes.ndim:
        result = result.sum(0)
    return result.astype(slopes.dtype), None


_bias.defvjp(_bias_forward, _bias_backward)


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
) -> Any:
    """The bias ``-slope * distance``: ``posembed_kernels.numpy.alibi_bias`` for JAX.

    Slopes ``[heads]``, ``[2, heads]`` or ``[batch, sides, heads]`` have a gradient; other arguments
    are those of NumPy's function.

    Returns:
        ``[heads, query_length, key_length]``, after a batch where an argument has one.

    Raises:
        jax.errors.JaxRuntimeError: As for ``rotary``.

    Examples:
        >>> import jax.numpy as jnp
        >>> from posembed_kernels.jax import alibi_bias
        >>> alibi_bias(jnp.array([0.5]), query_length=2, key_length=3).tolist()
        [[[-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]]
    """
    slopes = jnp.asarray(slopes)
    mask = None if attention_mask is None else jnp.asarray(attention_mask) != 0
    rows = {"query_positions": query_positions, "key_positions": key_positions}
    rows["attention_mask"] = mask
    given = {name: jnp.asarray(row) for name, row in rows.items() if row is not None}
    batches = [row.shape[0] for row in given.values() if row.ndim == 2]
    batches += [slopes.shape[0]] if slopes.ndim == 3 else []
    batch = (max(batches),) if batches else ()
    shape = (*batch, slopes.shape[-1], query_length, key_length)
    kind = jnp.dtype(dtype or slopes.dtype)
    return _bias((shape, kind, causal, apply_mask, query_offset), slopes, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(call: _Call, ids: Any, weight: Any) -> Any:
    out = jax.ShapeDtypeStruct((*ids.shape, weight.shape[-1]), weight.dtype)
    inputs = {"weight": weight, "ids": ids}
    return _run("posembed_embedding", {"scale": call[0]}, inputs, {"out": out})[0]


def _gather_backward(call: _Call, saved: Any, gradient: Any) -> Any:
    ids, weight = saved
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    sums = jnp.zeros(weight.shape, wide).at[ids].add(gradient.astype(wide))
    return None, (sums * call[0]).astype(gradient.dtype)


_gather.defvjp(
    lambda call, ids, weight: (_gather(call, ids, weight), (ids, weight)), _gather_backward
)


def embedding(ids: Any, weight: Any, *, scale: float = 1.0) -> Any:
    """Rows ``scale * weight[ids]`` of a table: ``posembed_kernels.numpy.embedding`` for JAX.

    The gradient of `weight` is summed by XLA, in float32 or wider.

    Args:
        ids: int32 or int64 of any shape.
        weight: ``[rows, embedding_dim]``.
        scale: Multiplies rows.

    Returns:
        ``[*ids.shape, embedding_dim]``

    Raises:
        ValueError: The scale is 0.
        jax.errors.JaxRuntimeError: An id is not a row, or as for ``rotary``.

    Examples:
        >>> import jax.numpy as jnp
        >>> from posembed_kernels.jax import embedding
        >>> embedding(jnp.array([2, 0]), jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    return _gather((kernels.nonzero("scale", scale),), jnp.asarray(ids), jnp.asarray(weight))
