"""Compares every numerics profile bit for bit with the program that it reproduces."""

from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused
from support.scalings import LONGROPE, SCALINGS
from torch import Tensor

NARROW = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", NARROW, ids=str)


def make(dtype: torch.dtype, device: torch.device, heads: int = 4, dim: int = 64) -> Tensor:
    """A random tensor [batch, heads, seq, head_dim]."""
    torch.manual_seed(0)
    return torch.randn(2, heads, 17, dim, dtype=dtype, device=device)


def places(device: torch.device) -> Tensor:
    """Positions from the first to where float32 angles err by a tenth."""
    row = torch.tensor([0, 1, 2, 3, 100, 1023, 4095, 4096, 8191, 32767, 65537, 131071])
    return torch.stack([torch.cat([row, torch.arange(5)]), torch.arange(17) + 999_983]).to(device)


def model(name: str) -> Any:
    pytest.importorskip("transformers")
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def llama(parameters: dict[str, Any] | None = None) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **(parameters or {})},
    )
    return config


def rotated_by_llama(config: Any, query: Tensor, key: Tensor, positions: Tensor) -> Any:
    llama_model = model("llama")
    rope = llama_model.LlamaRotaryEmbedding(config)
    rope(query.cpu(), positions.cpu())  # the first call's device computes long frequencies
    return llama_model.apply_rotary_pos_emb(query, key, *rope.to(query.device)(query, positions))


def assert_same_bits(actual: Any, expected: Any) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@each_dtype
def test_float32_is_llama(dtype: torch.dtype, device: torch.device) -> None:
    query, key = make(dtype, device), make(dtype, device, heads=2)
    rope = pe.RotaryEmbedding(64, layout="bhsd", numerics="float32")
    expected = rotated_by_llama(llama(), query, key, places(device))
    assert_same_bits(rope(query, key, places(device)), expected)
    assert not torch.equal(pe.RotaryEmbedding(64, layout="bhsd")(query, None, places(device)), expected[0])


@each_dtype
def test_gradients_of_float32_are_llamas(dtype: torch.dtype, device: torch.device) -> None:
    query = make(dtype, device).requires_grad_()
    expected = rotated_by_llama(llama(), query, query, places(device))[0]
    weight = make(dtype, device).flip(0)
    rope = pe.RotaryEmbedding(64, layout="bhsd", numerics="float32")
    found = torch.autograd.grad(rope(query, None, places(device)), query, weight)
    assert_same_bits(found, torch.autograd.grad(expected, query, weight))


STATIC = [
    (pe.RotarySpec(64, scaling=scaling), parameters)
    for scaling, parameters, _ in SCALINGS
    if parameters["rope_type"] in ("linear", "yarn", "llama3")
]


@pytest.mark.parametrize(
    ("spec", "parameters"), STATIC, ids=[f"{s.scaling.kind}-{i}" for i, (s, _) in enumerate(STATIC)]
)
def test_scaled_frequencies_are_transformers(
    spec: pe.RotarySpec, parameters: dict[str, Any], device: torch.device
) -> None:
    query = make(torch.float32, device)
    rope = pe.RotaryEmbedding(spec, layout="bhsd", numerics="float32")
    expected = rotated_by_llama(llama(parameters), query, query, places(device))
    assert_same_bits([rope(query, None, places(device))], expected[:1])


@pytest.mark.parametrize("length", [64, 4097])
def test_longrope_is_transformers(length: int, device: torch.device) -> None:
    short, long = LONGROPE["short_factor"][:32], LONGROPE["long_factor"][:32]
    scaling = pe.LongRopeScaling(short, long, 4096, factor=32)
    spec = pe.RotarySpec(64, scaling=scaling).resolve(length)
    query, positions = make(torch.float32, device), torch.arange(length - 17, length, device=device)
    rope = pe.RotaryEmbedding(spec, layout="bhsd", numerics="float32")
    config = llama({**LONGROPE, "short_factor": short, "long_factor": long})
    expected = rotated_by_llama(config, query, query, positions.expand(2, -1))
    found = rope(query, None, positions)
    # Some versions compute long frequencies on the query's device, whose powers differ from the
    # CPU's by roundings of 6e-8, 4,097 times as much in the angle.
    if device.type == "cuda":
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-3)
    else:
        assert_same_bits([found], expected[:1])


def test_proportional_and_dynamic_are_transformers() -> None:
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    pairs = 32
    # With ones in the first half the query shows cosines; at position 1, those of frequencies.
    query = torch.cat([torch.ones(pairs), torch.zeros(pairs)]).view(1, 1, 1, 64)
    for scaling, parameters, length in SCALINGS:
        if parameters["rope_type"] not in ("proportional", "dynamic"):
            continue
        spec = pe.RotarySpec(64, scaling=scaling)
        spec = spec.resolve(length) if length else spec
        frequencies, _ = functions[parameters["rope_type"]](llama(parameters), torch.device("cpu"), seq_len=length)
        rope = pe.RotaryEmbedding(spec, numerics="float32")
        for position in (1, 77, 100_003):
            angle = torch.tensor(position).float() * frequencies
            found = rope(query, offset=position).flatten()
            assert torch.equal(found, torch.cat([angle.cos(), angle.sin()]))


