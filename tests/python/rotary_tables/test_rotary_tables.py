"""Tests rotation by given tables beside transformers' functions, whose bits it has."""

from collections.abc import Callable
from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused
from support.rotary_tables import repeated
from torch import Tensor

pytest.importorskip("transformers")
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen2_vl import modeling_qwen2_vl

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
rotary_tables = pe.functional.rotary_tables


def angles(*shape: int) -> Tensor:
    return 30 * torch.randn(shape, generator=torch.Generator().manual_seed(1))


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_same(actual: Any, expected: Any) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tables", FLOATING)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("dim", [2, 24, 64, 128])
def test_bits_of_llama(dtype: torch.dtype, tables: torch.dtype, dim: int) -> None:
    query, key = numbers(2, 4, 7, dim, dtype=dtype), numbers(2, 2, 7, dim, dtype=dtype)
    by = repeated(angles(2, 7, dim // 2), False)
    cos, sin = by.cos().to(tables), by.sin().to(tables)
    expected = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert_same(rotary_tables(query, key, cos, sin), expected)
    swapped = [t.transpose(1, 2) for t in (query, key)]
    by_seq = rotary_tables(*swapped, cos, sin, unsqueeze_dim=2)
    assert_same(by_seq, [t.transpose(1, 2) for t in expected])
    halves = rotary_tables(query, key, *(t[..., : dim // 2] for t in (cos, sin)), half_width=True)
    assert_same(halves, expected)


@pytest.mark.parametrize("dtype", FLOATING)
def test_bits_of_gradients_and_broadcast_tables(dtype: torch.dtype) -> None:
    query = numbers(2, 4, 7, 32, dtype=dtype).requires_grad_()
    key = numbers(2, 2, 7, 32, dtype=dtype).requires_grad_()
    by = repeated(angles(1, 7, 16), False)
    cos, sin = by.cos().to(dtype), by.sin().to(dtype)
    weights = numbers(2, 6, 7, 32, dtype=dtype)

    def gradients(function: Callable[..., Any], *tables: Tensor) -> Any:
        rotated = torch.cat(function(query, key, *tables), 1)
        return torch.autograd.grad((rotated * weights).sum(), (query, key))

    expected = gradients(modeling_llama.apply_rotary_pos_emb, cos, sin)
    assert_same(gradients(rotary_tables, cos, sin), expected)
    assert_same(gradients(rotary_tables, cos[0], sin[0]), expected)


@pytest.mark.parametrize("dtype", FLOATING[::2])
def test_bits_of_cohere(dtype: torch.dtype) -> None:
    query, key = numbers(2, 4, 7, 16, dtype=dtype), numbers(2, 2, 7, 16, dtype=dtype)
    by = repeated(angles(2, 7, 8), True)
    expected = modeling_cohere.apply_rotary_pos_emb(query, key, by.cos(), by.sin())
    actual = rotary_tables(query, key, by.cos(), by.sin(), interleaved=True, numerics="float32_product")
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", FLOATING[::2])
def test_bits_of_vision_towers(dtype: torch.dtype) -> None:
    query, key = numbers(9, 4, 16, dtype=dtype), numbers(9, 4, 16, dtype=dtype)
    by = repeated(angles(9, 8), False)
    expected = modeling_qwen2_vl.apply_rotary_pos_emb_vision(query, key, by.cos(), by.sin())
    actual = rotary_tables(query, key, by.cos(), by.sin(), numerics="float32_product")
    assert_same(actual, expected)
    swapped = [t.transpose(0, 1).contiguous() for t in (query, key)]
    by_heads = rotary_tables(*swapped, by.cos(), by.sin(), unsqueeze_dim=0, numerics="float32_product")
    assert_same(by_heads, [t.transpose(0, 1) for t in expected])


@pytest.mark.parametrize("dtype", FLOATING[::2])
def test_bits_of_complex_products(dtype: torch.dtype) -> None:
    query, key = numbers(2, 7, 4, 16, dtype=dtype), numbers(2, 7, 2, 16, dtype=dtype)
    freqs = torch.polar(torch.ones(1, 7, 8), angles(1, 7, 8))
    expected = modeling_llama4.apply_rotary_emb(query, key, freqs.expand(2, -1, -1))
    assert_same(rotary_tables(query, key, freqs, interleaved=True, unsqueeze_dim=2), expected)
    back = modeling_llama4.apply_rotary_emb(query, key, freqs.conj().expand(2, -1, -1))
    conjugate = rotary_tables(query, key, freqs.conj(), interleaved=True, unsqueeze_dim=2)
    assert_same(conjugate, back)


def test_part_of_a_head_and_one_tensor() -> None:
    query, by = numbers(2, 3, 5, 16), repeated(angles(5, 3), False)
    window = rotary_tables(query[..., 4:10], None, by.cos(), by.sin())
    expected = torch.cat((query[..., :4], window, query[..., 10:]), -1)
    assert torch.equal(rotary_tables(query, None, by.cos(), by.sin(), start=4), expected)


def test_strides_and_empty_sizes() -> None:
    query, by = numbers(3, 5, 2, 32)[..., ::2], angles(6, 2)
    cos, sin = by.cos().T, by.sin().T  # columns apart
    expected = rotary_tables(query.contiguous(), None, cos.contiguous(), sin.contiguous())
    assert torch.equal(rotary_tables(query, None, cos, sin), expected)
    assert torch.equal(rotary_tables(query, None, cos, sin.contiguous()), expected)
    for shape in ((0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8)):
        empty, none = torch.empty(shape), torch.empty(shape[2], 8)
        assert rotary_tables(empty, None, none, none).shape == shape
    assert torch.equal(rotary_tables(query, None, cos[:, :0], sin[:, :0]), query)


def test_out_and_in_place() -> None:
    query, key, by = numbers(1, 3, 5, 8), numbers(1, 2, 5, 8), repeated(angles(5, 4), False)
    cos, sin = by.cos(), by.sin()
    expected = rotary_tables(query, key, cos, sin)
    out = torch.full_like(query, torch.nan), torch.full_like(key, torch.nan)
    assert rotary_tables(query, key, cos, sin, out=out) is out
    assert_same(out, expected)
    given = query.clone(), key.clone()
    assert pe.functional.rotary_tables_(*given, cos, sin)[0] is given[0]
    assert_same(given, expected)
    heads = query[0].clone()  # [heads, tokens, head_dim]
    assert pe.functional.rotary_tables_(heads, None, cos, sin, unsqueeze_dim=0) is heads
    assert torch.equal(heads, expected[0][0])
    into = torch.empty_like(heads)
    assert rotary_tables(query[0], None, cos, sin, unsqueeze_dim=0, out=into) is not None
    assert torch.equal(into, expected[0][0])


def test_learned_tables() -> None:
    """The gradient of every column is that of eager code."""
    query, key = numbers(2, 3, 5, 8).double(), numbers(2, 2, 5, 8).double()
    tables = [angles(5, 8).double().requires_grad_() for _ in range(2)]

    def gradient(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        rotated = function(query, key, *tables)
        return torch.autograd.grad(sum(t.square().mul(t).sum() for t in rotated), tables)

    def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)

    torch.testing.assert_close(gradient(rotary_tables), gradient(eager), rtol=1e-12, atol=1e-12)


QUERY, TABLE = torch.zeros(2, 3, 5, 8), torch.zeros(5, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rotary_tables(QUERY, None, TABLE), ValueError, "sin: expected a tensor beside a real cos"),
        (lambda: rotary_tables(QUERY, None, TABLE + 0j, TABLE), ValueError, "sin: .* none beside a complex one"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE[:4]), ValueError, "sin: expected"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE.double()), TypeError, "sin: expected"),
        (lambda: rotary_tables(QUERY, None, TABLE[:4], TABLE[:4]), ValueError, "cos: expected seq 5, got 4"),
        (lambda: rotary_tables(QUERY, None, *2 * [TABLE.expand(3, 5, 8)]), ValueError, "cos: expected batch 1 or 2, got 3"),
        (lambda: rotary_tables(QUERY, None, *2 * [TABLE[0]]), ValueError, r"cos: expected \[batch or 1, seq, width\] or"),
        (lambda: rotary_tables(QUERY, None, *2 * [TABLE[:, :7]]), ValueError, "cos: expected an even width, got 7"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE, half_width=True), ValueError, r"query: expected head_dim of at least start \+ rotary_dim = 0 \+ 16, got 8"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE, start=1), ValueError, r"query: .* 1 \+ 8, got 8"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE, start=-1), ValueError, "start: expected 0 or more, got -1"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE, numerics="exact"), ValueError, "numerics: expected 'float32' or 'float32_product'"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE, unsqueeze_dim=3), ValueError, "unsqueeze_dim: expected 1 or 2"),
        (lambda: rotary_tables(QUERY, QUERY[..., :6], TABLE[:, :4], TABLE[:, :4]), ValueError, "key: expected head_dim 8, got 6"),
        (lambda: rotary_tables(QUERY, QUERY[:1], TABLE, TABLE), ValueError, "key: expected batch 2, got 1"),
        (lambda: rotary_tables(QUERY.int(), None, TABLE, TABLE), TypeError, "query: expected"),
        (lambda: rotary_tables(QUERY, None, TABLE.int(), TABLE.int()), TypeError, "cos: expected"),
        (lambda: pe.functional.rotary_tables_(QUERY.bfloat16(), None, TABLE, TABLE), TypeError, "query: expected float32, the dtype to which query and the tables promote"),
        (lambda: rotary_tables(QUERY, QUERY, TABLE, TABLE, out=QUERY), ValueError, r"out: expected \(query_out, key_out\), got Tensor"),
        (lambda: rotary_tables(QUERY, None, TABLE, TABLE, out=(QUERY, QUERY)), ValueError, "out: expected a tensor, got tuple"),
        (lambda: pe.functional.rotary_tables_(QUERY.clone().requires_grad_(), None, TABLE, TABLE), ValueError, "query: requires grad"),
        (lambda: pe.functional.rotary_tables_(QUERY.clone(), None, TABLE.clone().requires_grad_(), TABLE), ValueError, "cos: requires grad"),
    ],
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    refused((call, error, message))
