"""Tests rotary(out=...): existing memory, and tensors that may share it."""

import posembed as pe
import pytest
import torch
from support.case import FLOATING
from support.refusals import refused
from torch import Tensor

SPEC = pe.RotarySpec(16, rotary_dim=8, interleaved=True)


def make(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    query = torch.randn(2, 6, 4, 16, dtype=dtype, device=device)
    key = torch.randn(2, 6, 2, 16, dtype=dtype, device=device)
    return query, key


@pytest.mark.parametrize("dtype", FLOATING)
def test_out_equals_fresh_memory(dtype: torch.dtype, device: torch.device) -> None:
    query, key = make(device, dtype)
    expected = pe.functional.rotary(query, key, spec=SPEC, offset=3)
    packed = torch.full((2, 6, 9, 20), 7.0, dtype=dtype, device=device)
    out = (packed[:, :, :4, 2:18], packed[:, :, 5:7, 2:18])
    returned = pe.functional.rotary(query, key, spec=SPEC, offset=3, out=out)
    assert returned[0] is out[0]
    assert returned[1] is out[1]
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    assert (packed[..., :2] == 7).all()
    assert (packed[..., 18:] == 7).all()
    assert (packed[:, :, [4, 7, 8]] == 7).all()


def test_out_may_be_the_input(device: torch.device) -> None:
    query, key = make(device)
    expected = pe.functional.rotary(query, key, spec=SPEC)
    pe.functional.rotary(query, key, spec=SPEC, out=(query, key))
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


def test_strides_of_size_one_do_not_count(device: torch.device) -> None:
    """With another stride of such a dimension, the same memory still is the input."""
    query = make(device)[0][:1, :1]
    same = query.as_strided(query.shape, (7, 5, 16, 1))
    expected = pe.functional.rotary(query, spec=SPEC, offset=3)
    pe.functional.rotary(query, spec=SPEC, offset=3, out=same)
    assert torch.equal(query, expected)


def test_an_expanded_query_is_read_where_it_is(device: torch.device) -> None:
    query = make(device)[0][:, :, :1].expand(-1, -1, 4, -1)
    out = torch.empty(2, 6, 4, 16, device=device)
    pe.functional.rotary(query, spec=SPEC, out=out)
    assert torch.equal(out, pe.functional.rotary(query.contiguous(), spec=SPEC))


def rotate(out: Tensor, query: Tensor) -> None:
    pe.functional.rotary(query, spec=SPEC, out=out)


def rotate_pair(query_out: Tensor, key_out: Tensor, query: Tensor, key: Tensor) -> None:
    pe.functional.rotary(query, key, spec=SPEC, out=(query_out, key_out))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda q, k, m: rotate(torch.empty(2, 5, 4, 16), q), ValueError, "out: expected the shape of query"),
        (lambda q, k, m: rotate(q.double(), q), TypeError, "out: expected the dtype of query, float32, got float64"),
        (lambda q, k, m: rotate(q.to("meta"), q), ValueError, "query: expected the device of out"),
        (lambda q, k, m: rotate(torch.empty(2, 6, 16, 4).transpose(2, 3), q), ValueError, "out: expected a contiguous last dimension"),
        (lambda q, k, m: rotate(torch.empty(1, 6, 4, 16).expand(2, -1, -1, -1), q), ValueError, "out: expected elements that do not share memory"),
        (lambda q, k, m: rotate(m[1:13].view(2, 6, 4, 16), m[:12].view(2, 6, 4, 16)), ValueError, "out: expected query itself or memory apart"),
        (lambda q, k, m: rotate(m.view(2, 12, 4, 16)[:, :6], m[:12].view(2, 6, 4, 16)), ValueError, "out: expected query itself or memory apart"),
        (lambda q, k, m: rotate_pair(q, q[:, :, 2:], q.clone(), k), ValueError, "key_out: expected memory apart from query_out's"),
        (lambda q, k, m: rotate_pair(torch.empty_like(q), q[:, :, 2:], q, k), ValueError, "key_out: expected memory apart from query's"),
        (lambda q, k, m: rotate_pair(q, k, q.clone(), q[:, :, :2]), ValueError, "query_out: expected memory apart from key's"),
        (lambda q, k, m: pe.functional.rotary(q, k, spec=SPEC, out=q), ValueError, r"out: expected two tensors, \(query_out, key_out\), got Tensor"),
        (lambda q, k, m: pe.functional.rotary(q, k, spec=SPEC, out=(torch.empty_like(q), None)), ValueError, "out: expected two tensors, .*, got Tensor, NoneType"),
        (lambda q, k, m: pe.functional.rotary(q, k, spec=SPEC, out=(m, m, m)), ValueError, "out: expected two tensors, .*, got Tensor, Tensor, Tensor"),
        (lambda q, k, m: pe.functional.rotary(q, k, spec=SPEC, out=(m,)), ValueError, "out: expected two tensors, .*, got Tensor"),
        (lambda q, k, m: pe.functional.rotary(q, spec=SPEC, out=(q, k)), ValueError, "out: expected a tensor, got Tensor, Tensor"),
    ],
)  # fmt: skip
def test_errors(call, error, text) -> None:
    query, key = make()
    memory = torch.randn(24, 4 * 16)
    before = [query.clone(), key.clone(), memory.clone()]
    refused((call, error, text), given=(query, key, memory))
    assert all(torch.equal(a, b) for a, b in zip((query, key, memory), before, strict=True))


def test_gradients_are_refused() -> None:
    query, key = make()
    out = torch.empty_like(query)
    refused((lambda: pe.functional.rotary(query.requires_grad_(), spec=SPEC, out=out), ValueError, "query: requires grad"))  # fmt: skip
    with torch.no_grad():
        pe.functional.rotary(query, spec=SPEC, out=out)
    refused((lambda: pe.functional.rotary(query.detach(), key.requires_grad_(), spec=SPEC, out=(out, torch.empty_like(key))), ValueError, "key: requires grad"))  # fmt: skip


def test_views_that_interleave_are_apart(device: torch.device) -> None:
    """Query and key of one packed tensor: their addresses alternate, but they share no element."""
    packed = torch.randn(3, 5, 8, 16, device=device)
    query, key = packed[:, :, 0::2], packed[:, :, 1::2]
    expected = pe.functional.rotary(query.contiguous(), key.contiguous(), spec=SPEC)
    pe.functional.rotary_(query, key, spec=SPEC)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    refused(
        (lambda: pe.functional.rotary_(packed[:, :, 0:4], packed[:, :, 3:5], spec=SPEC), ValueError, "key: expected memory apart from query's"),
        (lambda: pe.functional.rotary_(packed[:, :, 0::2], packed[:, :, 0::4], spec=SPEC), ValueError, "key: expected memory apart from query's"),
    )  # fmt: skip
