"""Packed projections, rotated alone and after a norm, beside the same for separate tensors."""

from typing import Any

import posembed as pe
import pytest
import torch
import torch._dynamo.testing
from support.case import FLOATING, assert_close
from support.refusals import refused
from torch import Tensor

DIM = 8
SPEC = pe.RotarySpec(DIM, rotary_dim=4)
GIVEN = torch.tensor([[3, 5, -1, 0, 9], [1, 2, 40, 41, 7]])  # positions
SIZES = {"heads": 4, "key_heads": 2}
BOTH = (True, True)  # weights of query and key, which a call with a norm has
CALLS: dict[str, dict[str, Any]] = {
    "blocks": {**SIZES, "order": "blocks"},
    "blocks-bhsd": {"heads": 4, "key_heads": 1, "layout": "bhsd", "positions": GIVEN},
    "groups": {"heads": 6, "key_heads": 2, "order": "groups", "positions": GIVEN},
    "groups-bhsd": {**SIZES, "order": "groups", "layout": "bhsd", "offset": 3},
    "groups-sbhd": {**SIZES, "order": "groups", "layout": "sbhd", "inverse": True},
    "gpt-neox": {"heads": 3, "order": "groups"},
    "offsets": {**SIZES, "order": "groups", "offset": torch.tensor([4, 9])},
    "norm-blocks": {**SIZES, "weights": BOTH, "eps": 1e-3, "weight_offset": 1.0},
    "norm-blocks-bhsd": {"heads": 4, "key_heads": 1, "weights": BOTH, "layout": "bhsd", "positions": GIVEN},
    "norm-groups": {"heads": 6, "key_heads": 2, "weights": BOTH, "order": "groups", "positions": GIVEN},
    "norm-groups-bhsd": {**SIZES, "weights": BOTH, "order": "groups", "layout": "bhsd", "offset": 3},
    "norm-groups-sbhd": {**SIZES, "weights": BOTH, "order": "groups", "layout": "sbhd", "positions": GIVEN},
    "norm-groups-shared": {**SIZES, "weights": BOTH, "order": "groups", "layout": "sbhd", "positions": GIVEN[0]},
    "norm-gpt-neox": {"heads": 3, "weights": BOTH, "order": "groups"},
    "norm-unweighted": {**SIZES, "weights": (False, True), "order": "groups"},
    "norm-offsets": {**SIZES, "weights": BOTH, "order": "groups", "offset": torch.tensor([4, 9])},
    "norm-layer": {**SIZES, "weights": BOTH, "order": "groups", "norm": "layer"},
    "norm-all-heads": {**SIZES, "weights": (False, False), "order": "groups", "over": "all_heads"},
}
every = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
with_and_without_norm = pytest.mark.parametrize("norm", ["", "norm-"], ids=["rotary", "norm"])


def parts_of(qkv: Tensor, call: dict[str, Any]) -> list[Tensor]:
    """Query, key and value as programs take them apart, with copies of each head.

    Phi-3: transformers, ``Phi3Attention.forward``. Groups: Megatron-LM,
    ``SelfAttention.get_query_key_value_tensors``; with one query head each, transformers'
    ``GPTNeoXAttention``.
    """
    heads, key_heads = call["heads"], call.get("key_heads", call["heads"])
    columns = [qkv[..., i : i + DIM] for i in range(0, qkv.shape[-1], DIM)]
    if call.get("order", "blocks") == "blocks":
        ends = [heads, heads + key_heads]
        parts = [columns[: ends[0]], columns[ends[0] : ends[1]], columns[ends[1] :]]
    else:
        each = heads // key_heads + 2
        groups = [columns[i : i + each] for i in range(0, len(columns), each)]
        parts = [[h for g in groups for h in g[:-2]], [g[-2] for g in groups], [g[-1] for g in groups]]
    tensors = [torch.stack(part, -2) for part in parts]
    return [x.transpose(1, 2) for x in tensors] if call.get("layout") == "bhsd" else tensors


