"""Small models of transformers with random weights, one for each way of rotating."""

from typing import Any

import torch
from torch import nn

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# The name of the model class, that of its configuration, and what differs from COMMON.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 16, "sliding_window": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {"rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {"rotary_dim": 4}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**LATENT, "topk_method": "greedy", "routed_scaling_factor": 1.0}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", {}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {}),
    "glm": ("GlmForCausalLM", "GlmConfig", {"head_dim": 8}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {"cls_token_id": 1, "sep_token_id": 2}),
    "roformer": ("RoFormerForMaskedLM", "RoFormerConfig", {}),
    "esm": ("EsmForMaskedLM", "EsmConfig", {"position_embedding_type": "rotary"}),
}  # fmt: skip
CAUSAL = [name for name, (cls, *_) in MODELS.items() if cls.endswith("CausalLM")]


def small_model(name: str, **options: Any) -> Any:
    """A model in evaluation mode, the same weights every time."""
    import transformers

    cls, config, differences = MODELS[name]
    torch.manual_seed(11)
    values = {**COMMON, **differences, **options}
    if name == "gptj" or name == "codegen":
        values = {**values, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            values.pop(key)
    return getattr(transformers, cls)(getattr(transformers, config)(**values)).eval()


def vision_tower() -> nn.Module:
    """The vision tower of Qwen2-VL."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    torch.manual_seed(11)
    config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4)
    return Qwen2VisionTransformerPretrainedModel(config).eval()


def ids(batch: int = 2, tokens: int = 7) -> torch.Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(5))
