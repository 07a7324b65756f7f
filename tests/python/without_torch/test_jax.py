"""Tests that posembed_kernels.jax has the bits of posembed_kernels.numpy, and gradients."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import posembed as pe
import posembed_kernels.numpy as pn
import pytest
import torch
from support.documentation import DOCS, blocks

jax = pytest.importorskip("jax", reason="needs jax, on the CPU")
jnp = jax.numpy
import posembed_kernels.jax as pj  # noqa: E402

RNG = np.random.default_rng(0)
Q, K = (RNG.standard_normal((2, 5, heads, 64), np.float32) for heads in (4, 2))
X, TABLE = RNG.standard_normal((2, 5, 64), np.float32), RNG.standard_normal((30, 64), np.float32)
POSITIONS = np.array([[3, 1, -1, 1_000_003, 2**31 - 1], [0, 1, 2, 3, 4]], np.int32)
SLOPES = pn.alibi_slopes(6)
WINDOW = {"rotary_dim": 32, "rotary_start": 8, "interleaved": True}
YARN = {"scaling": {"type": "yarn", "factor": 8.0, "original_max_positions": 4096}}
AXES = {"sections": {"axis_of_pair": [0] * 8 + [1] * 24, "within_axes": True}}

# A function of both modules, its arrays, and what is fixed.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("rotary", (Q,), {"offset": 1_000_003}),
    ("rotary", (Q, K), {"spec": WINDOW, "layout": "sbhd"}),
    ("rotary", (Q, K, POSITIONS), {"spec": YARN, "inverse": True}),
    ("rotary", (Q, K, np.stack([POSITIONS, POSITIONS[::-1]])[:, :, [0, 1, 3, 3, 4]]), {"spec": AXES}),
    ("rotary", (Q, None, (POSITIONS[1] / 3).astype(np.float32)), {}),
    ("sinusoidal", (X, POSITIONS), {"spec": {"preset": "marian", "scale": 2.0}}),
    ("sinusoidal", (X[0],), {"offset": 5}),
    ("sinusoidal_encode", (POSITIONS,), {"spec": {"embedding_dim": 12}}),
    ("alibi_bias", (SLOPES,), {"query_length": 3, "key_length": 7}),
    ("alibi_bias", (np.stack([SLOPES, 2 * SLOPES]),), {"query_length": 3, "key_length": 7, "causal": False}),
    ("alibi_bias", (SLOPES,), {"query_length": 3, "key_length": 3, "attention_mask": np.array([[1, 0, 1], [1, 1, 1]])}),
    ("embedding", (POSITIONS % 30, TABLE), {"scale": 0.5}),
]


@pytest.mark.parametrize(("name", "arrays", "options"), CALLS, ids=[str(i) for i in range(len(CALLS))])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bits(name: str, arrays: tuple[Any, ...], options: dict[str, Any], dtype: str) -> None:
    def is_floating(array: Any) -> bool:
        return array is not None and array.dtype == "float32"

    if name == "sinusoidal_encode":
        options = {**options, "dtype": jnp.dtype(dtype)}
    else:  # positions that are not whole come third
        arrays = (*(each.astype(jnp.dtype(dtype)) if is_floating(each) else each for each in arrays[:2]), *arrays[2:])
    expected = getattr(pn, name)(*arrays, **options)
    function = functools.partial(getattr(pj, name), **options)
    for call in (function, jax.jit(function)):
        for got, wanted in zip(jax.tree.leaves(call(*arrays)), jax.tree.leaves(expected), strict=True):
            assert got.dtype == wanted.dtype
            assert np.asarray(got).tobytes() == wanted.tobytes()


def test_large_calls_use_xlas_threads() -> None:
    query = np.tile(Q, (4, 100, 2, 1))
    assert (np.asarray(jax.jit(pj.rotary)(query)) == pn.rotary(query)).all()


def test_gradients_of_rotations_are_the_operators() -> None:
    spec = pe.RotarySpec(64, scaling=pe.XPosScaling())
    weights = [RNG.standard_normal(each.shape, np.float32) for each in (Q, K)]

    def loss(*rotated: Any) -> Any:
        results = pj.rotary(*rotated, POSITIONS, spec=spec.to_json())
        return sum((result**2 * weight).sum() for result, weight in zip(results, weights, strict=True))

    leaves = [torch.tensor(each, requires_grad=True) for each in (Q, K)]
    results = pe.functional.rotary(*leaves, torch.tensor(POSITIONS), spec=spec)
    sum((each**2 * torch.tensor(weight)).sum() for each, weight in zip(results, weights, strict=True)).backward()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(Q, K)
    for got, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(got, leaf.grad, rtol=1e-5, atol=1e-5)
    # A rotation keeps lengths, so the gradient of the squared length of this gradient is linear.
    second = jax.grad(lambda q: (jax.grad(lambda x: (pj.rotary(x) ** 2).sum())(q) ** 2).sum())(Q)
    np.testing.assert_allclose(second, 8 * Q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"query_offset": 2}, {"apply_mask": False}], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 1, 6), (2, 2, 6)])
def test_gradient_of_slopes(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    slopes, options = RNG.random(shape, np.float32), {**options, "causal": shape[-2:] != (2, 6)}
    out = pj.alibi_bias(slopes, 3, 7, **options)
    weight = np.where(np.isfinite(out), RNG.standard_normal(out.shape, np.float32), 0)
    leaf = torch.tensor(slopes, requires_grad=True)
    pe.functional.alibi_bias(leaf, 3, 7, **options).backward(torch.tensor(weight))
    gradient = jax.vjp(lambda s: pj.alibi_bias(s, 3, 7, **options), slopes)[1](jnp.asarray(weight))[0]
    np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-5, atol=1e-5)


def test_gradients_of_tables_and_sums() -> None:
    ids, gradient = np.array([[1, 4], [1, 0]]), RNG.standard_normal((2, 2, 64), np.float32)
    expected = np.zeros_like(TABLE)
    np.add.at(expected, ids, gradient * np.float32(0.5))
    got = jax.vjp(lambda table: pj.embedding(ids, table, scale=0.5), TABLE)[1](gradient)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (jax.grad(lambda x: (pj.sinusoidal(x) * X).sum())(X) == X).all()


def test_vmap() -> None:
    got = jax.vmap(lambda query, rows: pj.rotary(query, None, rows))(Q[:, None], POSITIONS)
    assert (np.asarray(got)[:, 0] == pn.rotary(Q, None, POSITIONS)).all()


REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("positions: expected -1 or more", lambda: jax.jit(pj.rotary)(Q, None, POSITIONS - 9)),
    ("ids: expected 0 to 29", lambda: pj.embedding(jnp.array([30]), TABLE)),
    ("query: expected float32, float64", lambda: pj.rotary(jnp.ones((1, 2, 1, 8), jnp.int32))),
    ("layout: expected one of", lambda: pj.rotary(Q, layout="bhds")),
    ("query_offset: expected the position", lambda: pj.alibi_bias(SLOPES, 4, 3)),
]


@pytest.mark.parametrize(("words", "call"), REFUSALS, ids=[words for words, _ in REFUSALS])
def test_refusals(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match=words):
        jax.block_until_ready(call())


def test_what_compiles_the_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no_such_compiler")
    with pytest.raises(ImportError, match=r"C\+\+ compiler, not no_such_compiler"):
        pj._compiled()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ImportError, match="false could not compile"):
        pj._compiled()


def test_angles_far_out_are_exact() -> None:
    """Where a rotation in JAX's own float32 has lost the angle."""
    position, frequencies = 1_000_003, 10000.0 ** (-np.arange(32) / 32)
    first, second = Q[:1, :1, :1, :32].astype(np.float64), Q[:1, :1, :1, 32:].astype(np.float64)
    cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
    exact = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def plain(x: Any) -> Any:
        angle = jnp.float32(position) * jnp.float32(10000.0) ** (-jnp.arange(32, dtype=jnp.float32) / 32)
        a, b = x[..., :32], x[..., 32:]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)

    one = Q[:1, :1, :1]
    assert abs(np.asarray(pj.rotary(one, offset=position)) - exact).max() < 1e-6
    assert abs(np.asarray(jax.jit(plain)(one)) - exact).max() > 1e-3


def test_the_pages_program_runs() -> None:
    names: dict[str, Any] = {}
    for code in blocks(DOCS / "start/without_torch.md", "py"):
        exec(code, names)
    assert names["gradient"].shape == names["query"].shape
