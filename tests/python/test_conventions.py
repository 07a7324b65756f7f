"""The jobs of other libraries' own tests, each computed here from its convention in float64.

flash-attn's rotary tests, TransformerEngine's of fused attention, vLLM's of rotary embeddings and
diffusers' of embeddings: their parameters, in posembed's words.
"""

from typing import Any

import posembed as pe
import pytest
import torch
from support.case import TOLERANCE
from torch import Tensor

BATCH, TOKENS, HEADS, KEYS, HEAD = 2, 12, 4, 2, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def angles(positions: Tensor, width: int, base: float = 10000.0, heads: int = 1) -> Tensor:
    """[…, tokens, 1, pairs], of positions [batch, tokens] or [tokens]; heads: dimensions of heads."""
    rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return (positions.double()[..., None] * rates).reshape(*positions.shape, *[1] * heads, -1)


def turned(x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
    """The first components of heads as complex numbers, multiplied by exp(i angle), in float64."""
    x, pairs = x.double(), turns.shape[-1]
    part, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        points = torch.complex(part[..., ::2], part[..., 1::2]) * torch.polar(turns * 0 + 1, turns)
        part = torch.stack((points.real, points.imag), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        points = torch.complex(first, second) * torch.polar(turns * 0 + 1, turns)
        part = torch.cat((points.real, points.imag), -1)
    return torch.cat((part, rest), -1)


def assert_near(found: Tensor, expected: Tensor) -> None:
    slack = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=slack, atol=slack)


def rope(interleaved: bool, fraction: float, **options: Any) -> pe.RotaryEmbedding:
    return pe.RotaryEmbedding(HEAD, rotary_dim=int(HEAD * fraction), interleaved=interleaved, **options)


# --------------------------------------------------------------------------------------- flash-attn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 5, "of each sequence"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_flash_attn(dtype: torch.dtype, offset: Any, fraction: float, interleaved: bool, in_place: bool) -> None:
    """apply_rotary_emb: packed queries, keys and values, of which the first two rotate."""
    starts = torch.tensor([3, 8]) if isinstance(offset, str) else torch.tensor([offset] * BATCH)
    qkv = numbers(BATCH, TOKENS, 3, HEADS, HEAD, dtype=dtype)
    turns = angles(starts[:, None] + torch.arange(TOKENS), int(HEAD * fraction))
    query, key, value = (x.clone() for x in qkv.unbind(2))
    module = rope(interleaved, fraction)
    given = starts if isinstance(offset, str) else offset
    if in_place:
        module.rotate_(qkv[:, :, 0], qkv[:, :, 1], offset=given)
        found = qkv[:, :, 0], qkv[:, :, 1]
    else:
        found = module(qkv[:, :, 0], qkv[:, :, 1], offset=given)
        back = module(*found, offset=given, inverse=True)  # conjugate=True
        assert_near(back[0], turned(found[0], -turns, interleaved))
    assert_near(found[0], turned(query, turns, interleaved))
    assert_near(found[1], turned(key, turns, interleaved))
    assert torch.equal(qkv[:, :, 2], value)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 5])
def test_flash_attn_varlen(fraction: float, interleaved: bool, offset: int) -> None:
    """cu_seqlens: sequences of different lengths one after the other, one of them empty."""
    ends = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)
    x = numbers(13, HEADS, HEAD)
    positions = torch.cat([torch.arange(n) + offset for n in ends.diff().tolist()])
    found = rope(interleaved, fraction, layout="thd")(x, cu_seqlens=ends, offset=offset)
    assert_near(found, turned(x, angles(positions, int(HEAD * fraction)), interleaved))


# -------------------------------------------------------------------------------- TransformerEngine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("swapped", [None, (0, 1), (2, 3)])
@pytest.mark.parametrize("starts", [False, True])
def test_transformer_engine(
    dtype: torch.dtype, layout: Any, fraction: float, interleaved: bool, swapped: Any, starts: bool
) -> None:
    """apply_rotary_pos_emb: tensors whose dimensions are swapped in memory, and start_positions."""
    shape = [TOKENS, BATCH] if layout == "sbhd" else [BATCH, TOKENS]
    shape += [HEADS, HEAD]
    if swapped:
        shape[swapped[0]], shape[swapped[1]] = shape[swapped[1]], shape[swapped[0]]
    x = numbers(*shape, dtype=dtype)
    x = (x.transpose(*swapped) if swapped else x).requires_grad_()
    first = torch.tensor([4, 9]) if starts else torch.zeros(BATCH, dtype=torch.int64)
    turns = angles(first[:, None] + torch.arange(TOKENS), int(HEAD * fraction))
    turns = turns.transpose(0, 1) if layout == "sbhd" else turns
    module = rope(interleaved, fraction, layout=layout)
    found = module(x, offset=first) if starts else module(x)
    assert_near(found.detach(), turned(x.detach(), turns, interleaved))
    weights = numbers(*found.shape, dtype=dtype)
    (gradient,) = torch.autograd.grad(found, x, weights)
    assert_near(gradient, turned(weights, -turns, interleaved))


# --------------------------------------------------------------------------------------------- vLLM


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("head", [16, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_vllm(neox: bool, head: int, fraction: float) -> None:
    """Flat tokens: query [tokens, heads * head_size], a position each, in place, fewer key heads."""
    width, positions = int(head * fraction), torch.tensor([7, 0, 3000, 4095, 1])
    query, key = numbers(5, HEADS * head), numbers(5, KEYS * head)
    turns = angles(positions, width)
    expected = [turned(x.view(5, -1, head), turns, not neox) for x in (query, key)]
    module = pe.RotaryEmbedding(head, rotary_dim=width, interleaved=not neox, layout="thd")
    module.rotate_(query.view(5, -1, head), key.view(5, -1, head), positions=positions)
    assert_near(query, expected[0].flatten(1))
    assert_near(key, expected[1].flatten(1))


# ---------------------------------------------------------------------------------------- diffusers


@pytest.mark.parametrize("cos_first", [False, True])
@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scale", [1, 10, 1000])
@pytest.mark.parametrize("base", [10.0, 10000.0])
def test_diffusers_time_steps(cos_first: bool, shift: float, scale: int, base: float) -> None:
    """get_timestep_embedding: its scale multiplies the time step, not the encoding."""
    width, steps = 64, torch.tensor([0.0, 0.5, -0.25, 7.0, 999.0, 0.3], dtype=torch.float64)
    rates = base ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2 - shift))
    phases = steps[:, None] * scale * rates
    parts = [phases.sin(), phases.cos()]
    expected = torch.cat(parts[::-1] if cos_first else parts, -1)
    module = pe.SinusoidalPositionalEmbedding(
        width, base=base, preset="ddpm", cos_first=cos_first, shift=shift, position_scale=scale
    )
    assert torch.allclose(module.encode(steps), expected, rtol=0, atol=1e-10)
    assert_near(module.encode(steps[:5].float()), expected[:5])
