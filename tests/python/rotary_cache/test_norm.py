"""Tests of rotary_cache_ with a norm: it equals norm_rotary, then copies to the cache."""

from typing import Any

import posembed as pe
import pytest
import torch
from support.case import FLOATING, assert_close
from support.refusals import refused

SPEC = pe.RotarySpec(32, rotary_dim=16, rotary_start=8, interleaved=True)
FLOAT8 = torch.float8_e4m3fn


def make(
    device: torch.device, dtype: torch.dtype, cache: torch.dtype, over: str, biased: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of rotary_cache_ without a norm, and the weights and biases."""
    torch.manual_seed(0)
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    given = {
        "query": torch.randn(5, 3, 32, **place),
        "key": torch.randn(5, 2, 32, **place),
        "value": torch.randn(5, 2, 32, **place),
        "key_cache": torch.zeros(3, 4, 2, 32, device=device, dtype=cache),
        "value_cache": torch.zeros(3, 4, 2, 32, device=device, dtype=cache),
        "slot_mapping": torch.tensor([7, -1, 0, 11, 3], device=device),
        "positions": torch.tensor([5, 6, -1, 100000, 2], device=device),
        "spec": SPEC,
    }
    heads = {"query": 3, "key": 2}
    parameters = {
        f"{name}_{kind}": torch.randn((count if over == "all_heads" else 1) * 32, **place)
        for name, count in heads.items()
        for kind in (("weight", "bias") if biased else ("weight",))
    }
    return given, parameters


@pytest.mark.parametrize("rotate_key", [False, True])
@pytest.mark.parametrize("over", ["head", "all_heads"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
def test_equals_norm_rotary_then_copy(
    dtype: torch.dtype, float8: bool, norm: Any, over: Any, rotate_key: bool, device: torch.device
) -> None:
    cache = FLOAT8 if float8 else dtype
    given, parameters = make(device, dtype, cache, over, norm == "layer")
    query, key = pe.functional.norm_rotary(
        given["query"],
        given["key"],
        positions=given["positions"],
        **parameters,
        norm=norm,
        over=over,
        eps=1e-5,
        spec=SPEC,
        layout="thd",
    )
    before = given["key"].clone()
    found = pe.functional.rotary_cache_(**given, **parameters, norm=norm, over=over, eps=1e-5, rotate_key=rotate_key)
    kept = given["slot_mapping"] >= 0
    slots = given["slot_mapping"][kept]
    # RMSNorm of each head has another kernel in norm_rotary, with other roundings of float32.
    same = norm == "layer" or over == "all_heads"
    tolerance = 0.0 if same else 2 * torch.finfo(dtype).eps
    assert found is given["query"]
    assert_close(found, query, tolerance)
    assert_close(given["key"], key if rotate_key else before, tolerance if rotate_key else 0.0)
    keys, values = (given[f"{x}_cache"].flatten(0, 1)[slots] for x in ("key", "value"))
    assert_close(
        keys.to(torch.float64), key[kept].to(cache).to(torch.float64), 2**-3 if float8 and not same else tolerance
    )
    assert torch.equal(values.float(), given["value"][kept].to(cache).float())


def test_without_weights_and_into_other_memory(device: torch.device) -> None:
    given, _ = make(device, torch.bfloat16, torch.bfloat16, "head", False)
    query = given["query"].clone()
    out = torch.empty_like(query)
    pe.functional.rotary_cache_(**given, norm="rms", query_out=out)
    expected = pe.functional.norm_rotary(query, positions=given["positions"], spec=SPEC, layout="thd")
    assert torch.equal(given["query"], query)
    assert_close(out, expected, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"norm": None}, ValueError, "norm: expected 'rms' or 'layer' with weights"),
        ({"norm": "batch"}, ValueError, "norm: expected 'rms' or 'layer', got 'batch'"),
        ({"over": "all_heads"}, ValueError, r"query_weight: expected heads \* head_dim 96, got 32"),
        ({"key_weight": torch.ones(8)}, ValueError, "key_weight: expected head_dim 32, got 8"),
        ({"query_weight": torch.ones(32).half()}, TypeError, "query_weight: expected the dtype of"),
        ({"query_bias": torch.ones(32)}, ValueError, "query_bias: expected none without LayerNorm"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number of at least 0, got -1"),
    ],
)  # fmt: skip
def test_refusals_write_nothing(change: dict[str, Any], error: type[Exception], text: str) -> None:
    given, parameters = make(torch.device("cpu"), torch.float32, torch.float32, "head", False)
    query = given["query"].clone()
    refused((lambda: pe.functional.rotary_cache_(**{**given, **parameters, "norm": "rms", **change}), error, text))  # fmt: skip
    assert torch.equal(given["query"], query)
