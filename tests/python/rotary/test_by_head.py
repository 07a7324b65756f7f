"""Frequencies of each head, and angles that are sums over axes, against their programs' formulas."""

import math
from collections.abc import Callable

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor

HEADS, DIM = 3, 16
PAIRS = DIM // 2


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """``x`` rotated by angles [..., heads, pairs], in float64."""
    cos, sin, x = angles.cos(), angles.sin(), x.double()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("batch", [1, 3])  # rows of a batch of 1 serve all sequences
def test_sums_over_axes(dtype: torch.dtype, floating: bool, batch: int, device: torch.device) -> None:
    """RoPE-Mixed of timm, ``get_mixed_freqs``; Mochi's einsum("nd,dhf->nhf")."""
    query, key = torch.randn(2, 3, 41, HEADS, DIM, device=device, dtype=dtype)
    frequencies = torch.randn(2, HEADS, PAIRS, device=device, dtype=torch.float64)
    places = torch.randint(0, 10**6, (2, batch, 41), device=device)
    if floating:
        places = (places - 5 * 10**5) * 0.25
    angles = torch.einsum("abn,ahf->bnhf", places.double(), frequencies)
    rope = pe.RotarySpec(DIM, interleaved=True)
    found = pe.functional.rotary(query, key, places, spec=rope, frequencies=frequencies)
    # The reference rounds angles of up to 1e7 radians; 16 bits are rounded once more.
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 0)
    for rotated, x in zip(found, (query, key), strict=True):
        assert torch.allclose(rotated.double(), turned(x, angles, True), atol=2e-6, rtol=step)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_each_head_turns_as_if_alone(layout: pe.functional.Layout, device: torch.device) -> None:
    """The same bits as a call for each head, with positions on axes, in place and inverted too."""
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
    rows = torch.randn(2, 700, HEADS, DIM + 4, device=device)
    query = rows[0] if layout == "thd" else rows.permute(order[layout]).contiguous()
    head_axis = {"bhsd": 1, "thd": 1}.get(layout, 2)
    sections = pe.Sections((3, 5))
    spec = pe.RotarySpec(DIM + 4, rotary_dim=DIM, rotary_start=2, sections=sections)
    frequencies = torch.rand(HEADS, PAIRS, device=device)
    places = torch.randint(0, 999, (2, 700) if layout == "thd" else (2, 2, 700), device=device)
    places[..., 5] = -1
    options = {"spec": spec, "layout": layout}
    found = pe.functional.rotary(query, None, places, frequencies=frequencies, **options)
    for head in range(HEADS):
        alone = query.narrow(head_axis, head, 1)
        wanted = pe.functional.rotary(alone, None, places, frequencies=frequencies[head], **options)
        assert torch.equal(found.narrow(head_axis, head, 1), wanted)
    back = pe.functional.rotary_(found.clone(), None, places, frequencies=frequencies, inverse=True, **options)
    assert torch.allclose(back, query, atol=1e-6)


def test_nan_stays_in_its_pair(device: torch.device) -> None:
    frequencies = torch.ones(2, HEADS, PAIRS, device=device)
    frequencies[1, 2, 3] = float("nan")
    rotated = pe.functional.rotary(
        torch.ones(1, 2, HEADS, DIM, device=device),
        positions=torch.ones(2, 1, 2, device=device, dtype=torch.int64),
        spec=pe.RotarySpec(DIM),
        frequencies=frequencies,
    )
    assert rotated[0, 1].isnan().nonzero().tolist() == [[2, 3], [2, 3 + PAIRS]]


def ltx_frequencies(heads: int, pairs: int, theta: float = 10000.0) -> Tensor:
    """``LTXVideoRotaryPosEmbed``: pairs of all heads take the axes in turns.

    The hidden size is 6 * count + 2 or so; the first pairs, which remain, do not turn.
    """
    total = heads * pairs
    count = 2 * total // 6
    series = theta ** torch.linspace(0, 1, count, dtype=torch.float64) * math.pi / 2
    frequencies = torch.zeros(3, total, dtype=torch.float64)
    for axis in range(3):
        frequencies[axis, total - 3 * count + axis :: 3] = series
    return frequencies.view(3, heads, pairs)


