"""Tests that in-place functions return their tensors, as torch's do."""

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from posembed import functional
from support.calls import Arguments, functions, written
from torch import Tensor

# Names of tests, functions or methods, arguments that are left out, and those that results are
# written to beside their sources.
FUNCTIONS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    **{name: ((), {}) for name in functions() if name.endswith("_")},
    "rotary_, alone": (("key",), {}),
    "norm_rotary_, alone": (("key", "key_weight"), {}),
    "rotary_tables_, alone": (("key",), {}),
    "rotary, out": (("key",), {"out": "query"}),
    "rotary, pair, out": ((), {"out": "query key"}),
    "rotary_tables, out": (("key",), {"out": "query"}),
    "rotary_cache_, query_out": ((), {"query_out": "query"}),
    "mla_rotary_cache_, query_out": ((), {"query_out": "query"}),
    "alibi_bias, out": (("attention_mask",), {"out": "bias"}),
}
METHODS = {
    "RotaryEmbedding.rotate_": ("rotary_", ("query", "key")),
    "RotaryEmbedding.rotate_, alone": ("rotary_", ("query",)),
    "RotaryEmbedding.rerotate_": ("rerotate_", ("key", "old_positions", "new_positions")),
    "ALiBi.add_": ("alibi_add_", ("scores",)),
    "ALiBi.softmax_": ("alibi_softmax_", ("scores",)),
}
CASES = [*FUNCTIONS, *METHODS, *(f"cpp.{name}" for name in METHODS)]


def without_elements(tensor: Tensor) -> Tensor:
    """As numpy makes one: all strides are 0."""
    return torch.empty(0, dtype=tensor.dtype).as_strided(tensor.shape, (0,) * tensor.dim())


def call_of(name: str, *sizes: int) -> tuple[Callable[..., Any], Arguments, list[str]]:
    """A call, its arguments, and the names of those that it returns."""
    first = name.removeprefix("cpp.")
    if first in METHODS:
        module, method = first.partition(",")[0].split(".")
        size = 2 if module == "ALiBi" else 16
        made = getattr(pe.cpp if first != name else pe, module)(size)
        row, names = METHODS[first]
        given = {key: functions(*sizes)[row][key] for key in names}
        return getattr(made, method), given, [key for key in names if key in written(row)]
    without, outs = FUNCTIONS[name]
    row = name.partition(",")[0]
    given = {key: v for key, v in functions(*sizes)[row].items() if key not in without}
    if row == "rotary_tables_" or row == "rotary_tables":
        given.setdefault("key", None)
    given["bias"] = torch.empty(2, given.get("query_length", 0), given.get("key_length", 0))
    for out, sources in outs.items():
        made = tuple(torch.full_like(given[source], 7.0) for source in sources.split())
        given[out] = made if len(made) > 1 else made[0]
    del given["bias"]
    returned = [*outs] or [key for key in written(row) if given.get(key) is not None]
    caches = row.endswith("rotary_cache_")
    return getattr(functional, row), given, returned[:1] if caches else returned


def tensors(given: Arguments, names: list[str]) -> list[Tensor]:
    """The tensors of arguments, of which some are pairs."""
    values = [given[name] for name in names]
    return [t for value in values for t in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_return_what_they_write(name: str, compiled: bool) -> None:
    if compiled and name.startswith("cpp."):
        pytest.skip("torch.compile does not trace modules of C++")
    call, given, names = call_of(name)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    before = [tensor.clone() for tensor in tensors(given, names)]
    with torch.no_grad():
        returned = call(**given)
    assert isinstance(returned, tuple) == (len(before) > 1)
    results = returned if isinstance(returned, tuple) else (returned,)
    for result, tensor, old in zip(results, tensors(given, names), before, strict=True):
        assert result is tensor
        assert not torch.equal(tensor, old)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 2), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_take_tensors_without_elements(name: str, sizes: tuple[int, int, int]) -> None:
    if sizes[2] == 0 and any(each in name.lower() for each in ("alibi", "cache", "packed")):
        pytest.skip("needs heads")
    call, given, names = call_of(name, *sizes)
    given = {
        key: without_elements(value) if isinstance(value, Tensor) and not value.numel() else value
        for key, value in given.items()
    }
    with torch.no_grad():
        returned = call(**given)
    for result in returned if isinstance(returned, tuple) else (returned,):
        assert result.numel() == 0 or name.startswith("alibi_bias")
    assert all(tensor.numel() == 0 for tensor in tensors(given, names)) or name == "alibi_bias, out"


@pytest.mark.parametrize("name", CASES)
def test_tensors_of_inference_mode_are_written_or_refused(name: str) -> None:
    """Never both: torch itself refuses some after they were written."""
    call, given, names = call_of(name)
    with torch.inference_mode():
        for key in names:
            value = given[key]
            pair = isinstance(value, tuple)
            given[key] = tuple(t.clone() for t in value) if pair else value.clone()
        before = [tensor.clone() for tensor in tensors(given, names)]
    try:
        call(**given)
        refused = False
    except (ValueError, RuntimeError):
        refused = True
    assert all(map(torch.equal, tensors(given, names), before)) == refused
    if "rerotate_" in name:
        assert refused
    with torch.inference_mode():
        call(**given)
    assert not all(map(torch.equal, tensors(given, names), before))
