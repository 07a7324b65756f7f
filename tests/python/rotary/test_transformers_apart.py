"""Compares models of transformers without a rotary module of the usual form with their own code."""

import importlib
from typing import Any

import posembed as pe
import pytest
import torch
from support.refusals import refused
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0")

from support.catalogue import having  # noqa: E402

TOKENS = 7
# Their angles are products of float32 numbers; positions stay below 50.
TOLERANCE = 2e-5


def config_and_code(model_type: str, package: str | None = None) -> tuple[Any, Any]:
    """A default configuration, and the module that runs it."""
    package = package or model_type
    code = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    return transformers.CONFIG_MAPPING[model_type](), code


def grid(rows: int, columns: int) -> Tensor:
    """The row and column of each cell: [2, rows * columns]."""
    place = torch.arange(rows * columns)
    return torch.stack([place // columns, place % columns])


@pytest.mark.parametrize("model_type", ["gptj", "codegen"])
def test_tables_of_gpt_j(model_type: str) -> None:
    config, code = config_and_code(model_type)
    spec = pe.RotarySpec.from_huggingface(config)
    query = torch.randn(1, TOKENS, 2, spec.rotary_dim)
    table = code.create_sinusoidal_positions(TOKENS, spec.rotary_dim)
    sine, cosine = table.unsqueeze(0).chunk(2, dim=-1)
    expected = code.apply_rotary_pos_emb(query, sine, cosine)
    head = torch.nn.functional.pad(query, (0, spec.head_dim - spec.rotary_dim))
    found = pe.functional.rotary(head, spec=spec)[..., : spec.rotary_dim]
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_table_of_roformer() -> None:
    config, code = config_and_code("roformer")
    spec = pe.RotarySpec.from_huggingface(config)
    table = code.RoFormerSinusoidalPositionalEmbedding(TOKENS, spec.head_dim).create_weight()
    query = torch.randn(1, 2, TOKENS, spec.head_dim)
    attention = code.RoFormerSelfAttention
    expected, _ = attention.apply_rotary_position_embeddings(table[None, None], query, query)
    found = pe.functional.rotary(query, spec=spec, layout="bhsd")
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_llama4_vision_tower() -> None:
    config, code = config_and_code("llama4_vision_model", "llama4")
    spec = pe.RotarySpec.from_huggingface(config)
    side = config.image_size // config.patch_size
    patches = side * side
    query = torch.randn(1, patches + 1, 2, spec.head_dim)
    expected, _ = code.vision_apply_rotary_emb(query, query, code.Llama4VisionRotaryEmbedding(config)(query))
    class_token = torch.zeros(2, 1, dtype=torch.int64)
    positions = torch.cat([grid(side, side) + 1, class_token], 1).unsqueeze(1)
    found = pe.functional.rotary(query, positions=positions, spec=spec)
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_clvp_encoder_rotates_values_too() -> None:
    config, code = config_and_code("clvp_encoder", "clvp")
    spec = pe.RotarySpec.from_huggingface(config)
    query = torch.randn(1, 2, TOKENS, spec.head_dim)
    angles = code.ClvpRotaryPositionalEmbedding(config)(query[:, 0])
    window = query[..., : spec.rotary_dim]
    cosine, sine = angles.cos()[0], angles.sin()[0]
    places = torch.arange(TOKENS).unsqueeze(0)
    for expected in code.apply_rotary_pos_emb(window, window, window, cosine, sine, places):
        found = pe.functional.rotary(query, spec=spec, layout="bhsd")[..., : spec.rotary_dim]
        assert torch.allclose(found, expected, atol=TOLERANCE)
    config.use_rotary_embedding = False
    assert pe.RotarySpec.from_huggingface(config).rotary_dim == 0


@pytest.mark.parametrize("model_type", having("grid", "normalised"))
@pytest.mark.parametrize("image_size", [96, [96, 160]], ids=str)
def test_scores_of_normalised_grids(model_type: str, image_size: Any) -> None:
    """Attention scores of patches and of the tokens before them, for one image size."""
    config, code = config_and_code(model_type)
    config.image_size = image_size
    spec = pe.RotarySpec.from_huggingface(config)
    rows, columns = (
        size // config.patch_size for size in ([image_size, image_size] if isinstance(image_size, int) else image_size)
    )
    rotary = next(
        value for name, value in vars(code).items() if name.endswith(("RopePositionEmbedding", "RotaryEmbedding"))
    )(config).eval()
    prefix = 5
    query, key = torch.randn(2, 1, 2, prefix + rows * columns, spec.head_dim)
    angles = rotary(torch.zeros(1, 3, rows * config.patch_size, columns * config.patch_size))
    theirs_query, theirs_key = code.apply_rotary_pos_emb(query, key, *angles)
    middle = torch.tensor([[rows], [columns]]).expand(2, prefix)
    positions = torch.cat([middle, 2 * grid(rows, columns) + 1], 1).unsqueeze(1)
    ours_query, ours_key = pe.functional.rotary(query, key, positions, spec=spec, layout="bhsd")
    expected = theirs_query @ theirs_key.transpose(-1, -2)
    assert torch.allclose(ours_query @ ours_key.transpose(-1, -2), expected, atol=1e-4)
    assert not torch.allclose(query @ key.transpose(-1, -2), expected, atol=1.0)


def test_efficientloftr_rotates_all_heads_as_one() -> None:
    config, code = config_and_code("efficientloftr")
    spec = pe.RotarySpec.from_huggingface(config)
    stride, (rows, columns) = config.q_aggregation_stride, (3, 5)
    features = torch.zeros(1, config.hidden_size, rows * stride, columns * stride)
    cosine, sine = code.EfficientLoFTRRotaryEmbedding(config)(features)
    query = torch.randn(1, rows * columns, 1, config.hidden_size)
    expected, _ = code.apply_rotary_pos_emb(query, query, cosine.flatten(1, 2), sine.flatten(1, 2), unsqueeze_dim=2)
    found = pe.functional.rotary(query, positions=grid(rows, columns).unsqueeze(1) + 1, spec=spec)
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_gemma4_vision_tower_pairs_within_axes() -> None:
    """One specification for both axes, or one for each."""
    config, code = config_and_code("gemma4_vision", "gemma4")
    refused((lambda: pe.RotarySpec.from_huggingface(config, "depth"), ValueError, "layer_type: expected None for both axes, 'height' or"))  # fmt: skip
    query = torch.randn(1, TOKENS, 2, pe.RotarySpec.from_huggingface(config, "height").head_dim)
    places = torch.randint(0, 50, (1, TOKENS, 2))
    angles = code.Gemma4VisionRotaryEmbedding(config)(query, places)
    expected = code.apply_multidimensional_rope(query, *angles, places)
    found = query
    for axis, layer_type in enumerate(("height", "width")):
        spec = pe.RotarySpec.from_huggingface(config, layer_type)
        found = pe.functional.rotary(found, positions=places[..., axis].contiguous(), spec=spec)
    assert torch.allclose(found, expected, atol=TOLERANCE)
    both = pe.RotarySpec.from_huggingface(config)
    assert torch.equal(pe.functional.rotary(query, positions=places.movedim(-1, 0), spec=both), found)
    assert pe.RotarySpec.for_layers(config) == [both] * config.num_hidden_layers


def test_learned_frequencies_of_mistral_large_4() -> None:
    config, code = config_and_code("mistral_large4_text", "mistral_large4")
    refused((lambda: pe.RotarySpec.from_huggingface(config), ValueError, "rotary_emb.alpha: missing: frequencies are learned"))  # fmt: skip
    rotary = code.MistralLarge4TextRotaryEmbedding(config)
    alpha = torch.randn(rotary.alpha.shape) / 4
    rotary.alpha.copy_(alpha)
    fields = {**config.to_dict(), "rotary_emb.alpha": alpha.tolist()}
    spec = pe.RotarySpec.from_huggingface(fields)
    query = torch.randn(1, 2, TOKENS, spec.head_dim)
    positions = torch.randint(0, 50, (1, TOKENS))
    expected, _ = code.apply_rotary_pos_emb_interleave(query, None, *rotary(query, positions))
    found = pe.functional.rotary(query, None, positions, spec=spec, layout="bhsd")
    in_their_order = torch.cat((found[..., 0::2], found[..., 1::2]), -1)
    assert torch.allclose(in_their_order, expected, atol=TOLERANCE)


@pytest.mark.parametrize("model_type", having("unrotated"))
def test_models_without_rotation(model_type: str) -> None:
    config, code = config_and_code(model_type, model_type.removesuffix("_text"))
    assert not [name for name in vars(code) if "Rotary" in name and "Vision" not in name]
    spec = pe.RotarySpec.from_huggingface(config)
    assert (spec.head_dim, spec.rotary_dim) == (config.qk_head_dim, 0)


@pytest.mark.parametrize("model_type", having("refused"))
def test_refusals_say_why(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"model_type '{model_type}': "):
        pe.RotarySpec.from_huggingface(transformers.CONFIG_MAPPING[model_type]())


def test_parts_of_a_composite_model() -> None:
    config = transformers.CONFIG_MAPPING["blt"]().to_dict()
    part = pe.RotarySpec.from_huggingface(config, part="global_config")
    assert part == pe.RotarySpec.from_huggingface(config["global_config"])
    both = transformers.CONFIG_MAPPING["qwen2_vl"]().to_dict()
    tower = pe.RotarySpec.from_huggingface(both, part="vision_config")
    assert tower != pe.RotarySpec.from_huggingface(both)
    refused((lambda: pe.RotarySpec.from_huggingface(both, part="tower"), ValueError, "part: expected one of"))  # fmt: skip