def projection(call: dict[str, Any], device: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    width = (call["heads"] + 2 * call.get("key_heads", call["heads"])) * DIM
    batch_and_seq = (5, 2) if call.get("layout") == "sbhd" else (2, 5)
    return torch.randn(*batch_and_seq, width, device=device, dtype=dtype)


def weights_of(call: dict[str, Any], like: Tensor) -> list[Tensor | None]:
    """None, or one for query and one for key, of which each may be None."""
    torch.manual_seed(1)
    weights = torch.randn(2, DIM, device=like.device, dtype=like.dtype)
    return [w if given else None for w, given in zip(weights, call.get("weights", ()), strict=False)]


def on(device: Any, call: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}


def separate(qkv: Tensor, call: dict[str, Any], *weights: Tensor | None) -> list[Tensor]:
    """The same of separate tensors."""
    options = {k: v for k, v in call.items() if k not in ("heads", "key_heads", "order", "weights")}
    query, key, value = parts_of(qkv, call)
    rotate: Any = pe.functional.norm_rotary if "weights" in call else pe.functional.rotary
    return [*rotate(query, key, *weights, spec=SPEC, **options), value]


def packed(qkv: Tensor, call: dict[str, Any], *weights: Tensor | None, in_place: bool = False) -> Any:
    options = {k: v for k, v in call.items() if k not in ("heads", "key_heads", "weights")}
    name = f"{'norm_' if 'weights' in call else ''}rotary_packed{'_' if in_place else ''}"
    return getattr(pe.functional, name)(qkv, call["heads"], call.get("key_heads"), *weights, spec=SPEC, **options)


def is_one_node(call: dict[str, Any]) -> bool:
    """Whether autograd has one node for the call: LayerNorm and norms over all heads are composed."""
    return not {"norm", "over"} & set(call)


@every
def test_bits_are_those_of_separate_tensors(call: dict[str, Any], device: torch.device) -> None:
    call = on(device, call)
    for dtype in FLOATING:
        qkv = projection(call, device, dtype)
        weights = weights_of(call, qkv)
        results, expected = packed(qkv, call, *weights), separate(qkv, call, *weights)
        assert all(map(torch.equal, results, expected))
        assert results[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
        wide = torch.nn.functional.pad(qkv, (0, DIM))  # tokens apart from one another
        for written in (qkv.clone(), wide[..., :-DIM]):
            assert packed(written, call, *weights, in_place=True) is written
            assert all(map(torch.equal, parts_of(written, call), expected))
        assert not wide[..., -DIM:].any()


@every
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_gradients_arrive_in_one_tensor(call: dict[str, Any], used: tuple[int, ...], device: torch.device) -> None:
    call = on(device, call)
    qkv = projection(call, device).requires_grad_()
    weights = [w if w is None else w.requires_grad_() for w in weights_of(call, qkv)]
    inputs = [qkv, *(w for w in weights if w is not None)]
    results, expected = packed(qkv, call, *weights), separate(qkv, call, *weights)
    if is_one_node(call):
        assert len({result.grad_fn for result in results}) == 1
        nodes = [edge[0].name() for edge in results[0].grad_fn.next_functions if edge[0] is not None]
        assert nodes == ["torch::autograd::AccumulateGrad"] * len(inputs)
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
            assert_close(a, torch.zeros_like(a) if b is None else b, 1e-12 if weights else 0.0)
    assert found[0].is_contiguous() or not is_one_node(call)


@every
def test_derivatives_of_every_order(call: dict[str, Any], device: torch.device) -> None:
    call = on(device, call)
    qkv = projection(call, device).requires_grad_()
    weights = weights_of(call, qkv)
    learned = [] if None in weights else [w.requires_grad_() for w in weights]

    def function(x: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        return packed(x, call, *(w or weights))

    assert torch.autograd.gradcheck(function, (qkv, *learned), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (qkv, *learned), fast_mode=True)

    def second(rotate: Any) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return sum((y.sin() * y).sum() for y in rotate(x, call, *weights))

        inner = torch.func.grad(total)
        return torch.func.grad(lambda x: inner(x).cos().sum())(qkv.detach())

    assert_close(second(packed), second(separate), 1e-11)


@with_and_without_norm
@pytest.mark.parametrize("name", ["blocks", "groups", "gpt-neox"])
def test_compiled_with_the_projection_and_attention(name: str, norm: str, device: torch.device) -> None:
    call = {k: v for k, v in CALLS[norm + name].items() if k in ("heads", "key_heads", "order", "weights")}
    key_heads = call.get("key_heads", call["heads"])
    linear = torch.nn.Linear(12, (call["heads"] + 2 * key_heads) * DIM, device=device).double()
    weights = [w.requires_grad_() for w in weights_of(call, linear.weight)]
    leaves = [*linear.parameters(), *weights]
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attention(rotate: Any, x: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in rotate(linear(x), call, *weights))
        scores = torch.nn.functional.scaled_dot_product_attention
        return scores(query, key, value, is_causal=True, enable_gqa=True)

    compiled = torch.compile(lambda x: attention(packed, x), backend=graphs, fullgraph=True, dynamic=True)
    for batch, seq in ((11, 13), (17, 19), (23, 7)):
        x = torch.randn(batch, seq, 12, device=device, dtype=torch.float64)
        found, expected = compiled(x), attention(separate, x)
        assert_close(found, expected, 1e-12)
        gradients = [torch.autograd.grad(r.square().sum(), leaves) for r in (found, expected)]
        for a, b in zip(*gradients, strict=True):
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


def test_weights_follow_the_data_under_autocast() -> None:
    call = CALLS["norm-blocks"]
    qkv = projection(call, "cpu", torch.float32)
    weights = [w.bfloat16() for w in torch.randn(2, DIM)]
    expected = packed(qkv, call, *(w.float() for w in weights))
    with torch.autocast("cpu", torch.bfloat16):
        found = packed(qkv.requires_grad_(), call, *weights)
    assert all(map(torch.equal, found, expected))


def test_modules(device: torch.device) -> None:
    qkv = projection(SIZES, device)
    rope = pe.RotaryEmbedding(SPEC, heads=4, key_heads=2)
    expected = packed(qkv, SIZES)
    assert all(map(torch.equal, rope.rotate_packed(qkv), expected))
    anyone = pe.RotaryEmbedding(SPEC)
    assert all(map(torch.equal, anyone.rotate_packed(qkv, **SIZES), expected))
    written = qkv.clone()
    assert rope.rotate_packed_(written) is written
    assert torch.equal(written[..., : 4 * DIM].unflatten(-1, (4, DIM)), expected[0])
    dynamic = pe.RotaryEmbedding(SPEC.head_dim, scaling=pe.DynamicNtkScaling(2.0, 4), layout="bhsd")
    found = dynamic.rotate_packed(qkv, **SIZES, seq_len=9)
    query, key, _ = parts_of(qkv, {**SIZES, "layout": "bhsd"})
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


@with_and_without_norm
def test_refusals_of_both(norm: str) -> None:
    qkv = projection(SIZES, "cpu")
    function = getattr(pe.functional, f"{norm.replace('-', '_')}rotary_packed")

    def call(x: Any = qkv, **change: Any) -> Any:
        return lambda: function(x, **{**SIZES, "spec": SPEC, **change})

    in_place = getattr(pe.functional, f"{function.__name__}_")
    refused(
        (call(qkv[0]), ValueError, "qkv: expected [batch, seq, width], got [5, 64]"),
        (call(qkv[0], layout="bhsd"), ValueError, "qkv: expected [batch, seq, width], got [5, 64]"),
        (call(qkv[..., 1:]), ValueError, "qkv: expected (heads + 2 * key_heads) * head_dim 64, got 63"),
        (call(key_heads=3), ValueError, "key_heads: expected a divisor of heads 4, got 3"),
        (call(order="pairs"), ValueError, "order: expected 'blocks' or 'groups', got 'pairs'"),
        (call(positions=torch.full((5,), -2)), IndexError, "positions: got -2"),
        (lambda: in_place(qkv.clone().requires_grad_(), 4, 2, spec=SPEC), ValueError, "requires grad"),
        (lambda: in_place(qkv.mT.contiguous().mT, 4, 2, spec=SPEC), ValueError, "qkv: expected a contiguous last dimension"),
        (call(layout="thd"), ValueError, "qkv: expected [tokens, width], got [2, 5, 64]"),
        (call(qkv.long()), TypeError, "qkv: expected float32, float64, bfloat16 or float16, got int64"),
        (call(heads=0), ValueError, "heads: expected a positive number, got 0"),
        (call(heads=4.0), TypeError, "heads: expected an int, got a float"),
        (call(None), TypeError, "qkv: expected a Tensor, got"),
        (call(positions=torch.arange(4)), ValueError, "positions: expected seq 5, got 4"),
        (call(offset=torch.tensor([1])), ValueError, "offset: expected a number or [batch] with batch 2, got [1]"),
    )  # fmt: skip


def test_refusals_of_backward_passes() -> None:
    backward = torch.ops.posembed.rotary_packed_backward.default
    qkv = projection(SIZES, "cpu")
    query, key, value = (x.contiguous() for x in parts_of(qkv, SIZES))

    def back(*given: Tensor) -> Any:
        return lambda: backward(*given, 4, 2, "blocks", SPEC.to_json())

    refused(
        (back(key, key, value), ValueError, "query: expected heads 4, got 2"),
        (back(query, query, value), ValueError, "key: expected heads 2, got 4"),
        (back(query, key, query), ValueError, "value: expected the shape of key"),
        (back(query, key, value.float()), TypeError, "value: expected the dtype of key, float64, got float32"),
        (back(*(x[..., :4] for x in (query, key, value))), ValueError, "qkv: got 32"),
    )
    of_norm = torch.ops.posembed.norm_rotary_packed_backward.default
    rstd = torch.ones(2, 5, 4, dtype=torch.float64), torch.ones(2, 5, 2, dtype=torch.float64)

    def back_of_norm(*given: Tensor) -> Any:
        return lambda: of_norm(*given, qkv, 4, 2, "blocks", None, None, SPEC.to_json())

    refused(
        (back_of_norm(query, key, key[..., 1:], *rstd), ValueError, "value_gradient: expected the shape of key_gradient"),
        (back_of_norm(key, key, value, *rstd), ValueError, "query_gradient: expected the shape of query"),
        (back_of_norm(query, key, value, *rstd[::-1]), ValueError, "query_rstd: expected [batch, seq, heads]"),
    )  # fmt: skip


def test_refusals_of_norms() -> None:
    qkv, weight = projection(SIZES, "cpu"), torch.ones(DIM, dtype=torch.float64)
    of, in_place = pe.functional.norm_rotary_packed, pe.functional.norm_rotary_packed_
    grouped = {"spec": SPEC, "order": "groups"}
    leaf, learned = qkv.clone().requires_grad_(), weight.clone().requires_grad_()
    refused(
        (lambda: of(qkv, 4, 2, weight[1:], spec=SPEC), ValueError, "query_weight: expected head_dim 8, got 7"),
        (lambda: of(qkv, 4, 2, weight, spec=SPEC, epsilon=1e-3), TypeError, "epsilon"),
        (lambda: in_place(qkv, 4, 2, learned, **grouped), ValueError, "query_weight: requires grad"),
        (lambda: in_place(leaf[..., ::1], 4, 2, over="all_heads", **grouped), ValueError, "requires grad"),
    )  # fmt: skip
