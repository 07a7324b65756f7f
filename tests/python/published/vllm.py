"""Families whose code is in their own repositories and in vLLM, not in transformers.

What vLLM's code of a family says of layers (the sources are in models.json), for the sizes of a
published model or smaller ones.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Turn:
    """A layer's rotation: of the first ``width`` components of a head, by angles in float64."""

    head: int
    width: int
    base: float = 1e4
    interleaved: bool = False
    divisors: tuple[float, ...] = (1.0,)
    factor: float = 1.0

    def __call__(self, query: Tensor, position: int) -> Tensor:
        """query: [head]."""
        half = self.width // 2
        divisors = torch.tensor(self.divisors, dtype=torch.float64).expand(half)
        pair = torch.arange(half, dtype=torch.float64)
        angle = position * self.base ** (-2 * pair / self.width) / divisors
        window = query[: self.width] * self.factor
        grid = window.view(half, 2).T if self.interleaved else window.view(2, half)
        cosine, sine = angle.cos(), angle.sin()
        first, second = grid
        turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine])
        flat = turned.T.reshape(-1) if self.interleaved else turned.reshape(-1)
        return torch.cat([flat, query[self.width :]])


def llama(width: int, heads: int, **more: Any) -> dict[str, Any]:
    """The keys of most files."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 8}
    return {**sizes, "max_position_embeddings": 4096, **more}


SHORT = tuple(1 + i / 16 for i in range(48))
LONG = {"type": "longrope", "short_factor": SHORT, "long_factor": [2.0 * x for x in SHORT]}
LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512, "v_head_dim": 128}
LATENT_TURN = Turn(64, 64, 1e4, interleaved=True)
MIMO = {
    **llama(6144, 128, head_dim=192, swa_head_dim=192, rope_theta=1e7, swa_rope_theta=1e4),
    "partial_rotary_factor": 0.334, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1],
}  # fmt: skip
MINIMAX = {
    **llama(6144, 64, head_dim=128, rotary_dim=64, rope_theta=1e7),
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1],
}  # fmt: skip
PLAMO3 = {
    **llama(2048, 16, head_dim=128, rope_theta=1e6, rope_local_theta=1e4),
    "sliding_window_pattern": 4, "num_hidden_layers": 9,
}  # fmt: skip
# A type, its keys, and the rotations of some of its layers.
FAMILIES: list[tuple[str, dict[str, Any], dict[int, Turn | None]]] = [
    ("PanguEmbedded", llama(4096, 32, rope_theta=1.6e7), {0: Turn(128, 128, 1.6e7)}),
    ("TeleFLM", llama(8192, 64, rope_theta=1e4), {1: Turn(128, 128)}),
    ("aquila", llama(4096, 32), {1: Turn(128, 128)}),
    ("arctic", llama(7168, 56, rope_theta=1e4), {2: Turn(128, 128)}),
    ("baichuan", llama(4096, 32), {0: Turn(128, 128), 7: Turn(128, 128)}),
    ("baichuan", llama(5120, 40), {0: None, 7: None}),
    ("bailing_moe", llama(2048, 16, head_dim=128, rope_theta=6e5), {0: Turn(128, 128, 6e5)}),
    ("bailing_moe_v2", llama(2048, 16, head_dim=128, rope_theta=6e5, partial_rotary_factor=0.5, rotary_dim=64), {0: Turn(128, 64, 6e5), 7: Turn(128, 64, 6e5)}),
    (
        "chatglm",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 28, "kv_channels": 128, "original_rope": True, "seq_length": 8192},
        {0: Turn(128, 64, interleaved=True), 27: Turn(128, 64, interleaved=True)},
    ),
    ("chatglm", {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 2, "kv_channels": 128, "original_rope": False}, {0: Turn(128, 64)}),
    ("deepseek", llama(2048, 16, rope_theta=1e4), {0: Turn(128, 128)}),
    (
        "dory",
        {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}},
        {0: Turn(256, 256), 1: None, 6: Turn(256, 128, 1e6), 70: Turn(256, 128, 1e6), 71: None},
    ),
    ("dots_ocr", llama(1536, 12, rope_theta=1e6, vision_config={"embed_dim": 1536}), {0: Turn(128, 128, 1e6)}),
    ("exaone", {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 32, "head_dim": 128, "rope_theta": 5e5, "rope_scaling": None}, {0: Turn(128, 128, 5e5), 31: Turn(128, 128, 5e5)}),
    ("grok-1", llama(6144, 48), {0: Turn(128, 128)}),
    ("internlm", llama(4096, 32), {0: Turn(128, 128)}),
    ("internlm2", llama(4096, 32, rope_theta=1e6, rope_scaling=None), {0: Turn(128, 128, 1e6)}),
    ("iquestloopcoder", llama(5120, 40, head_dim=128, rope_theta=5e5), {3: Turn(128, 128, 5e5)}),
    ("kimi_k2", llama(7168, 64, rope_theta=5e4, **LATENT), {0: Turn(64, 64, 5e4, interleaved=True)}),
    ("mimo", llama(4096, 32, rope_theta=6.4e5), {0: Turn(128, 128, 6.4e5)}),
    ("mimo_v2", MIMO, {0: Turn(192, 64, 1e7), 1: Turn(192, 64), 5: Turn(192, 64, 1e7)}),
    ("minicpm", llama(2304, 36, rope_theta=1e4), {0: Turn(64, 64)}),
    ("minimax_m1", MINIMAX, {0: None, 7: Turn(128, 64, 1e7)}),
    ("minimax_text_01", MINIMAX, {0: None, 6: None, 7: Turn(128, 64, 1e7)}),
    ("molmo", llama(3584, 28, rope_theta=1e6, use_position_ids=True), {0: Turn(128, 128, 1e6)}),
    ("nemotron-nas", llama(8192, 64, rope_theta=5e5), {0: Turn(128, 128, 5e5)}),
    ("new", llama(768, 12, rope_theta=5e5, position_embedding_type="rope"), {0: Turn(64, 64, 5e5)}),
    ("orion", llama(5120, 40, rope_theta=1e4), {0: Turn(128, 128)}),
    ("ouro", llama(2048, 16, head_dim=128, rope_theta=1e6), {0: Turn(128, 128, 1e6)}),
    ("pangu_ultra_moe", llama(7680, 128, rope_theta=1e4, **LATENT), {0: LATENT_TURN}),
    ("phi3_v", llama(3072, 32, rope_theta=1e4, original_max_position_embeddings=4096, rope_scaling={**LONG, "type": "su"}), {0: Turn(96, 96, divisors=SHORT)}),
    (
        "phi4mm",
        {**llama(3072, 24, rope_theta=1e4, original_max_position_embeddings=4096, rope_scaling=LONG), "partial_rotary_factor": 0.75, "max_position_embeddings": 131072},
        {0: Turn(128, 96, divisors=SHORT, factor=math.sqrt(1 + math.log(32) / math.log(4096)))},
    ),
    ("plamo2", llama(2048, 16, hidden_size_per_head=128, mamba_step=2), {0: None, 1: Turn(128, 128), 6: None, 7: Turn(128, 128)}),
    ("plamo3", PLAMO3, {0: Turn(128, 128), 3: Turn(128, 128, 1e6), 8: Turn(128, 128)}),
    ("sarvam_mla", llama(4096, 64, rope_theta=1e4, **LATENT), {0: LATENT_TURN}),
    ("sarvam_moe", llama(4096, 64, head_dim=64, rope_theta=8e6), {0: Turn(64, 64, 8e6)}),
    ("solar", llama(5120, 40, rope_theta=1e4), {0: Turn(128, 128)}),
    ("stablelm_epoch", llama(2560, 32, rope_pct=0.25, rope_theta=1e4), {0: Turn(80, 20)}),
    ("step3_text", {"hidden_size": 7168, "num_attention_heads": 64, "num_hidden_layers": 61, "max_position_embedding": 65536}, {0: Turn(256, 256, 5e5), 60: Turn(256, 256, 5e5)}),
    ("telechat3", llama(6144, 48, rope_theta=1e6), {0: Turn(128, 128, 1e6)}),
    ("xverse", llama(4096, 32), {0: Turn(128, 128)}),
]  # fmt: skip
