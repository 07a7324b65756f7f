"""params.json files of Meta's and Mistral's own releases."""

from typing import Any

import posembed as pe
from published.row import Right, Row

Spec = pe.RotarySpec
META = "Meta's llama-models, its model.py"
MISTRAL = "mistral-inference, rope.py; vLLM's reader of Mistral's format"


def meta(file: str, sizes: tuple[int, int, int], right: Right, **says: Any) -> Row:
    """Sizes are dim, n_heads and n_layers."""
    arguments = says.pop("arguments", {})
    fields = dict(zip(("dim", "n_heads", "n_layers"), sizes, strict=True))
    common = {"multiple_of": 256, "norm_eps": 1e-5, "vocab_size": -1}
    return Row(f"{file}/params.json", {**common, **fields, **says}, right, META, arguments)


def mistral(file: str, sizes: tuple[int, int, int], right: Right, **says: Any) -> Row:
    """Sizes are dim, n_heads and n_layers."""
    arguments = says.pop("arguments", {})
    fields = dict(zip(("dim", "n_heads", "n_layers"), sizes, strict=True))
    common = {"head_dim": 128, "n_kv_heads": 8, "norm_eps": 1e-5, "vocab_size": 32000}
    return Row(f"{file}/params.json", {**common, **fields, **says}, right, MISTRAL, arguments)


PLAIN = Spec(128, interleaved=True)
LLAMA31 = Spec(128, base=5e5, interleaved=True, scaling=pe.Llama3Scaling(8, 1, 4, 8192))
UNSAID = {"arguments": {"base": 10000.0}}
ROWS = [
    meta("llama-7B", (4096, 32, 32), PLAIN, **UNSAID),
    meta("llama-2-70b", (8192, 64, 80), PLAIN, n_kv_heads=8, ffn_dim_multiplier=1.3, **UNSAID),
    meta("Meta-Llama-3-8B", (4096, 32, 32), Spec(128, base=5e5, interleaved=True), n_kv_heads=8, rope_theta=5e5, ffn_dim_multiplier=1.3),
    meta("Meta-Llama-3.1-8B", (4096, 32, 32), LLAMA31, n_kv_heads=8, rope_theta=5e5, use_scaled_rope=True),
    meta("Meta-Llama-3.1-70B", (8192, 64, 80), LLAMA31, n_kv_heads=8, rope_theta=5e5, use_scaled_rope=True),
    meta("Meta-Llama-3.1-405B", (16384, 128, 126), LLAMA31, n_kv_heads=8, rope_theta=5e5, use_scaled_rope=True),
    meta("Llama-3.2-1B", (2048, 32, 16), Spec(64, base=5e5, interleaved=True, scaling=pe.Llama3Scaling(32, 1, 4, 8192)), n_kv_heads=8, rope_theta=5e5, use_scaled_rope=True),
    meta("Llama-3.2-3B", (3072, 24, 28), Spec(128, base=5e5, interleaved=True, scaling=pe.Llama3Scaling(32, 1, 4, 8192)), n_kv_heads=8, rope_theta=5e5, use_scaled_rope=True),
    mistral("Mistral-7B-v0.1", (4096, 32, 32), PLAIN, hidden_dim=14336, sliding_window=4096, **UNSAID),
    mistral("Mistral-7B-v0.3", (4096, 32, 32), Spec(128, base=1e6, interleaved=True), hidden_dim=14336, rope_theta=1e6),
    mistral("Mixtral-8x7B-v0.1", (4096, 32, 32), Spec(128, base=1e6, interleaved=True), rope_theta=1e6, moe={"num_experts_per_tok": 2, "num_experts": 8}),
    mistral(
        "Ministral-3-3B-Base-2512", (3072, 32, 26),
        Spec(128, base=1e6, interleaved=True, scaling=pe.YarnScaling(16, 16384, attention_factor=1.0)),
        rope_theta=1e6, tied_embeddings=True,
        yarn={"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 1},
        llama_4_scaling={"original_max_position_embeddings": 16384, "beta": 0.1},
    ),
    mistral(
        "Mistral-Large-3-675B-Instruct-2512", (7168, 128, 61),
        Spec(64, base=1e4, interleaved=True, scaling=pe.YarnScaling(36, 8192, attention_factor=1.0)),
        rope_theta=1e4, model_type="transformer", q_lora_rank=1536, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        yarn={"original_max_position_embeddings": 8192, "factor": 36, "apply_scale": False, "beta": 32, "alpha": 1},
        llama_4_scaling={"original_max_position_embeddings": 8192, "beta": 0.1},
    ),
]  # fmt: skip