def test_ltx_rotates_before_the_heads_are_split() -> None:
    heads, pairs, tokens = 4, 16, 5
    hidden, fractions = torch.randn(1, tokens, 2 * heads * pairs).double(), torch.rand(3, tokens)
    positions = fractions.double() * 2 - 1
    series = 10000.0 ** torch.linspace(0, 1, 21, dtype=torch.float64) * math.pi / 2
    angles = (series * positions.T.unsqueeze(-1)).transpose(-1, -2).flatten(1)  # as the program
    angles = torch.cat([torch.zeros(tokens, 1), angles], 1)
    wanted = turned(hidden.unsqueeze(2), angles[None, :, None], True).view(1, tokens, -1)
    found = pe.functional.rotary(
        hidden.view(1, tokens, heads, -1),
        positions=positions.unsqueeze(1),
        spec=pe.RotarySpec(2 * pairs, interleaved=True),
        frequencies=ltx_frequencies(heads, pairs),
    )
    assert torch.allclose(found.flatten(2), wanted, atol=1e-11)


def test_the_module_learns_them() -> None:
    plain = pe.RotaryEmbedding(DIM, learned_frequencies=True)
    own = pe.RotaryEmbedding(DIM, learned_frequencies=True, frequency_sizes=(HEADS,))
    mixed = pe.RotaryEmbedding(DIM, learned_frequencies=True, frequency_sizes=(2, HEADS))
    query = torch.randn(2, 9, HEADS, DIM)
    assert torch.equal(own(query), plain(query))
    positions = torch.randint(0, 9, (2, 2, 9))
    mixed(query, positions=positions).square().mul(query).sum().backward()
    assert mixed.frequencies is not None
    assert mixed.frequencies.grad is not None
    assert mixed.frequencies.grad.shape == mixed.frequencies.shape == (2, HEADS, PAIRS)
    assert torch.allclose(mixed(query, positions=positions), plain(query, positions=positions.sum(0)), atol=1e-5)
    assert mixed.resolve(9).frequencies is mixed.frequencies
    ours, theirs = (
        module.RotaryEmbedding(8, learned_frequencies=True, frequency_sizes=(2, 3)) for module in (pe, pe.cpp)
    )
    assert repr(ours) == repr(theirs)
    assert torch.equal(ours.frequencies, theirs.frequencies)


