"""Tests of packed projections: orders of heads, views, one gradient, modules."""

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
    "blocks": {"heads": 4, "key_heads": 2, "order": "blocks"},
    "blocks-bhsd": {"heads": 4, "key_heads": 1, "layout": "bhsd", "positions": GIVEN},
    "groups": {"heads": 6, "key_heads": 2, "order": "groups", "positions": GIVEN},
    "groups-bhsd": {"heads": 4, "key_heads": 2, "order": "groups", "layout": "bhsd", "offset": 3},
    "groups-sbhd": {"heads": 4, "key_heads": 2, "order": "groups", "layout": "sbhd", "inverse": True},
    "gpt-neox": {"heads": 3, "order": "groups"},
    "offsets": {"heads": 4, "key_heads": 2, "order": "groups", "offset": torch.tensor([4, 9])},
}  # fmt: skip
every = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def separate(qkv: Tensor, call: dict[str, Any]) -> list[Tensor]:
    """The same with a rotation of separate tensors."""
    options = {k: v for k, v in call.items() if k not in ("heads", "key_heads", "order")}
    query, key, value = parts_of(qkv, call)
    return [*pe.functional.rotary(query, key, spec=SPEC, **options), value]


def packed(qkv: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return pe.functional.rotary_packed(qkv, spec=SPEC, **call)


@every
def test_bits_are_those_of_separate_tensors(call: dict[str, Any], device: torch.device) -> None:
    call = on(device, call)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        qkv = projection(call, device, dtype)
        results, expected = packed(qkv, call), separate(qkv, call)
        assert all(map(torch.equal, results, expected))
        assert results[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
        written = qkv.clone()
        assert pe.functional.rotary_packed_(written, spec=SPEC, **call) is written
        assert all(map(torch.equal, parts_of(written, call), expected))


@every
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_gradients_arrive_in_one_tensor(call: dict[str, Any], used: tuple[int, ...], device: torch.device) -> None:
    call = on(device, call)
    qkv = projection(call, device).requires_grad_()
    results, expected = packed(qkv, call), separate(qkv, call)
    assert len({result.grad_fn for result in results}) == 1
    assert [edge[0].name() for edge in results[0].grad_fn.next_functions] == ["torch::autograd::AccumulateGrad"]
    weights = [torch.randn(*x.shape[::-1], device=device).to(x).permute(3, 2, 1, 0) for x in expected]
    weights[2] = weights[2][..., :1].expand(weights[2].shape)  # without strides
    gradients = [
        torch.autograd.grad([parts[i] for i in used], qkv, [weights[i] for i in used])[0]
        for parts in (results, expected)
    ]
    assert torch.equal(*gradients)
    assert gradients[0].is_contiguous()


@every
def test_derivatives_of_every_order(call: dict[str, Any], device: torch.device) -> None:
    call = on(device, call)
    qkv = projection(call, device).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return packed(x, call)

    assert torch.autograd.gradcheck(function, qkv, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, qkv, fast_mode=True)
    point = qkv.detach()[:1, :2] if "positions" not in call and "offset" not in call else qkv.detach()

    def total(results: Any) -> Tensor:
        return sum((x.sin() * x).sum() for x in results)

    found = torch.func.grad(lambda x: torch.func.grad(lambda y: total(packed(y, call)))(x).cos().sum())
    wanted = torch.func.grad(lambda x: torch.func.grad(lambda y: total(separate(y, call)))(x).cos().sum())
    assert_close(found(point), wanted(point), 1e-12)


def test_opcheck(device: torch.device) -> None:
    call = {"heads": 4, "key_heads": 2, "order": "groups", "spec": SPEC.to_json()}
    qkv = projection(CALLS["blocks"], device).requires_grad_()
    torch.library.opcheck(torch.ops.posembed.rotary_packed.default, (qkv,), call)


@pytest.mark.parametrize("name", ["blocks", "groups", "gpt-neox"])
def test_compiled_with_the_projection_and_attention(name: str, device: torch.device) -> None:
    call = CALLS[name] | {"positions": None}
    key_heads = call.get("key_heads", call["heads"])
    linear = torch.nn.Linear(12, (call["heads"] + 2 * key_heads) * DIM, device=device).double()
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attention(rotate: Any, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in rotate(linear(x), call))
        scores = torch.nn.functional.scaled_dot_product_attention
        return scores(query, key, value, is_causal=True, enable_gqa=True)

    compiled = torch.compile(lambda x: attention(packed, x), backend=graphs, fullgraph=True, dynamic=True)
    for batch, seq in ((11, 13), (17, 19), (23, 7)):
        x = torch.randn(batch, seq, 12, device=device, dtype=torch.float64)
        found, expected = compiled(x), attention(separate, x)
        assert_close(found, expected, 1e-12)
        for a, b in zip(
            *(torch.autograd.grad(r.square().sum(), linear.parameters()) for r in (found, expected)), strict=True
        ):
            assert_close(a, b, 1e-11)
    assert graphs.frame_count == 1


def test_value_is_a_view_as_torch_makes_it(device: torch.device) -> None:
    call = CALLS["groups"] | {"positions": None}
    leaf = projection(call, device).requires_grad_()
    gradients = []
    for rotate in (packed, separate):
        qkv = leaf * 1
        query, key, value = rotate(qkv, call)
        if rotate is packed:
            value.mul_(3)  # changes the projection after query and key were read
            assert torch.equal(parts_of(qkv, call)[2], value)
        else:
            value = value * 3
        total = query.square().sum() + key.square().sum() + value.square().sum()
        gradients.append(torch.autograd.grad(total, leaf)[0])
    assert torch.equal(*gradients)
    with torch.inference_mode():
        qkv = projection(call, device)
        assert all(map(torch.equal, packed(qkv, call), separate(qkv, call)))
    with torch.no_grad():
        assert not any(part.requires_grad for part in packed(leaf, call)[:2])


def test_learned_frequencies(device: torch.device) -> None:
    call = on(device, CALLS["groups"])
    frequencies = SPEC.frequencies().to(device).requires_grad_()
    qkv = projection(call, device).requires_grad_()
    totals = [
        sum(x.square().sin().sum() for x in rotate(qkv, call | {"frequencies": frequencies}))
        for rotate in (packed, separate)
    ]
    found, expected = (torch.autograd.grad(total, (qkv, frequencies)) for total in totals)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, 1e-12)


def test_modules(device: torch.device) -> None:
    qkv = projection(CALLS["blocks"], device)
    rope = pe.RotaryEmbedding(SPEC, heads=4, key_heads=2)
    expected = packed(qkv, CALLS["blocks"])
    assert all(map(torch.equal, rope.rotate_packed(qkv), expected))
    anyone = pe.RotaryEmbedding(SPEC)
    assert all(map(torch.equal, anyone.rotate_packed(qkv, heads=4, key_heads=2), expected))
    written = qkv.clone()
    assert rope.rotate_packed_(written) is written
    assert torch.equal(written[..., : 4 * DIM].unflatten(-1, (4, DIM)), expected[0])
    dynamic = pe.RotaryEmbedding(SPEC.head_dim, scaling=pe.DynamicNtkScaling(2.0, 4), layout="bhsd")
    found = dynamic.rotate_packed(qkv, heads=4, key_heads=2, seq_len=9)
    query, key, _ = parts_of(qkv, CALLS["blocks"] | {"layout": "bhsd"})
    assert all(map(torch.equal, found[:2], dynamic(query, key, seq_len=9)))
    learned = pe.RotaryEmbedding(SPEC, heads=4, key_heads=2, learned_frequencies=True)
    sum(x.sum() for x in learned.rotate_packed(qkv)).backward()
    assert learned.frequencies.grad.abs().sum() > 0
    refused(
        (lambda: anyone.rotate_packed(qkv), ValueError, "heads: expected a number"),
        (lambda: rope.rotate_packed(qkv, heads=2, key_heads=3), ValueError, "key_heads: got 3"),
        (lambda: rope.rotate_packed(qkv, heads=6, key_heads=1), ValueError, "qkv: expected 4 heads.*got 6"),
        (lambda: dynamic.rotate_packed(qkv, heads=4, key_heads=2, seq_len=3), ValueError, "seq_len: expected at least 5, got 3"),
    )  # fmt: skip


def test_refusals() -> None:
    qkv = projection(CALLS["blocks"], "cpu")
    heads = {"heads": 4, "key_heads": 2}

    def call(x: Any = qkv, **change: Any) -> Any:
        return lambda: pe.functional.rotary_packed(x, **{**heads, "spec": SPEC, **change})

    backward = torch.ops.posembed.rotary_packed_backward.default
    gradients = [x.contiguous() for x in parts_of(qkv, heads)]

    def back(*given: Tensor) -> Any:
        return lambda: backward(*given, 4, 2, "blocks", SPEC.to_json())

    leaf = qkv.clone().requires_grad_()
    refused(
        (call(qkv[0]), ValueError, "qkv: expected [batch, seq, width], got [5, 64]"),
        (call(qkv[0], layout="bhsd"), ValueError, "qkv: expected [batch, seq, width], got [5, 64]"),
        (call(layout="thd"), ValueError, "qkv: expected [tokens, width], got [2, 5, 64]"),
        (call(qkv[..., 1:]), ValueError, "qkv: expected (heads + 2 * key_heads) * head_dim 64, got 63"),
        (call(qkv.long()), TypeError, "qkv: expected float32, float64, bfloat16 or float16, got int64"),
        (call(heads=0), ValueError, "heads: expected a positive number, got 0"),
        (call(key_heads=3), ValueError, "key_heads: expected a divisor of heads 4, got 3"),
        (call(order="pairs"), ValueError, "order: expected 'blocks' or 'groups', got 'pairs'"),
        (call(heads=4.0), TypeError, "heads: expected an int, got a float"),
        (call(None), TypeError, "qkv: expected a Tensor, got none"),
        (call(positions=torch.arange(4)), ValueError, "positions: expected seq 5, got 4"),
        (call(positions=torch.full((5,), -2)), IndexError, "positions: got -2"),
        (call(offset=torch.tensor([1])), ValueError, "offset: expected a number or [batch] with batch 2, got [1]"),
        (lambda: pe.functional.rotary_packed_(leaf, 4, 2, spec=SPEC), ValueError, "qkv: requires grad"),
        (lambda: pe.functional.rotary_packed_(qkv.mT.contiguous().mT, 4, 2, spec=SPEC), ValueError, "qkv: expected a contiguous last dimension"),
        (back(gradients[1], *gradients[1:]), ValueError, "query: expected heads 4, got 2"),
        (back(gradients[0], gradients[0], gradients[2]), ValueError, "key: expected heads 2, got 4"),
        (back(*gradients[:2], gradients[0]), ValueError, "value: expected the shape of key"),
        (back(*gradients[:2], gradients[2].float()), TypeError, "value: expected the dtype of key, float64, got float32"),
        (back(*(x[..., :4] for x in gradients)), ValueError, "qkv: got 32"),
    )  # fmt: skip
