"""posembed's kernels without torch: ``posembed_kernels.numpy``, ``posembed_kernels.jax``, and C.

Importing posembed loads torch; this package lies beside it, loads libposembed_kernels.so by ctypes,
and needs NumPy alone. C programs include posembed_kernels.h, which documents each call.
"""

import ctypes
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["include_dir", "library_path"]

_POSEMBED = Path(__file__).resolve().parent.parent / "posembed"
_ERRORS = {1: ValueError, 2: TypeError, 3: IndexError}
_LAYOUTS = ("bshd", "bhsd", "sbhd", "thd")
_SCALINGS = (None, "linear", "ntk", "yarn", "llama3")
_PRESETS = {"vaswani": 0, "marian": 1, "tensor2tensor": 2, "ddpm": 2, "fairseq": 2}

Spec = Mapping[str, Any] | str | None
Fields = dict[str, Any]  # a struct's numbers, and arrays of the host's memory


def library_path() -> Path:
    """The library with the symbols of posembed_kernels.h.

    Raises:
        ImportError: It is missing.
    """
    path = _POSEMBED / "lib" / "libposembed_kernels.so"
    if not path.is_file():
        raise ImportError(f"posembed is not built: {path.parent} has no {path.name}")
    return path


def include_dir() -> Path:
    """The folder of posembed_kernels.h."""
    return _POSEMBED / "include"


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
PARALLEL_FOR = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, TASK, ctypes.c_void_p
)


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of the header after its size: p pointer, q int64, i int32 or enum, d double."""
    types = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "d": ctypes.c_double}
    pairs = [field.split(":") for field in f"size:q {fields}".split()]
    made = [(field, types[kind]) for names, kind in pairs for field in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": made})


class Threads(ctypes.Structure):
    """posembed_threads."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("parallel_for", PARALLEL_FOR),
        ("pool", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


STRUCTS = {
    "posembed_rotary_series": _struct(
        "Series",
        "rotary_dim:q base:d scaling:i factor:d original_max_positions:q low,high:d fractional:i "
        "restarts_axis:p",
    ),
    "posembed_rotary": _struct(
        "Rotation",
        "query,key,query_out,key_out:p layout:i head_dim,rotary_dim,rotary_start:q "
        "interleaved,reverse,inverse,transpose:i attention_factor:d positions:p offset:q "
        "cu_seqlens,frequencies,frequencies_low,axis_of_pair:p within_axes:i decay:p "
        "decay_center:d learned_frequencies,cosines,sines:p half_width,wide_products:i",
    ),
    "posembed_sinusoidal": _struct(
        "Sinusoid",
        "x,out,positions:p offset:q preset:i frequencies,frequencies_low:p cos_first:i scale:d "
        "position_scale,first,order:q",
    ),
    "posembed_alibi_bias": _struct(
        "Alibi",
        "slopes,out,query_offset:p not_causal,no_mask:i "
        "query_positions,key_positions,attention_mask:p",
    ),
    "posembed_embedding": _struct("Gather", "weight,ids,out:p scale:d"),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.posembed_last_error.restype = ctypes.c_char_p
    if loaded.posembed_abi_version() != 1:
        raise ImportError(f"{library_path()} has another ABI than this posembed_kernels; reinstall")
    return loaded


def check(status: int) -> None:
    """Raises the error of a call that failed."""
    if status != 0:
        raise _ERRORS.get(status, RuntimeError)(library().posembed_last_error().decode())


def struct(function: str, fields: Fields) -> ctypes.Structure:
    """The struct of a call; the arrays of `fields` must outlive it."""
    kind = STRUCTS[function]
    for name, value in fields.items():  # ctypes would drop the upper bits
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: expected an integer of 64 bits, got {value}")
        if isinstance(value, str):
            raise ValueError(f"{name}: expected a number, got {value!r}")
    values = {
        name: value.ctypes.data if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }
    return kind(size=ctypes.sizeof(kind), **values)


def nonzero(argument: str, value: float) -> float:
    """A number, for which a struct's 0 would mean the default."""
    if value == 0:
        raise ValueError(f"{argument}: expected a number other than 0")
    return value


def choice(argument: str, value: Any, known: Any) -> int:
    """The number of an option."""
    if value not in known:
        raise ValueError(
            f"{argument}: expected one of {', '.join(map(repr, known))}, got {value!r}"
        )
    return int(known[value] if isinstance(known, dict) else known.index(value))


def _refuse_unknown(argument: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key, value in given.items() if key not in known and value is not None]
    if unknown:
        have = ", ".join(known)
        raise ValueError(f"{argument}: no {unknown[0]!r} is offered without torch, but {have}")


def _series(spec: Mapping[str, Any], rotary_dim: int, axis_of_pair: Any) -> Fields:
    """Frequencies, and what else a scaling says."""
    scaling = dict(spec.get("scaling") or {"type": None})
    kind = scaling.pop("type")
    common = ("factor", "original_max_positions", "attention_factor")
    own = {"yarn": ("beta_fast", "beta_slow", "truncate"), "xpos": ("scale_base", "center")}
    bounds = ("low_freq_factor", "high_freq_factor")
    _refuse_unknown(f"scaling {kind!r}", scaling, (*common, *own.get(kind, bounds)))
    pairs = rotary_dim // 2
    high, low, factor = np.empty(pairs), np.empty(pairs), ctypes.c_double(1.0)
    if (custom := spec.get("custom_frequencies")) is not None:
        high, low = np.array(custom, np.float64), np.zeros(pairs)
        if kind is not None or high.shape != (pairs,):
            raise ValueError(f"custom_frequencies: expected {pairs} numbers and no scaling")
        given = spec.get("custom_attention_factor")
        factor.value = 1.0 if given is None else nonzero("custom_attention_factor", given)
    else:
        fields = {
            "rotary_dim": rotary_dim,
            "base": spec.get("base", 10000.0),
            "scaling": choice("scaling", None if kind == "xpos" else kind, _SCALINGS),
            "factor": scaling.get("factor") or 0.0,
            "original_max_positions": scaling.get("original_max_positions") or 0,
            "low": scaling.get("beta_slow", scaling.get("low_freq_factor", 0.0)),
            "high": scaling.get("beta_fast", scaling.get("high_freq_factor", 0.0)),
            "fractional": not scaling.get("truncate", True),
        }
        if (spec.get("sections") or {}).get("restart"):
            fields["restarts_axis"] = axis_of_pair
        series = struct("posembed_rotary_series", fields)
        pointers = (high.ctypes.data, low.ctypes.data)
        call = library().posembed_rotary_frequencies
        check(call(ctypes.byref(series), *map(ctypes.c_void_p, pointers), ctypes.byref(factor)))
    result: Fields = {"frequencies": high, "frequencies_low": low}
    result["attention_factor"] = scaling.get("attention_factor") or factor.value
    if kind == "xpos":
        share = [(pair / pairs + 0.4) / 1.4 for pair in range(pairs)]
        result["decay"] = np.array([math.log2(each) / scaling["scale_base"] for each in share])
        result["decay_center"] = scaling["center"]
    return result


@functools.lru_cache(64)
def _rotation(text: str, head_dim: int) -> Fields:
    spec = json.loads(text)
    known = ("base", "head_dim", "rotary_dim", "rotary_start", "interleaved", "reverse", "numerics")
    more = ("scaling", "sections", "custom_frequencies", "custom_attention_factor", "score_scale")
    _refuse_unknown("spec", spec, (*known, *more))
    choice("numerics", spec.get("numerics", "exact"), ("exact",))
    head_dim = spec.get("head_dim") or head_dim
    rotary_dim = head_dim if spec.get("rotary_dim") is None else spec["rotary_dim"]
    nonzero("rotary_dim", rotary_dim)
    fields: Fields = {"head_dim": head_dim, "rotary_dim": rotary_dim}
    for name in ("rotary_start", "interleaved", "reverse"):
        fields[name] = spec.get(name) or 0
    axis_of_pair = None
    if (sections := spec.get("sections")) is not None:
        axis_of_pair = np.array(sections["axis_of_pair"], np.uint8)
        if axis_of_pair.shape != (rotary_dim // 2,):
            raise ValueError(f"sections: expected an axis for each of {rotary_dim // 2} pairs")
        fields["axis_of_pair"] = axis_of_pair
        fields["within_axes"] = bool(sections.get("within_axes"))
    return {**fields, **_series(spec, rotary_dim, axis_of_pair)}


def text_of(spec: Spec) -> str:
    """A specification as JSON."""
    if not isinstance(spec, str | Mapping | None):
        raise TypeError(f"spec: expected a dict or JSON text, got {type(spec).__name__}")
    return spec if isinstance(spec, str) else json.dumps(dict(spec or {}))


def rotation(spec: Spec, head_dim: int) -> Fields:
    """The fields of a rotation that a specification fixes."""
    return _rotation(text_of(spec), head_dim)


def layout_number(layout: str) -> int:
    """The number of a layout."""
    return choice("layout", layout, _LAYOUTS)


@functools.lru_cache(64)
def _sinusoid(text: str, dim: int) -> Fields:
    spec = json.loads(text)
    known = ("embedding_dim", "base", "preset", "cos_first", "shift", "scale", "position_scale")
    _refuse_unknown("spec", spec, (*known, "padding_idx"))
    if (expected := spec.get("embedding_dim") or dim) != dim:
        raise ValueError(f"x: expected embedding_dim {expected}, got {dim}")
    preset, padding_idx = spec.get("preset", "vaswani"), spec.get("padding_idx")
    fields: Fields = {"preset": choice("preset", preset, _PRESETS)}
    high, low = np.empty((dim + 1) // 2), np.empty((dim + 1) // 2)
    shift = None if spec.get("shift") is None else ctypes.byref(ctypes.c_double(spec["shift"]))
    numbers = (ctypes.c_int64(dim), ctypes.c_double(spec.get("base", 10000.0)), shift)
    memory = (ctypes.c_void_p(each.ctypes.data) for each in (high, low))
    check(library().posembed_sinusoidal_frequencies(fields["preset"], *numbers, *memory))
    fields |= {
        "frequencies": high,
        "frequencies_low": low,
        "cos_first": bool(spec.get("cos_first")),
    }
    fields |= {"scale": nonzero("scale", spec.get("scale", 1.0))}
    fields |= {"position_scale": spec.get("position_scale", 1)}
    usual = 2 if preset == "fairseq" else 0
    return {**fields, "first": usual if padding_idx is None else padding_idx + 1}


def sinusoid(spec: Spec, dim: int) -> Fields:
    """The fields of a sinusoidal encoding that a specification fixes."""
    return _sinusoid(text_of(spec), dim)