FREQUENCIES = torch.rand(2, HEADS, PAIRS)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frequencies": FREQUENCIES[0, :2]}, "frequencies: expected heads 3, got 2"),
        ({"frequencies": FREQUENCIES[None]}, r"frequencies: expected \[rotary_dim / 2\], \[heads, rotary_dim / 2\] or"),
        ({"frequencies": FREQUENCIES[0, :, 1:]}, "frequencies: expected rotary_dim / 2 8, got 7"),
        ({"frequencies": FREQUENCIES}, r"positions: expected \[axes, batch, seq\] where frequencies sum over axes"),
        ({"frequencies": FREQUENCIES, "positions": torch.ones(3, 1, 4)}, "positions: expected axes 2, got 3"),
        ({"frequencies": FREQUENCIES, "positions": torch.ones(1, 4)}, r"positions: expected \[axes, batch, seq\]"),
        ({"frequencies": torch.rand(5, HEADS, PAIRS), "positions": torch.ones(5, 1, 4)}, "frequencies: expected 1 to 4 axes, got 5"),
        ({"frequencies": FREQUENCIES, "positions": torch.ones(2, 1, 4), "spec": pe.RotarySpec(DIM, sections=pe.Sections((4, 4)))}, "sections: expected none where frequencies sum over axes"),
        ({"frequencies": FREQUENCIES[0], "spec": pe.RotarySpec(DIM, scaling=pe.XPosScaling())}, r"frequencies: expected \[rotary_dim / 2\] with XPosScaling"),
        ({"frequencies": FREQUENCIES[0], "key": torch.ones(1, 4, 1, DIM)}, "key: expected heads 3, got 1"),
    ],
)  # fmt: skip
def test_bad_frequencies_raise(options: dict[str, object], text: str) -> None:
    call: Callable[..., object] = pe.functional.rotary
    refused((lambda: call(torch.ones(1, 4, HEADS, DIM), **{"spec": pe.RotarySpec(DIM), **options}), ValueError, text))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tables_of_each_head(dtype: torch.dtype, device: torch.device) -> None:
    """As timm's ``apply_rot_embed`` with tables [heads, seq, dim]; bit for bit."""
    query, key = torch.randn(2, 2, HEADS, 50, DIM, device=device, dtype=dtype)
    angles = torch.randn(1, HEADS, 50, DIM // 2, device=device).to(dtype).repeat_interleave(2, -1)
    cos, sin = angles.cos(), angles.sin()

    def program(x: Tensor) -> Tensor:
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    found = pe.functional.rotary_tables(query, key, cos, sin, interleaved=True)
    for rotated, x in zip(found, (query, key), strict=True):
        assert torch.equal(rotated, program(x))
    swapped = pe.functional.rotary_tables(
        query.transpose(1, 2), None, cos.transpose(1, 2), sin.transpose(1, 2),
        interleaved=True, unsqueeze_dim=2,
    )  # fmt: skip
    assert torch.equal(swapped.transpose(1, 2), found[0])
    refused((lambda: pe.functional.rotary_tables(query, key[:, :1], cos, sin), ValueError, "key: expected the heads of cos, 3, got 1"))  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_longrope_by_the_length_of_each_sample(layout: pe.functional.Layout, device: torch.device) -> None:
    scaling = pe.LongRopeScaling([1.0] * 8, [4.0] * 8, 32, factor=4.0, long_attention_factor=1.5)
    rope = pe.RotaryEmbedding(DIM, scaling=scaling, layout=layout)
    count = 6 if layout == "thd" else 4
    lengths = torch.tensor([7, 33, 32, 900, 5, 40][:count], device=device)
    shapes = {"bshd": (4, 5, 2), "bhsd": (4, 2, 5), "sbhd": (5, 4, 2), "thd": (6, 2)}
    query = torch.randn(*shapes[layout], DIM, device=device, requires_grad=True)
    axis = 1 if layout == "sbhd" else 0
    places = torch.arange(6, device=device) if layout == "thd" else None
    found, key = rope(query, 2 * query, places, seq_len=lengths)
    for sample, length in enumerate(lengths.tolist()):
        wanted = rope.resolve(length)(query, positions=places).select(axis, sample)
        assert torch.equal(found.select(axis, sample), wanted)
    assert torch.allclose(key, 2 * found)
    (gradient,) = torch.autograd.grad(found.sum(), query)
    assert torch.isfinite(gradient).all()
    if layout == "bshd":
        compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(query, seq_len=lengths), rope(query, seq_len=lengths))
    refused((lambda: rope(query, seq_len=lengths[:2]), ValueError, f"seq_len: expected int32 or int64 [{count}]"))  # fmt: skip
    refused((lambda: rope(query, seq_len=lengths > 9), ValueError, f"seq_len: expected int32 or int64 [{count}], .*, got torch.bool"))  # fmt: skip
    dynamic = pe.RotaryEmbedding(DIM, scaling=pe.DynamicNtkScaling(2.0, 32))
    refused((lambda: dynamic(torch.ones(1, 1, 1, DIM), seq_len=torch.tensor([9])), ValueError, "seq_len: expected a number, because dynamic NTK"))  # fmt: skip
