"""Tests converted weights of real models' attention: scores equal those of the model's code."""

import importlib
from typing import Any

import posembed as pe
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

TOKENS = 9
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
    "pad_token_id": None,
}
ATTENTION = {"llama": "LlamaAttention", "qwen3": "Qwen3Attention", "glm": "GlmAttention", "phi3": "Phi3Attention", "gpt_neox": "GPTNeoXAttention"}  # fmt: skip


def attention_of(model_type: str, **options: Any) -> tuple[Any, nn.Module, Any]:
    """Configuration, a random layer in float64, and the module with the model's functions."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**{**SMALL, **options})
    config._attn_implementation = "eager"
    code = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    layer = getattr(code, ATTENTION[model_type])(config, layer_idx=0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return config, layer, code


def heads_of(config: Any, layer: nn.Module, hidden: Tensor, spec: pe.RotarySpec) -> list[Tensor]:
    """Query and key [1, heads, tokens, head_dim] before rotation, with the layer's own weights."""
    shape = (1, TOKENS, -1, spec.head_dim)
    if hasattr(layer, "query_key_value"):  # each head has query, key and value in turn
        packed = layer.query_key_value(hidden).view(1, TOKENS, -1, 3 * spec.head_dim)
        parts = list(packed.chunk(3, dim=-1)[:2])
    elif hasattr(layer, "qkv_proj"):
        sizes = [n * spec.head_dim for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        parts = [part.view(shape) for part in layer.qkv_proj(hidden).split(sizes, -1)[:2]]
    else:
        parts = [layer.q_proj(hidden).view(shape), layer.k_proj(hidden).view(shape)]
    if hasattr(layer, "q_norm"):
        parts = [layer.q_norm(parts[0]), layer.k_norm(parts[1])]
    return [part.transpose(1, 2) for part in parts]


def scores(query: Tensor, key: Tensor) -> Tensor:
    """Scores with key heads shared by query heads."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return query @ key.transpose(-1, -2)


def permute_projections(config: Any, layer: nn.Module, **options: Any) -> None:
    """Permutes every weight of the layer that makes components of queries and keys."""
    heads, key_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    jobs: list[tuple[nn.Parameter, int, Any]] = []
    for name, parameter in layer.named_parameters():
        module = name.split(".")[0]
        if module == "query_key_value":
            places = [3 * head + part for head in range(heads) for part in (0, 1)]
            jobs.append((parameter, 3 * heads, places))
        elif module == "qkv_proj":
            jobs.append((parameter, heads + 2 * key_heads, range(heads + key_heads)))
        elif module in ("q_proj", "k_proj"):
            jobs.append((parameter, heads if module == "q_proj" else key_heads, None))
        elif module in ("q_norm", "k_norm"):
            jobs.append((parameter, 1, None))
    assert jobs
    for parameter, count, places in jobs:
        parameter.copy_(pe.permute_rotary_weight(parameter, count, heads=places, **options))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen3", {"head_dim": 32}),
        ("gpt_neox", {"rotary_pct": 0.25}),
        ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
        ("phi3", {"head_dim": 16}),
    ],
    ids=["grouped queries, biases", "norms", "packed by head", "partial, interleaved", "packed"],
)
@torch.no_grad()
def test_scores_stay(model_type: str, options: dict[str, Any]) -> None:
    config, layer, code = attention_of(model_type, **options)
    spec = pe.RotarySpec.from_huggingface(config)
    hidden = torch.randn(1, TOKENS, config.hidden_size, dtype=torch.float64)
    rotary = next(v for n, v in vars(code).items() if n.endswith("RotaryEmbedding"))(config)
    angles = rotary(hidden, torch.arange(TOKENS).unsqueeze(0))
    query, key = heads_of(config, layer, hidden, spec)
    expected = scores(*code.apply_rotary_pos_emb(query, key, *angles))

    other = "half_split" if spec.interleaved else "interleaved"
    permute_projections(config, layer, to=other, rotary_dim=spec.rotary_dim)
    converted = pe.RotarySpec(
        spec.head_dim, base=spec.base, rotary_dim=spec.rotary_dim, interleaved=not spec.interleaved
    )
    query, key = heads_of(config, layer, hidden, spec)
    found = scores(*pe.functional.rotary(query, key, spec=converted, layout="bhsd"))
    # The model's angles are float32; scores are sums of some hundreds.
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6
    wrong = scores(*pe.functional.rotary(query, key, spec=spec, layout="bhsd"))
    assert float((wrong - expected).abs().max() / expected.abs().max()) > 1e-2
