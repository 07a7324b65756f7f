"""Tests that posembed_kernels.numpy has the bits of posembed's operators, and what it refuses."""

import subprocess
import sys
import threading
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import posembed as pe
import posembed_kernels.numpy as pn
import pytest
import torch
from support.documentation import ROOT

f = pe.functional
Case = tuple[str, Callable[[], Any], Callable[[], Any]]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def arrays(tensor: Any) -> Any:
    """The same memory for NumPy."""
    if isinstance(tensor, tuple):
        return tuple(map(arrays, tensor))
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(pytest.importorskip("ml_dtypes").bfloat16)


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    wanted = arrays(expected.contiguous())
    return got.shape == wanted.shape and got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


SPECIFICATIONS = {
    "plain": pe.RotarySpec(64),
    "base": pe.RotarySpec(64, base=500000.0),
    "window": pe.RotarySpec(64, rotary_dim=32, rotary_start=8),
    "interleaved": pe.RotarySpec(64, interleaved=True, reverse=True),
    "linear": pe.RotarySpec(64, scaling=pe.LinearScaling(4.0)),
    "ntk": pe.RotarySpec(64, scaling=pe.NtkScaling(3.0)),
    "yarn": pe.RotarySpec(64, scaling=pe.YarnScaling(8.0, 4096)),
    "yarn, fractional": pe.RotarySpec(64, scaling=pe.YarnScaling(8.0, 4096, beta_fast=16.0, truncate=False)),
    "yarn, factor": pe.RotarySpec(64, scaling=pe.YarnScaling(8.0, 4096, attention_factor=1.5)),
    "llama3": pe.RotarySpec(64, scaling=pe.Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    "xpos": pe.RotarySpec(64, scaling=pe.XPosScaling(center=3.0)),
    "custom": pe.RotarySpec(8, custom_frequencies=[1.0, 0.5, 0.25, 7.0], custom_attention_factor=1.25),
}
QUERY, KEY = drawn(2, 5, 4, 64), drawn(2, 5, 2, 64, seed=1)
AXES = torch.tensor([[[0, 1, -1, 3, 4]], [[9, 8, -1, 6, 5]], [[2, 2, -1, 2, 2]]])
SECTIONS = pe.Sections([8, 12, 12])
POSITIONS = torch.tensor([[3, 1, -1, 1_000_003, 2**31 - 1], [0, 1, 2, 3, 4]])
CALLS: dict[str, tuple[pe.RotarySpec, dict[str, Any]]] = {
    "offset": (SPECIFICATIONS["plain"], {"offset": 1_000_003}),
    "positions": (SPECIFICATIONS["plain"], {"positions": POSITIONS}),
    "int32, one row": (SPECIFICATIONS["window"], {"positions": POSITIONS[:1].int()}),
    "strided positions": (SPECIFICATIONS["plain"], {"positions": POSITIONS.t().contiguous().t()}),
    "fractions": (SPECIFICATIONS["plain"], {"positions": POSITIONS / 7 - 2.5}),
    "float64 fractions": (SPECIFICATIONS["custom"], {"positions": torch.tensor([0.1, 2.5, -3.0, 1e6, 7.0]).double()}),
    "inverse": (SPECIFICATIONS["yarn"], {"inverse": True, "offset": 7}),
    "inverse xpos": (SPECIFICATIONS["xpos"], {"inverse": True}),
    "sections": (pe.RotarySpec(64, sections=SECTIONS), {"positions": AXES}),
    "sections, one axis": (pe.RotarySpec(64, sections=SECTIONS), {"positions": POSITIONS}),
    "interleaved sections": (
        pe.RotarySpec(64, sections=pe.Sections([8, 12, 12], interleaved=True)),
        {"positions": AXES.expand(3, 2, 5)},
    ),
    "axial": (pe.RotarySpec.axial([pe.RotarySpec(16), pe.RotarySpec(48)], within_axes=True), {"positions": AXES[:2]}),
    "frequencies": (SPECIFICATIONS["plain"], {"frequencies": drawn(32)}),
    "by head": (SPECIFICATIONS["plain"], {"frequencies": drawn(4, 32, dtype=torch.float64)}),
    "mixed axes": (SPECIFICATIONS["plain"], {"frequencies": drawn(3, 4, 32), "positions": AXES}),
}
CALLS |= {f"spec {name}": (spec, {"offset": 11}) for name, spec in SPECIFICATIONS.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_rotations_have_the_operators_bits(name: str, dtype: torch.dtype) -> None:
    spec, call = CALLS[name]
    shared = name in ("by head", "mixed axes")
    query, key = (drawn(2, 5, heads, spec.head_dim, dtype=dtype) for heads in (4, 4 if shared else 2))
    given = {option: arrays(value) for option, value in call.items()}
    for tensors in ((query,), (query, key)):
        got = pn.rotary(*map(arrays, tensors), spec=spec.to_json(), **given)
        assert same(got, f.rotary(*tensors, spec=spec, **call))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_layouts_strides_and_memory(layout: str) -> None:
    spec, shape = pe.RotarySpec(64), (5, 4, 64) if layout == "thd" else (2, 3, 4, 64)
    wide = drawn(*shape[:-1], 80)
    query = wide[..., 8:72]
    expected = f.rotary(query, spec=spec, layout=layout, offset=5)
    assert same(pn.rotary(query.numpy(), layout=layout, offset=5), expected)
    held = wide.numpy().copy()
    assert pn.rotary(held[..., 8:72], layout=layout, offset=5, out=(inside := held[..., 8:72])) is inside
    assert same(np.ascontiguousarray(inside), expected)
    assert (held[..., :8] == wide.numpy()[..., :8]).all()
    assert (held[..., 72:] == wide.numpy()[..., 72:]).all()
    reversed_heads = query.flip(-2).numpy()[..., ::-1, :]  # a negative stride is copied
    assert same(pn.rotary(reversed_heads, layout=layout, offset=5), expected)


def test_the_backward_pass_is_the_gradient() -> None:
    for spec in (SPECIFICATIONS["yarn"], SPECIFICATIONS["xpos"], SPECIFICATIONS["interleaved"]):
        leaf, gradient = QUERY.clone().requires_grad_(), drawn(*QUERY.shape, seed=2)
        f.rotary(leaf, spec=spec, offset=9).backward(gradient)
        assert same(pn.rotary(gradient.numpy(), spec=spec.to_json(), offset=9, transpose=True), leaf.grad)


def test_a_key_that_is_the_window_alone() -> None:
    """DeepSeek's shared key."""
    spec, key = pe.RotarySpec(64, rotary_dim=16, rotary_start=48), drawn(2, 5, 1, 16)
    expected = f.rotary(QUERY, key, spec=spec, offset=3)
    assert same(pn.rotary(QUERY.numpy(), key.numpy(), spec=spec.to_json(), offset=3), expected)


def test_query_and_key_may_be_one_tensor() -> None:
    expected = f.rotary(QUERY, spec=pe.RotarySpec(64))
    assert same(pn.rotary(QUERY.numpy(), QUERY.numpy()), (expected, expected))
    with pytest.raises(ValueError, match="shares memory with key"):
        pn.rotary(BUFFER, BUFFER, out=(BUFFER, np.empty_like(BUFFER)))


def test_documents() -> None:
    query, starts = drawn(9, 4, 64), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    expected = f.rotary(query, spec=pe.RotarySpec(64), layout="thd", cu_seqlens=starts)
    assert same(pn.rotary(query.numpy(), layout="thd", cu_seqlens=starts.numpy()), expected)


@pytest.mark.parametrize("numerics", ["float32", "float32_product"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half_width", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables(dtype: torch.dtype, half_width: bool, interleaved: bool, numerics: str) -> None:
    query, key = drawn(2, 4, 5, 64, dtype=dtype), drawn(2, 2, 5, 64, dtype=dtype)
    cos, sin = (drawn(1, 5, 16 if half_width else 32, dtype=dtype, seed=seed) for seed in (3, 4))
    options: dict[str, Any] = {"interleaved": interleaved, "half_width": half_width, "numerics": numerics, "start": 8}
    expected = f.rotary_tables(query, key, cos, sin, **options)
    assert same(pn.rotary_tables(*map(arrays, (query, key, cos, sin)), **options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "marian"},
        {"preset": "ddpm", "cos_first": True, "shift": 0.0},
        {"preset": "fairseq"},
        {"base": 100.0, "scale": 0.5, "position_scale": 1000},
        {"padding_idx": 4},
    ],
    ids=str,
)
def test_sinusoids(options: dict[str, Any], dtype: torch.dtype) -> None:
    for dim in (16, 17):
        spec, x = pe.SinusoidalSpec(dim, **options), drawn(2, 5, dim, dtype=dtype)
        for positions in (None, POSITIONS, POSITIONS[0], POSITIONS / 7):
            moved = arrays(positions)
            expected = f.sinusoidal(x, positions, spec=spec)
            assert same(pn.sinusoidal(arrays(x), moved, spec=spec.to_json()), expected)
        expected = f.sinusoidal_encode(POSITIONS, spec=spec, dtype=dtype)
        kind = arrays(x).dtype
        assert same(pn.sinusoidal_encode(POSITIONS.numpy(), spec=spec.to_json(), dtype=kind), expected)
        assert same(pn.sinusoidal(arrays(x[0]), spec=spec.to_json(), offset=6), f.sinusoidal(x[0], spec=spec, offset=6))


MASK = torch.tensor([[True, True, False, True, True, True, False]])
BIASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((6,), {}),
    ((6,), {"causal": False, "query_offset": 3}),
    ((2, 6), {"causal": False, "apply_mask": False}),
    ((2, 1, 6), {"query_positions": torch.tensor([[3, 4, 5], [4, 5, 6]])}),
    ((6,), {"key_positions": torch.arange(7) * 2, "query_positions": torch.arange(3, dtype=torch.int32)}),
    ((6,), {"attention_mask": MASK[0]}),
    ((6,), {"attention_mask": MASK}),
]


@pytest.mark.parametrize(("shape", "call"), BIASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi(dtype: torch.dtype, shape: tuple[int, ...], call: dict[str, Any]) -> None:
    slopes = drawn(*shape, dtype=dtype).abs()
    given = {option: arrays(value) for option, value in call.items()}
    assert same(pn.alibi_bias(arrays(slopes), 3, 7, **given), f.alibi_bias(slopes, 3, 7, **call))
    assert same(pn.alibi_slopes(12), f.alibi_slopes(12))
    assert same(pn.alibi_slopes(12, kind="geometric", max_bias=4.0), f.alibi_slopes(12, kind="geometric", max_bias=4.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    weight = drawn(20, 48, dtype=dtype)[:, 8:40]
    for ids in (torch.tensor([[3, 0, 19], [19, 1, 2]]), torch.tensor([5], dtype=torch.int32), torch.tensor(7)):
        assert same(pn.embedding(arrays(ids), arrays(weight), scale=0.3), f.embedding(ids, weight, scale=0.3))


def test_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    query, table = drawn(2, 300, 8, 64).numpy(), drawn(5000, 64).numpy()
    ids = np.arange(100_000) % 5000
    calls: list[Callable[[], Any]] = [
        lambda: pn.rotary(query),
        lambda: pn.sinusoidal(table),
        lambda: pn.embedding(ids, table),
        lambda: pn.alibi_bias(pn.alibi_slopes(8), 300, 300),
    ]
    alone = [call() for call in calls]
    started = []
    monkeypatch.setattr(threading, "Thread", lambda target: started.append(1) or Thread(target=target))
    monkeypatch.setattr(pn, "_threads", 3)
    assert all((a == call()).all() for a, call in zip(alone, calls, strict=True))
    assert len(started) == 2 * len(calls)


def test_an_interrupt_waits_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's arguments live until all parts are done."""
    table, ids = drawn(500, 64).numpy(), np.arange(100_000) % 500
    expected = pn.embedding(ids, table)

    class Interrupted(Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            if not interrupted:
                interrupted.append(self)
                raise KeyboardInterrupt

    interrupted: list[Thread] = []

    monkeypatch.setattr(threading, "Thread", lambda target: Interrupted(target=target))
    monkeypatch.setattr(pn, "_threads", 2)
    out = np.zeros_like(expected)
    with pytest.raises(KeyboardInterrupt):
        pn.embedding(ids, table, out=out)
    assert (out == expected).all()


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    table, ids = drawn(500, 64).numpy(), np.arange(100_000) % 500
    expected = pn.embedding(ids, table)
    monkeypatch.setattr(threading, "Thread", lambda target: Refused(target=target))
    monkeypatch.setattr(pn, "_threads", 2)
    assert (pn.embedding(ids, table) == expected).all()
    pn.set_num_threads(1)
    with pytest.raises(ValueError, match=r"count.*at least 1, got 0"):
        pn.set_num_threads(0)


def test_empty_arrays() -> None:
    for shape in ((0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64)):
        rows = np.zeros(shape[:2], np.int64)
        assert pn.rotary(np.empty(shape, np.float32), None, rows).shape == shape
    assert pn.sinusoidal(np.empty((0, 5, 8), np.float32), np.zeros((0, 5))).shape == (0, 5, 8)
    assert pn.embedding(np.empty((2, 0), np.int64), T).shape == (2, 0, 4)
    mask = np.ones((0, 3), bool)
    assert pn.alibi_bias(T[0], 2, 3, attention_mask=mask, query_positions=np.zeros((0, 2), np.int64)).size == 0


Q, T = QUERY.numpy(), np.zeros((3, 4), np.float32)
REFUSALS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "query.*float32.*int64", lambda: pn.rotary(np.zeros((1, 2, 3, 64), np.int64))),
    (ValueError, "query.*4 dimensions.*[5, 4, 64]", lambda: pn.rotary(Q[0])),
    (ValueError, "layout.*'bhds'", lambda: pn.rotary(Q, layout="bhds")),
    (ValueError, "head_dim 128.*got 64", lambda: pn.rotary(Q, spec={"head_dim": 128})),
    (ValueError, "rotary_dim.*even.*63", lambda: pn.rotary(Q, spec={"rotary_dim": 63})),
    (ValueError, "rotary_dim.*other than 0", lambda: pn.rotary(Q, spec={"rotary_dim": 0})),
    (ValueError, "scale.*other than 0", lambda: pn.embedding(np.zeros(2, np.int64), T, scale=0.0)),
    (ValueError, "offset.*64 bits", lambda: pn.rotary(Q, offset=2**64)),
    (ValueError, "offset.*63 bits", lambda: pn.rotary(Q, offset=2**63 - 3)),
    (TypeError, "query.*got handle32", lambda: pn.rotary(Q.astype(">f4"))),
    (ValueError, "rotary_start.*64, got 8 . 64", lambda: pn.rotary(Q, spec={"rotary_start": 8})),
    (ValueError, "base.*0.5", lambda: pn.rotary(Q, spec={"base": 0.5})),
    (ValueError, "scaling.*'longrope'", lambda: pn.rotary(Q, spec={"scaling": {"type": "longrope"}})),
    (ValueError, "factor.*positive.*-2", lambda: pn.rotary(Q, spec={"scaling": {"type": "linear", "factor": -2.0}})),
    (ValueError, "numerics.*'exact'.*'float32'", lambda: pn.rotary(Q, spec={"numerics": "float32"})),
    (ValueError, "rope_theta.*base, head_dim", lambda: pn.rotary(Q, spec={"rope_theta": 1e4})),
    (ValueError, "base.*number, got '1e4'", lambda: pn.rotary(Q, spec={"base": "1e4"})),
    (TypeError, "spec.*dict.*int", lambda: pn.rotary(Q, spec=64)),
    (ValueError, "x: .*seq, embedding_dim.*[2, 5, 4, 64]", lambda: pn.sinusoidal(Q)),
    (ValueError, "slopes.*[heads].*got []", lambda: pn.alibi_bias(8, 4, 4)),
    (ValueError, "offset.*-1", lambda: pn.rotary(Q, offset=-1)),
    (ValueError, "key.*batch and seq", lambda: pn.rotary(Q, Q[:, :3])),
    (TypeError, "key.*query.*float32.*float64", lambda: pn.rotary(Q, Q.astype(np.float64))),
    (ValueError, "positions.*[5].*got [4]", lambda: pn.rotary(Q, positions=np.arange(4))),
    (ValueError, "positions.*batch 2 or 1, got 3", lambda: pn.rotary(Q, positions=np.zeros((3, 5), np.int64))),
    (TypeError, "positions.*int32.*float16", lambda: pn.rotary(Q, positions=np.zeros(5, np.float16))),
    (IndexError, "positions.*-1 or more.*seq 3", lambda: pn.rotary(Q, positions=np.array([0, 1, -1, -2, 3]))),
    (IndexError, "positions.*finite.*seq 1", lambda: pn.rotary(Q, positions=np.array([0, np.inf, 1, 2, 3]))),
    (ValueError, "positions.*no offset", lambda: pn.rotary(Q, positions=np.arange(5), offset=1)),
    (ValueError, "cu_seqlens.*5 last.*got 4", lambda: pn.rotary(Q[:1], cu_seqlens=np.array([0, 4]))),
    (ValueError, "learned_frequencies.*32", lambda: pn.rotary(Q, frequencies=np.ones(31))),
    (ValueError, "frequencies.*heads.*4, got 3", lambda: pn.rotary(Q, frequencies=np.ones((3, 32)))),
    (ValueError, "query_out: expected [2, 5, 4, 64]", lambda: pn.rotary(Q, out=np.empty((2, 5, 3, 64), np.float32))),
    (ValueError, "query_out: shares memory", lambda: pn.rotary(BUFFER[:, :-1], out=BUFFER[:, 1:])),
    (ValueError, "query_out.*own", lambda: pn.rotary(Q, out=ONE_ROW)),
    (ValueError, "cosines.*seq 4", lambda: pn.rotary_tables(Q, None, Q[0, :, 0], Q[0, :, 0])),
    (TypeError, "cosines.*wider", lambda: pn.rotary_tables(Q.astype(np.float16), None, Q[:1, :4, 0], Q[:1, :4, 0])),
    (ValueError, "preset.*'sam'", lambda: pn.sinusoidal(T, spec={"preset": "sam"})),
    (ValueError, "embedding_dim 8, got 4", lambda: pn.sinusoidal(T, spec={"embedding_dim": 8})),
    (IndexError, "positions.*finite.*seq 2", lambda: pn.sinusoidal(T, np.array([0, 1, np.nan]))),
    (ValueError, "query_offset.*4 queries.*3 keys", lambda: pn.alibi_bias(T[0], 4, 3)),
    (ValueError, "slopes.*one side.*[2, 4]", lambda: pn.alibi_bias(T[:2], 1, 2)),
    (ValueError, "distances", lambda: pn.alibi_bias(T[0], 1, 2, query_offset=-5, key_positions=FAR)),
    (IndexError, "key_positions.*index 1", lambda: pn.alibi_bias(T[0], 1, 2, key_positions=FAR + 1)),
    (ValueError, "heads.*0", lambda: pn.alibi_slopes(0)),
    (IndexError, "ids.*0 to 2.*got 3 at index 1", lambda: pn.embedding(np.array([0, 3]), T)),
    (IndexError, "ids.*got -1", lambda: pn.embedding(np.array([-1]), T)),
    (TypeError, "ids.*int32 or int64.*uint8", lambda: pn.embedding(np.zeros(2, np.uint8), T)),
    (ValueError, "out.*[2, 4]", lambda: pn.embedding(np.zeros(2, np.int64), T, out=np.empty((2, 5), np.float32))),
]
FAR = np.array([0, 2**31 - 1])
BUFFER = np.zeros((2, 6, 4, 64), np.float32)
ONE_ROW = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), Q.shape, (0, 0, 0, 4))


@pytest.mark.parametrize(("error", "words", "call"), REFUSALS, ids=[words for _, words, _ in REFUSALS])
def test_refusals(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    pattern = words.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(error, match=pattern):
        call()


def test_nothing_is_written_where_a_call_is_refused() -> None:
    out, ids = np.full((4, 4), 7, np.float32), np.array([0, 1, 2, 3])
    with pytest.raises(IndexError):
        pn.embedding(ids, T, out=out)
    held = BUFFER[:, :5].copy()
    with pytest.raises(IndexError):
        pn.rotary(Q, positions=np.array([0, 1, 2, 3, -2]), out=held)
    assert (out == 7).all()
    assert (held == 0).all()


def test_it_imports_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["posembed"] = None
import numpy as np
import posembed_kernels.numpy as pn
print(pn.rotary(np.ones((1, 2, 1, 8), np.float32)).shape, pn.embedding(np.array([0]), np.ones((1, 4))).shape)
"""
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "python")
    assert shown.stdout == "(1, 2, 1, 8) (1, 4)\n", shown.stderr
