"""Tests of norms and rotations of packed projections beside norm_rotary of separate tensors."""

from typing import Any

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.case import assert_close
from support.packed import DIM, GIVEN, SPEC, on, parts_of, projection
from support.refusals import refused
from torch import Tensor

CALLS: dict[str, dict[str, Any]] = {
    "blocks": {"heads": 4, "key_heads": 2, "eps": 1e-3, "weight_offset": 1.0},
    "blocks-bhsd": {"heads": 4, "key_heads": 1, "layout": "bhsd", "positions": GIVEN},
    "groups": {"heads": 6, "key_heads": 2, "order": "groups", "positions": GIVEN},
    "groups-bhsd": {"heads": 4, "key_heads": 2, "order": "groups", "layout": "bhsd", "offset": 3},
    "groups-sbhd": {"heads": 4, "key_heads": 2, "order": "groups", "layout": "sbhd", "positions": GIVEN},
    "groups-shared": {"heads": 4, "key_heads": 2, "order": "groups", "layout": "sbhd", "positions": GIVEN[0]},
    "gpt-neox": {"heads": 3, "order": "groups"},
    "unweighted": {"heads": 4, "key_heads": 2, "order": "groups", "weighted": (False, True)},
    "offsets": {"heads": 4, "key_heads": 2, "order": "groups", "offset": torch.tensor([4, 9])},
    "layer": {"heads": 4, "key_heads": 2, "order": "groups", "norm": "layer"},
    "all-heads": {"heads": 4, "key_heads": 2, "order": "groups", "over": "all_heads", "weighted": (False, False)},
}  # fmt: skip
every = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def weights_of(call: dict[str, Any], like: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    weights = torch.randn(2, DIM, device=like.device, dtype=like.dtype)
    return [w if given else None for w, given in zip(weights, call.get("weighted", (1, 1)), strict=True)]


def separate(qkv: Tensor, weights: Any, call: dict[str, Any]) -> list[Tensor]:
    given = {k: v for k, v in call.items() if k not in ("heads", "key_heads", "order", "weighted")}
    query, key, value = parts_of(qkv, call)
    return [*pe.functional.norm_rotary(query, key, *weights, spec=SPEC, **given), value]


def packed(qkv: Tensor, weights: Any, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    call = {k: v for k, v in call.items() if k != "weighted"}
    heads = call.pop("heads"), call.pop("key_heads", None)
    return pe.functional.norm_rotary_packed(qkv, *heads, *weights, spec=SPEC, **call)


@every
def test_bits_are_those_of_separate_tensors(call: dict[str, Any], device: torch.device) -> None:
    call = on(device, call)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        qkv = projection(call, device, dtype)
        weights = weights_of(call, qkv)
        results, expected = packed(qkv, weights, call), separate(qkv, weights, call)
        assert all(map(torch.equal, results, expected))
        assert results[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
        given = {k: v for k, v in call.items() if k != "weighted"}
        wide = torch.nn.functional.pad(qkv, (0, DIM))  # tokens apart from one another
        for written in (qkv.clone(), wide[..., :-DIM]):
            heads = given["heads"], given.get("key_heads")
            others = {k: v for k, v in given.items() if k not in ("heads", "key_heads")}
            same = pe.functional.norm_rotary_packed_(written, *heads, *weights, spec=SPEC, **others)
            assert same is written
            assert all(map(torch.equal, parts_of(written, call), expected))
        assert not wide[..., -DIM:].any()


@every
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_gradients_arrive_in_one_tensor(call: dict[str, Any], used: tuple[int, ...], device: torch.device) -> None:
    call = on(device, call)
    qkv = projection(call, device).requires_grad_()
    weights = [w if w is None else w.requires_grad_() for w in weights_of(call, qkv)]
    inputs = [qkv, *(w for w in weights if w is not None)]
    results, expected = packed(qkv, weights, call), separate(qkv, weights, call)
    fused = not {"norm", "over"} & set(call)
    if fused:
        assert len({result.grad_fn for result in results}) == 1
    upstream = [torch.randn(*x.shape[::-1], device=device).to(x).permute(3, 2, 1, 0) for x in expected]
    upstream[2] = upstream[2][..., :1].expand(upstream[2].shape)  # without strides
    found, wanted = (
        torch.autograd.grad([parts[i] for i in used], inputs, [upstream[i] for i in used], allow_unused=True)
        for parts in (results, expected)
    )
    for a, b in zip(found, wanted, strict=True):
        if a is None:
            assert b is None
        else:  # the one node gives zeros where separate tensors give nothing
            assert_close(a, torch.zeros_like(a) if b is None else b, 1e-12)
    assert found[0].is_contiguous() or not fused


@every
def test_derivatives_of_every_order(call: dict[str, Any], device: torch.device) -> None:
    call = on(device, call)
    qkv = projection(call, device).requires_grad_()
    weights = weights_of(call, qkv)

    def function(x: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        return packed(x, w or weights, call)

    both = all(w is not None for w in weights)
    inputs = (qkv, *(w.requires_grad_() for w in weights)) if both else (qkv,)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)

    def second(rotate: Any) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return sum((y.sin() * y).sum() for y in rotate(x, weights, call))

        inner = torch.func.grad(total)
        return torch.func.grad(lambda x: inner(x).cos().sum())(qkv.detach())

    assert_close(second(packed), second(separate), 1e-11)


@pytest.mark.parametrize("name", ["blocks", "groups", "gpt-neox"])
def test_compiled_with_the_projection(name: str, device: torch.device) -> None:
    call = {k: v for k, v in CALLS[name].items() if k in ("heads", "key_heads", "order")}
    key_heads = call.get("key_heads", call["heads"])
    linear = torch.nn.Linear(12, (call["heads"] + 2 * key_heads) * DIM, device=device).double()
    weights = [w.requires_grad_() for w in weights_of(call, linear.weight)]
    leaves = [*linear.parameters(), *weights]
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: packed(linear(x), weights, call), backend=graphs, fullgraph=True, dynamic=True)
    for batch, seq in ((11, 13), (17, 19), (23, 7)):
        x = torch.randn(batch, seq, 12, device=device, dtype=torch.float64)
        found, expected = compiled(x), separate(linear(x), weights, call)
        gradients = [
            torch.autograd.grad(sum(r.square().sin().sum() for r in results), leaves) for results in (found, expected)
        ]
        for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
            assert_close(a, b, 1e-11)
    assert graphs.frame_count == 1


def test_weights_follow_the_data_under_autocast() -> None:
    qkv = projection(CALLS["blocks"], "cpu", torch.float32)
    weights = [w.bfloat16() for w in torch.randn(2, DIM)]
    expected = packed(qkv, [w.float() for w in weights], CALLS["blocks"])
    with torch.autocast("cpu", torch.bfloat16):
        found = packed(qkv.requires_grad_(), weights, CALLS["blocks"])
    assert all(map(torch.equal, found, expected))


def test_refusals() -> None:
    qkv = projection(CALLS["blocks"], "cpu")
    weights = torch.ones(2, DIM, dtype=torch.float64)
    heads = {"heads": 4, "key_heads": 2}

    def call(x: Any = qkv, **change: Any) -> Any:
        given = {**heads, "spec": SPEC, "query_weight": weights[0], **change}
        return lambda: pe.functional.norm_rotary_packed(x, **given)

    leaf = qkv.clone().requires_grad_()
    in_place = pe.functional.norm_rotary_packed_
    learned = weights[0].clone().requires_grad_()
    grouped = {"spec": SPEC, "order": "groups"}
    backward = torch.ops.posembed.norm_rotary_packed_backward.default
    query, key, value = (x.contiguous() for x in parts_of(qkv, heads))
    rstd = torch.ones(2, 5, 4, dtype=torch.float64), torch.ones(2, 5, 2, dtype=torch.float64)

    def back(*given: Tensor) -> Any:
        return lambda: backward(*given, qkv, 4, 2, "blocks", None, None, SPEC.to_json())

    refused(
        (call(qkv[0]), ValueError, "qkv: expected [batch, seq, width], got [5, 64]"),
        (call(qkv[..., 1:]), ValueError, "qkv: expected (heads + 2 * key_heads) * head_dim 64, got 63"),
        (call(key_heads=3), ValueError, "key_heads: expected a divisor of heads 4, got 3"),
        (call(order="pairs"), ValueError, "order: expected 'blocks' or 'groups', got 'pairs'"),
        (call(query_weight=weights[0, 1:]), ValueError, "query_weight: expected head_dim 8, got 7"),
        (call(positions=torch.full((5,), -2)), IndexError, "positions: got -2"),
        (call(epsilon=1e-3), TypeError, "epsilon"),
        (lambda: in_place(leaf, 4, 2, spec=SPEC), ValueError, "requires grad"),
        (lambda: in_place(qkv, 4, 2, learned, **grouped), ValueError, "query_weight: requires grad"),
        (lambda: in_place(leaf[..., ::1], 4, 2, over="all_heads", **grouped), ValueError, "requires grad"),
        (lambda: in_place(qkv.mT.contiguous().mT, 4, 2, spec=SPEC), ValueError, "qkv: expected a contiguous last dimension"),
        (back(query, key, key[..., 1:], *rstd), ValueError, "value_gradient: expected the shape of key_gradient"),
        (back(key, key, value, *rstd), ValueError, "query_gradient: expected the shape of query"),
        (back(query, key, value, *rstd[::-1]), ValueError, "query_rstd: expected [batch, seq, heads]"),
    )  # fmt: skip
