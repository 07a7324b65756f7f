"""Tests that both sides of the migration page give equal numbers, for installed libraries."""

from collections.abc import Callable
from types import ModuleType

import posembed as pe
import pytest
import torch
from torch import Tensor

TOKENS, HEADS, WIDTH = 10, 8, 64
TOLERANCE = 2e-6
Pair = tuple[Tensor, Tensor]


def heads() -> Tensor:
    """A random tensor [batch, seq, heads, head_dim]."""
    return torch.randn(1, TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(0))


def heads_first() -> Tensor:
    return heads().transpose(1, 2)


def hidden() -> Tensor:
    return heads()[:, :, 0]


def assert_same(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE


# ---------------------------------------------------------------------------------------- torchtune


def tune(path: str, name: str, options: dict, ours: dict) -> Pair:
    module = pytest.importorskip(f"torchtune.{path}")
    return pe.RotaryEmbedding(WIDTH, **ours)(heads()), getattr(module, name)(WIDTH, **options)(heads())


LLAMA3 = {"base": 500000.0, "scaling": pe.Llama3Scaling(8.0, 1.0, 4.0, 8192), "interleaved": True}


@pytest.mark.parametrize(
    ("path", "name", "options", "ours"),
    [
        ("modules", "RotaryPositionalEmbeddings", {"base": 500}, {"base": 500.0, "interleaved": True}),
        ("models.llama3_1", "Llama3ScaledRoPE", {"base": 500_000}, LLAMA3),
        ("models.qwen2", "Qwen2RotaryPositionalEmbeddings", {}, {"base": 1e6}),
        ("models.phi3", "Phi3RotaryPositionalEmbeddings", {}, {}),
    ],
)  # fmt: skip
def test_torchtune(path: str, name: str, options: dict, ours: dict) -> None:
    assert_same(tune(path, name, options, ours))


def test_torchtune_positions() -> None:
    module = pytest.importorskip("torchtune.modules")
    at = torch.arange(5, 5 + TOKENS)
    rope = pe.RotaryEmbedding(WIDTH, interleaved=True)
    theirs = module.RotaryPositionalEmbeddings(WIDTH)(heads(), input_pos=at[None])
    assert_same((rope(heads(), positions=at), theirs))


# ---------------------------------------------------------------------------- rotary-embedding-torch


def part(**options: object) -> pe.RotaryEmbedding:
    """Rotates the first half of each head, as the next two libraries do."""
    defaults = {"rotary_dim": WIDTH // 2, "interleaved": True, "layout": "bhsd"}
    return pe.RotaryEmbedding(WIDTH, **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        ({"theta": 500}, {"base": 500.0}),
        ({"interpolate_factor": 2.0}, {"scaling": pe.LinearScaling(2.0)}),
        ({"theta_rescale_factor": 4.0}, {"scaling": pe.NtkScaling(4.0)}),
        ({"custom_freqs": torch.ones(16)}, {"custom_frequencies": [1.0] * 16}),
    ],
)
def test_rotary_embedding_torch(options: dict, ours: dict) -> None:
    module = pytest.importorskip("rotary_embedding_torch")
    theirs = module.RotaryEmbedding(dim=WIDTH // 2, **options)
    x = heads_first()
    assert_same((part(**ours)(x), theirs.rotate_queries_or_keys(x)))
    assert_same((part(**ours)(x, offset=7), theirs.rotate_queries_or_keys(x, offset=7)))


def test_rotary_embedding_torch_forms() -> None:
    module = pytest.importorskip("rotary_embedding_torch")
    x, rope = heads_first(), module.RotaryEmbedding(dim=WIDTH // 2)
    seq_first = module.RotaryEmbedding(dim=WIDTH // 2, seq_before_head_dim=True)
    assert_same((part(layout="bshd")(heads()), seq_first.rotate_queries_or_keys(heads())))
    query, key = rope.rotate_queries_with_cached_keys(x[:, :, -2:], x)
    assert_same((part()(x[:, :, -2:], offset=TOKENS - 2), query))
    assert_same((part()(x), key))


# --------------------------------------------------------------------------------------- torchembed


def test_torchembed() -> None:
    module = pytest.importorskip("torchembed")
    x, scores = heads_first(), torch.randn(1, HEADS, 6, 6)
    query, _ = module.RotaryEmbedding(WIDTH, max_seq_len=32)(x, x)
    assert_same((pe.RotaryEmbedding(WIDTH, layout="bhsd")(x), query))
    bias = pe.ALiBi(HEADS, causal=False)(6)
    assert_same((scores + bias, module.ALiBiEmbedding(HEADS, 32)(scores)))
    sinusoidal = pe.SinusoidalPositionalEmbedding(WIDTH)
    assert_same((sinusoidal(hidden()), module.SinusoidalEmbedding(WIDTH, 32)(hidden())))
    theirs, ours = (module.LearnedPositionalEmbedding(32, WIDTH), pe.LearnedPositionalEmbedding(32, WIDTH))
    ours.load_state_dict({"weight": theirs.embedding.weight})
    assert_same((ours(hidden()), theirs(hidden())))


# ----------------------------------------------------------------------------------- x-transformers


@pytest.fixture
def x_transformers() -> ModuleType:
    return pytest.importorskip("x_transformers.x_transformers")


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({}, None),
        ({"interpolation_factor": 2.0}, pe.LinearScaling(2.0)),
        ({"base_rescale_factor": 4.0}, pe.NtkScaling(4.0)),
    ],
)
def test_x_transformers_rotary(options: dict, scaling: object, x_transformers: ModuleType) -> None:
    angles, _ = x_transformers.RotaryEmbedding(WIDTH // 2, **options).forward_from_seq_len(TOKENS)
    theirs = x_transformers.apply_rotary_pos_emb(heads_first(), angles)
    assert_same((part(scaling=scaling)(heads_first()), theirs))


def xpos_of_x_transformers(module: ModuleType, x: Tensor) -> Pair:
    angles, scale = module.RotaryEmbedding(WIDTH, use_xpos=True).forward_from_seq_len(TOKENS)
    rotate = module.apply_rotary_pos_emb
    return rotate(x, angles, scale), rotate(x, angles, scale**-1)


def xpos_of_rotary_embedding_torch(module: ModuleType, x: Tensor) -> Pair:
    return module.RotaryEmbedding(dim=WIDTH, use_xpos=True).rotate_queries_and_keys(x, x)


@pytest.mark.parametrize(
    ("name", "xpos"),
    [
        ("x_transformers.x_transformers", xpos_of_x_transformers),
        ("rotary_embedding_torch", xpos_of_rotary_embedding_torch),
    ],
)
def test_xpos(name: str, xpos: Callable[[ModuleType, Tensor], Pair]) -> None:
    x, scaling = heads_first(), pe.XPosScaling(center=TOKENS // 2)
    rope = pe.RotaryEmbedding(WIDTH, interleaved=True, layout="bhsd", scaling=scaling)
    for pair in zip(rope(x, x), xpos(pytest.importorskip(name), x), strict=True):
        assert_same(pair)


def test_x_transformers_additive(x_transformers: ModuleType) -> None:
    few = x_transformers.AlibiPositionalBias(HEADS, total_heads=12)(4, 6)
    slopes = torch.cat((pe.ALiBi(HEADS).slopes, torch.zeros(4)))
    assert_same((pe.ALiBi(12, slopes=slopes, causal=False)(4, 6), few))
    options = {"preset": "marian", "scale": WIDTH**-0.5, "learned_scale": True}
    sinusoidal = pe.SinusoidalPositionalEmbedding(WIDTH, **options).encode(torch.arange(TOKENS))
    assert_same((sinusoidal, x_transformers.ScaledSinusoidalEmbedding(WIDTH)(hidden())))
    theirs = x_transformers.AbsolutePositionalEmbedding(WIDTH, 32)
    ours = pe.LearnedPositionalEmbedding(32, WIDTH)
    ours.load_state_dict({"weight": theirs.emb.weight})
    assert_same((ours.encode(torch.arange(TOKENS)) * WIDTH**-0.5, theirs(hidden())))


# ------------------------------------------------------------------------------------- transformers


def test_transformers_additive() -> None:
    pytest.importorskip("transformers")
    from transformers.models.marian import modeling_marian
    from transformers.models.opt import modeling_opt

    marian = modeling_marian.MarianSinusoidalPositionalEmbedding(32, WIDTH)
    table = marian.create_weight()
    sinusoidal = pe.SinusoidalPositionalEmbedding(WIDTH, preset="marian")
    assert_same((sinusoidal.encode(torch.arange(32)), table))
    theirs = modeling_opt.OPTLearnedPositionalEmbedding(32, WIDTH)
    ours = pe.LearnedPositionalEmbedding(32, WIDTH, first_row=2)
    ours.load_state_dict({"weight": theirs.weight})
    assert_same((ours.encode(torch.arange(5))[None], theirs(torch.ones(1, 5, dtype=torch.int64))))