@each_dtype
def test_rounded_table_is_cohere(dtype: torch.dtype, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    cohere = model("cohere")
    config = transformers.CohereConfig(hidden_size=256, num_attention_heads=4)
    query, key = make(dtype, device), make(dtype, device, heads=1)
    tables = cohere.CohereRotaryEmbedding(config).to(device)(query, places(device))
    expected = cohere.apply_rotary_pos_emb(query, key, *tables)
    spec = pe.RotarySpec.from_huggingface(config)
    rope = pe.RotaryEmbedding(spec, layout="bhsd", numerics="float32_rounded_table")
    assert_same_bits(rope(query, key, places(device)), expected)


@each_dtype
def test_float32_is_glm(dtype: torch.dtype, device: torch.device) -> None:
    """Interleaved pairs in half of the head."""
    transformers = pytest.importorskip("transformers")
    glm = model("glm")
    config = transformers.GlmConfig(hidden_size=256, num_attention_heads=4, head_dim=64)
    query, key = make(dtype, device), make(dtype, device, heads=2)
    tables = glm.GlmRotaryEmbedding(config).to(device)(query, places(device))
    expected = glm.apply_rotary_pos_emb(query, key, *tables)
    spec = pe.RotarySpec.from_huggingface(config)
    assert spec.interleaved
    assert spec.rotary_dim == 32
    rope = pe.RotaryEmbedding(spec, layout="bhsd", numerics="float32")
    assert_same_bits(rope(query, key, places(device)), expected)


def test_float32_is_gptj() -> None:
    """On the CPU, where GPT-J's table is made."""
    gptj = model("gptj")
    query = make(torch.float32, torch.device("cpu")).transpose(1, 2)
    sine, cosine = gptj.create_sinusoidal_positions(2048, 64)[:17].split(32, dim=-1)
    expected = gptj.apply_rotary_pos_emb(query, sine.unsqueeze(0), cosine.unsqueeze(0))
    rope = pe.RotaryEmbedding(64, interleaved=True, numerics="float32")
    assert_same_bits([rope(query)], [expected])


@each_dtype
def test_product_is_the_vision_tower_of_qwen(dtype: torch.dtype, device: torch.device) -> None:
    qwen = model("qwen2_vl")
    query, key = (make(dtype, device)[0].transpose(0, 1) for _ in range(2))  # [tokens, heads, dim]
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, 64, 2).float() / 64)).to(device)
    angle = places(device)[0].float().unsqueeze(-1) * frequencies
    table = torch.cat([angle, angle], -1)
    expected = qwen.apply_rotary_pos_emb_vision(query, key, table.cos(), table.sin())
    rope = pe.RotaryEmbedding(64, layout="thd", numerics="float32_product")
    assert_same_bits(rope(query, key, places(device)[0]), expected)


@each_dtype
def test_polar_is_llama4(dtype: torch.dtype, device: torch.device) -> None:
    """Meta's complex form. torch fuses multiply-adds unless pairs fill its vectors; 32 do."""
    llama4 = model("llama4")
    query, key = make(dtype, device).transpose(1, 2), make(dtype, device, 2).transpose(1, 2)
    frequencies = 1.0 / (500000.0 ** (torch.arange(0, 64, 2).float() / 64)).to(device)
    angle = places(device).unsqueeze(-1).float() * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)
    expected = llama4.apply_rotary_emb(query, key, turn)
    rope = pe.RotaryEmbedding(64, base=500000.0, interleaved=True, numerics="float32_polar")
    assert_same_bits(rope(query, key, places(device)), expected)


def test_axes_have_the_positions_of_their_pairs(device: torch.device) -> None:
    query = make(torch.float32, device, dim=8)
    positions = torch.randint(0, 100, (2, 2, 17), device=device)
    sections = pe.Sections((1, 3))
    rope = pe.RotaryEmbedding(8, layout="bhsd", sections=sections, numerics="float32")
    rotated = rope(query, positions=positions)
    for axis, pairs in ((0, [0]), (1, [1, 2, 3])):
        alone = pe.RotaryEmbedding(8, layout="bhsd", numerics="float32")
        wanted = alone(query, positions=positions[axis])
        for pair in pairs:
            assert torch.equal(rotated[..., pair::4], wanted[..., pair::4])


def test_inverse_undoes(device: torch.device) -> None:
    query = make(torch.float64, device)
    rope = pe.RotaryEmbedding(64, scaling=pe.YarnScaling(4, 64), layout="bhsd", numerics="float32")
    back = rope(rope(query, offset=100), offset=100, inverse=True)
    assert (back - query).abs().max() < 1e-6  # cos^2 + sin^2 of float32 tables


def test_refusals() -> None:
    refused((lambda: pe.RotaryEmbedding(8, scaling=pe.XPosScaling(), numerics="float32"), ValueError, "numerics: expected 'exact' for XPosScaling"))  # fmt: skip
    rope = pe.RotaryEmbedding(8, scaling=pe.DynamicNtkScaling(2, 64), numerics="float32")
    refused((lambda: rope(torch.ones(1, 1, 1, 8)), ValueError, "pass seq_len"))


def test_numerics_belong_to_the_specification() -> None:
    spec = pe.RotarySpec(8, numerics="float32_polar")
    assert pe.RotarySpec.from_json(spec.to_json()) == spec != pe.RotarySpec(8)
    assert pe.RotaryEmbedding(spec).spec.numerics == "float32_polar"
    assert pe.RotaryEmbedding(spec, numerics="exact").spec == pe.RotarySpec(8)
    assert "numerics='float32_polar'" in repr(pe.RotaryEmbedding(spec))
    assert 'numerics: "float32_polar" against "exact"' in spec.diff(pe.RotarySpec(8))
