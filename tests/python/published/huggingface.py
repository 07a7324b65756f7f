"""config.json files in the form of published ones; right answers by the models' own code.

Not every number was compared with the file that a row names.

Rows of one family share a helper, which has what its files have in common.
"""

from typing import Any

import posembed as pe
from published.row import FULL, SLIDING, Right, Row, every

Spec = pe.RotarySpec
# Keys of nearly every file.
ALWAYS: dict[str, Any] = {
    "architectures": ["AModelForCausalLM"],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}
LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def row(
    file: str,
    model_type: str,
    sizes: tuple[int, int, int],
    right: Right,
    *,
    layers: tuple[str, ...] = (),
    arguments: dict[str, Any] | None = None,
    source: str = "",
    **says: Any,
) -> Row:
    """A row; sizes are hidden_size, num_attention_heads and num_hidden_layers."""
    keys = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    fields = {**ALWAYS, "model_type": model_type, **dict(zip(keys, sizes, strict=True)), **says}
    source = source or f"transformers, modeling_{model_type}.py"
    return Row(f"{file}/config.json", fields, right, source, arguments or {}, layers)


def composite(file: str, model_type: str, right: Right, *, part: str | None = None, **says: Any) -> Row:
    """A row of a model made of several."""
    layers = says.pop("layers", ())
    arguments = {} if part is None else {"part": part}
    source = f"transformers, modeling_{model_type}.py"
    name = f"{file}/config.json" + (f" {part}" if part else "")
    return Row(name, {**ALWAYS, "model_type": model_type, **says}, right, source, arguments, layers)


def llama31(factor: float, head_dim: int = 128) -> Spec:
    return Spec(head_dim, base=5e5, scaling=pe.Llama3Scaling(factor, 1, 4, 8192))


LLAMA = [
    row("huggyllama/llama-7b", "llama", (4096, 32, 32), Spec(128), max_position_embeddings=2048),
    row("meta-llama/Llama-2-7b-hf", "llama", (4096, 32, 32), Spec(128), rope_scaling=None),
    row("meta-llama/Llama-2-70b-hf", "llama", (8192, 64, 80), Spec(128), num_key_value_heads=8),
    row("codellama/CodeLlama-7b-hf", "llama", (4096, 32, 32), Spec(128, base=1e6), rope_theta=1e6),
    *(
        row(
            f"meta-llama/{name}", "llama", sizes, llama31(factor, head_dim), head_dim=head_dim,
            rope_theta=5e5, rope_scaling={**LLAMA31, "factor": factor},
            max_position_embeddings=131072,
        )
        for name, sizes, head_dim, factor in (
            ("Llama-3.1-8B", (4096, 32, 32), 128, 8.0),
            ("Llama-3.2-1B", (2048, 32, 16), 64, 32.0),
        )
    ),
    row("deepseek-ai/deepseek-coder-6.7b-base", "llama", (4096, 32, 32), Spec(128, base=1e5, scaling=pe.LinearScaling(4)), rope_theta=100000, rope_scaling={"factor": 4.0, "type": "linear"}),
    *(
        row(
            f"NousResearch/Yarn-Llama-2-7b-{name}", "llama", (4096, 32, 32),
            Spec(128, scaling=pe.YarnScaling(factor, 4096)),
            rope_scaling={"factor": factor, "original_max_position_embeddings": 4096,
                          "type": "yarn", "finetuned": True},
        )
        for name, factor in (("64k", 16.0), ("128k", 32.0))
    ),
    row(
        "HuggingFaceTB/SmolLM3-3B", "smollm3", (2048, 16, 36), Spec(128, base=5e6), rope_theta=5e6,
        no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, layer_types=[FULL] * 36,
        max_window_layers=28, use_sliding_window=False, layers=every(4, 36, "no", FULL),
    ),
    row("tiiuae/Falcon3-7B-Base", "llama", (3072, 12, 28), Spec(256, base=1000042), head_dim=256, rope_theta=1000042),
    row("microsoft/bitnet-b1.58-2B-4T", "bitnet", (2560, 20, 30), Spec(128, base=5e5), rope_theta=5e5),
    row("swiss-ai/Apertus-8B-2509", "apertus", (4096, 32, 32), Spec(128, base=12e6, scaling=pe.Llama3Scaling(8, 1, 4, 8192)), rope_theta=12000000, rope_scaling=LLAMA31, max_position_embeddings=65536),
]  # fmt: skip

MISTRAL = [
    row("mistralai/Mistral-7B-v0.1", "mistral", (4096, 32, 32), Spec(128), rope_theta=1e4, sliding_window=4096),
    row("mistralai/Mistral-7B-Instruct-v0.2", "mistral", (4096, 32, 32), Spec(128, base=1e6), rope_theta=1e6, sliding_window=None),
    row("mistralai/Mistral-Nemo-Base-2407", "mistral", (5120, 32, 40), Spec(128, base=1e6), head_dim=128, rope_theta=1e6),
    row("mistralai/Mixtral-8x7B-v0.1", "mixtral", (4096, 32, 32), Spec(128, base=1e6), rope_theta=1e6, num_local_experts=8),
]  # fmt: skip

YARN4 = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
VL = {"type": "mrope", "mrope_section": [16, 24, 24]}
VL_TEXT = pe.Sections((16, 24, 24))
TOWER = Spec(80, sections=pe.Sections((20, 20), restart=True))
QWEN2_VL_TOWER = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14}
IN_TURNS = pe.Sections((24, 20, 20), interleaved=True)
QWEN = [
    row(
        "Qwen/Qwen-7B", "qwen", (4096, 32, 32), Spec(128, scaling=pe.DynamicNtkScaling(2, 8192)),
        source="its modeling_qwen.py: a base that grows where the length doubles",
        kv_channels=128, rotary_emb_base=10000, rotary_pct=1.0, seq_length=8192,
        max_position_embeddings=32768, use_dynamic_ntk=True, use_logn_attn=True,
        use_flash_attn="auto", no_bias=True,
    ),
    row("Qwen/Qwen1.5-0.5B", "qwen2", (1024, 16, 24), Spec(64, base=1e6), rope_theta=1e6, use_sliding_window=False),
    row("Qwen/Qwen1.5-7B", "qwen2", (4096, 32, 32), Spec(128, base=1e6), rope_theta=1e6, max_window_layers=28),
    row("Qwen/Qwen1.5-MoE-A2.7B", "qwen2_moe", (2048, 16, 24), Spec(128, base=1e6), rope_theta=1e6),
    row("Qwen/Qwen2-7B", "qwen2", (3584, 28, 28), Spec(128, base=1e6), rope_theta=1e6),
    row(
        "Qwen/Qwen2.5-7B-Instruct, with the YaRN of its model card", "qwen2", (3584, 28, 28),
        Spec(128, base=1e6, scaling=pe.YarnScaling(4, 32768)), rope_theta=1e6, rope_scaling=YARN4,
        max_position_embeddings=32768,
    ),
    row(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", (2048, 16, 48),
        Spec(256, base=1e7, rotary_dim=64), head_dim=256, partial_rotary_factor=0.25, rope_theta=1e7,
        full_attention_interval=4, layers=every(4, 48, FULL, "no"),
    ),
    composite(
        "Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", Spec(128, base=1e6, sections=VL_TEXT),
        hidden_size=3584, num_attention_heads=28, num_hidden_layers=28, rope_theta=1e6,
        rope_scaling=VL, vision_config={**QWEN2_VL_TOWER, "hidden_size": 3584},
    ),
    composite(
        "Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", TOWER, part="vision_config",
        hidden_size=3584, num_attention_heads=28, num_hidden_layers=28, rope_theta=1e6,
        rope_scaling=VL, vision_config={**QWEN2_VL_TOWER, "hidden_size": 3584},
    ),
    composite(
        "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", Spec(128, base=1e6, sections=VL_TEXT),
        hidden_size=3584, num_attention_heads=28, num_hidden_layers=28, rope_theta=1e6,
        rope_scaling=VL, vision_config={"depth": 32, "hidden_size": 1280, "num_heads": 16},
    ),
    composite(
        "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", TOWER, part="vision_config",
        hidden_size=3584, num_attention_heads=28, num_hidden_layers=28, rope_theta=1e6,
        rope_scaling=VL, vision_config={"depth": 32, "hidden_size": 1280, "num_heads": 16},
    ),
    composite(
        "Qwen/Qwen3-Omni-30B-A3B-Instruct", "qwen3_omni_moe", Spec(128, base=1e6, sections=IN_TURNS),
        thinker_config={
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {
                "model_type": "qwen3_omni_moe_text", "hidden_size": 2048, "num_attention_heads": 32,
                "num_hidden_layers": 48, "head_dim": 128, "rope_theta": 1000000,
                "rope_scaling": {"interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                 "rope_type": "default", "type": "default"},
            },
        },
    ),
]  # fmt: skip

LOCAL = Spec(256)
GEMMA = [
    row("google/gemma-2b", "gemma", (2048, 8, 18), Spec(256), head_dim=256, rope_theta=1e4),
    row("google/gemma-2-2b", "gemma2", (2304, 8, 26), Spec(256), head_dim=256, rope_theta=1e4, sliding_window=4096),
    row("google/gemma-2-27b", "gemma2", (4608, 32, 46), Spec(128), head_dim=128, rope_theta=1e4, sliding_window=4096),
    row(
        "google/gemma-3-1b-it", "gemma3_text", (1152, 4, 26), {FULL: Spec(256, base=1e6), SLIDING: LOCAL},
        head_dim=256, rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None,
        sliding_window=512, sliding_window_pattern=6, layers=every(6, 26),
    ),
    *(
        composite(
            f"google/gemma-3-{name}-it", "gemma3",
            {FULL: Spec(head_dim, base=1e6, scaling=pe.LinearScaling(8)), SLIDING: Spec(head_dim)},
            text_config={"model_type": "gemma3_text", "sliding_window": 1024,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, **says},
            layers=every(6, says["num_hidden_layers"]),
        )
        for name, head_dim, says in (
            ("4b", 256, {"hidden_size": 2560, "num_hidden_layers": 34}),
            ("27b", 128, {"hidden_size": 5376, "num_attention_heads": 32, "num_hidden_layers": 62,
                          "head_dim": 128}),
        )
    ),
    composite(
        "google/paligemma-3b-pt-224", "paligemma", Spec(256),
        text_config={"model_type": "gemma", "hidden_size": 2048, "num_attention_heads": 8,
                     "num_hidden_layers": 18, "intermediate_size": 16384},
    ),
]  # fmt: skip

PHI_AND_NEOX = [
    row("microsoft/phi-1_5", "phi", (2048, 32, 24), Spec(64, rotary_dim=32), partial_rotary_factor=0.5, rope_theta=1e4),
    row("microsoft/phi-2", "phi", (2560, 32, 32), Spec(80, rotary_dim=32), partial_rotary_factor=0.4, rope_theta=1e4),
    row("microsoft/Phi-3-mini-4k-instruct", "phi3", (3072, 32, 32), Spec(96), rope_theta=1e4, rope_scaling=None),
    row("microsoft/phi-4", "phi3", (5120, 40, 40), Spec(128, base=2.5e5), rope_theta=250000, rope_scaling=None),
    *(
        row(
            f"EleutherAI/pythia-{name}", "gpt_neox", sizes, Spec(head_dim, rotary_dim=head_dim // 4),
            rotary_pct=0.25, rotary_emb_base=10000, use_parallel_residual=True,
        )
        for name, sizes, head_dim in (
            ("70m", (512, 8, 6), 64),
            ("1b", (2048, 8, 16), 256),
            ("2.8b", (2560, 32, 32), 80),
        )
    ),
    row("EleutherAI/gpt-neox-20b", "gpt_neox", (6144, 64, 44), Spec(96, rotary_dim=24), rotary_pct=0.25, rotary_emb_base=10000),
    row("togethercomputer/RedPajama-INCITE-Base-3B-v1", "gpt_neox", (2560, 32, 32), Spec(80), rotary_pct=1.0, rotary_emb_base=10000),
    Row(
        "EleutherAI/gpt-j-6b/config.json",
        {**ALWAYS, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048,
         "rotary": True, "rotary_dim": 64},
        Spec(256, rotary_dim=64, interleaved=True), "transformers, modeling_gptj.py",
    ),
    *(
        Row(
            f"Salesforce/codegen-{name}-mono/config.json",
            {**ALWAYS, "model_type": "codegen", "n_embd": width, "n_head": heads, "n_layer": layers,
             "rotary_dim": rotary_dim},
            Spec(width // heads, rotary_dim=rotary_dim, interleaved=True), "transformers, modeling_codegen.py",
        )
        for name, width, heads, layers, rotary_dim in (
            ("350M", 1024, 16, 20, 32), ("2B", 2560, 32, 32, 64), ("16B", 6144, 24, 34, 64),
        )
    ),
    row("stabilityai/stablelm-3b-4e1t", "stablelm", (2560, 32, 32), Spec(80, rotary_dim=20), partial_rotary_factor=0.25, rope_theta=10000),
    row("adept/persimmon-8b-base", "persimmon", (4096, 64, 36), Spec(64, rotary_dim=32, base=25000), partial_rotary_factor=0.5, rope_theta=25000.0),
]  # fmt: skip

FALCON_AND_OTHERS = [
    row("tiiuae/falcon-7b", "falcon", (4544, 71, 32), Spec(64), alibi=False, multi_query=True, new_decoder_architecture=False),
    row("tiiuae/falcon-40b", "falcon", (8192, 128, 60), Spec(64), alibi=False, new_decoder_architecture=True),
    row("tiiuae/falcon-rw-1b", "falcon", (2048, 32, 24), Spec(64, rotary_dim=0), alibi=True, layers=("no",) * 24),
    row("allenai/OLMo-7B-hf", "olmo", (4096, 32, 32), Spec(128), rope_theta=1e4),
    row("allenai/OLMo-2-1124-7B", "olmo2", (4096, 32, 32), Spec(128, base=5e5), rope_theta=500000),
    row("allenai/OLMoE-1B-7B-0924", "olmoe", (2048, 16, 16), Spec(128), rope_theta=1e4),
    row(
        "allenai/Olmo-3-1025-7B", "olmo3", (4096, 32, 32),
        {FULL: Spec(128, base=5e5, scaling=pe.YarnScaling(8, 8192, attention_factor=1.2079441541679836)),
         SLIDING: Spec(128, base=5e5)},
        rope_theta=500000, max_position_embeddings=65536, sliding_window=4096,
        rope_scaling={"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                      "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        layer_types=list(every(4, 32)), layers=every(4, 32),
    ),
    row("bigcode/starcoder2-3b", "starcoder2", (3072, 24, 30), Spec(128, base=999999.4420358813), rope_theta=999999.4420358813),
    row("bigcode/starcoder2-7b", "starcoder2", (4608, 36, 32), Spec(128, base=1e6), rope_theta=1000000),
    row("CohereLabs/c4ai-command-r-v01", "cohere", (8192, 64, 40), Spec(128, base=8e6, interleaved=True), rope_theta=8000000.0, logit_scale=0.0625),
    *(
        row(
            f"CohereLabs/{name}", "cohere2", sizes, {FULL: None, SLIDING: Spec(128, base=5e4, interleaved=True)},
            head_dim=128, rope_theta=50000, sliding_window=4096, sliding_window_pattern=4,
            rotary_pct=1.0, order_of_interleaved_layers="local_attn_first",
            arguments={"ignore": ["order_of_interleaved_layers"]}, layers=every(4, sizes[2], "no", SLIDING),
        )
        for name, sizes in (
            ("c4ai-command-r7b-12-2024", (4096, 32, 32)), ("c4ai-command-a-03-2025", (12288, 96, 64)),
        )
    ),
    *(
        row(
            f"deepseek-ai/{name}", model_type, sizes, Spec(
                64, interleaved=True, scaling=pe.YarnScaling(40, 4096, mscale=mscale, mscale_all_dim=mscale),
            ),
            rope_theta=10000, max_position_embeddings=163840, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, kv_lora_rank=512,
            rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": mscale,
                          "mscale_all_dim": mscale, "original_max_position_embeddings": 4096, "type": "yarn"},
        )
        for name, model_type, sizes, mscale in (
            ("DeepSeek-V2-Lite", "deepseek_v2", (2048, 16, 27), 0.707),
            ("DeepSeek-V3", "deepseek_v3", (7168, 128, 61), 1.0),
        )
    ),
    row("zai-org/glm-4-9b-hf", "glm", (4096, 32, 40), Spec(128, rotary_dim=64, interleaved=True), head_dim=128, partial_rotary_factor=0.5, rope_theta=10000.0),
    row("zai-org/GLM-4-9B-0414", "glm4", (4096, 32, 40), Spec(128, rotary_dim=64, interleaved=True), head_dim=128, partial_rotary_factor=0.5, rope_theta=10000.0),
    row("zai-org/GLM-4.5-Air", "glm4_moe", (4096, 96, 46), Spec(128, rotary_dim=64, base=1e6), head_dim=128, partial_rotary_factor=0.5, rope_theta=1000000),
    row("ibm-granite/granite-3.0-2b-base", "granite", (2048, 32, 40), Spec(64), rope_theta=10000.0, embedding_multiplier=12.0),
    row("baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", (1024, 16, 18), Spec(128, base=5e5, interleaved=True), head_dim=128, rope_theta=500000.0),
    *(
        composite(
            f"meta-llama/{name}", "llama4", {FULL: None, "chunked_attention": right},
            text_config={"model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40,
                         "num_hidden_layers": 48, "head_dim": 128, "rope_theta": 500000.0, "no_rope_layers": [],
                         "attention_chunk_size": 8192, "rope_scaling": scaling},
            layers=every(4, 48, "no", "chunked_attention"),
        )
        for name, right, scaling in (
            ("Llama-4-Maverick-17B-128E", Spec(128, base=5e5, interleaved=True), None),
            ("Llama-4-Scout-17B-16E", Spec(128, base=5e5, interleaved=True, scaling=pe.Llama3Scaling(16, 1, 1, 8192)),
             {**LLAMA31, "factor": 16.0, "high_freq_factor": 1.0}),
        )
    ),
    row(
        "LGAI-EXAONE/EXAONE-4.0-32B", "exaone4", (5120, 40, 64),
        {FULL: None, SLIDING: Spec(128, base=1e6, scaling=pe.Llama3Scaling(16, 1, 4, 8192))}, head_dim=128,
        rope_theta=1000000, rope_scaling={**LLAMA31, "factor": 16.0}, max_position_embeddings=131072,
        sliding_window=4096, sliding_window_pattern="LLLG", layer_types=list(every(4, 64)),
        layers=every(4, 64, "no", SLIDING),
    ),
    row(
        "ibm-ai-platform/Bamba-9B-v1", "bamba", (4096, 32, 32), Spec(128, rotary_dim=64), rope_theta=10000.0,
        attn_rotary_emb=64, attn_layer_indices=[9, 18, 27], mamba_d_state=128,
        layers=tuple(FULL if place in (9, 18, 27) else "no" for place in range(32)),
    ),
    row(
        "google/recurrentgemma-2b", "recurrent_gemma", (2560, 10, 26), Spec(256, rotary_dim=128), rope_theta=10000.0,
        partial_rotary_factor=0.5, block_types=["recurrent", "recurrent", "attention"],
        layers=every(3, 26, SLIDING, "no"),
    ),
    row(
        "answerdotai/ModernBERT-base", "modernbert", (768, 12, 22),
        {FULL: Spec(64, base=160000), SLIDING: Spec(64)}, global_rope_theta=160000.0, local_rope_theta=10000.0,
        global_attn_every_n_layers=3, local_attention=128,
        layers=tuple(SLIDING if place % 3 else FULL for place in range(22)),
    ),
    *(
        row(f"facebook/esm2_{name}", "esm", sizes, Spec(head_dim), position_embedding_type="rotary")
        for name, sizes, head_dim in (
            ("t6_8M_UR50D", (320, 20, 6), 16), ("t12_35M_UR50D", (480, 20, 12), 24), ("t33_650M_UR50D", (1280, 20, 33), 64),
        )
    ),
    row("junnyu/roformer_chinese_base", "roformer", (768, 12, 12), Spec(64, interleaved=True), embedding_size=768, rotary_value=False),
    composite(
        "llava-hf/llava-1.5-7b-hf", "llava", Spec(128),
        text_config={"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16},
    ),
    row("ByteDance-Seed/Seed-OSS-36B-Base", "seed_oss", (5120, 80, 64), Spec(128, base=1e7), head_dim=128, rope_theta=10000000.0, rope_scaling={"rope_type": "default"}),
    row(
        "stepfun-ai/Step-3.5-Flash", "step3p5", (4096, 64, 45),
        {FULL: Spec(128, base=5e6, rotary_dim=64, scaling=pe.Llama3Scaling(2, 1, 32, 131072)), SLIDING: Spec(128)},
        head_dim=128, rope_theta=[5e6, 1e4, 1e4, 1e4] * 11 + [5e6],
        partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 11 + [0.5], yarn_only_types=[FULL], use_rope_layers=[],
        rope_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                      "original_max_position_embeddings": 131072},
        layer_types=[FULL, SLIDING, SLIDING, SLIDING] * 11 + [FULL], max_position_embeddings=262144,
        layers=(FULL, SLIDING, SLIDING, SLIDING) * 11 + (FULL,),
    ),
    row(
        "LiquidAI/LFM2-1.2B", "lfm2", (2048, 32, 16), Spec(64, base=1e6), rope_theta=1000000.0,
        layer_types=[FULL if place in (2, 5, 8, 10, 12, 14) else "conv" for place in range(16)],
        layers=tuple(FULL if place in (2, 5, 8, 10, 12, 14) else "no" for place in range(16)),
    ),
    Row(
        "databricks/dbrx-instruct/config.json",
        {**ALWAYS, "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
         "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}},
        Spec(128, base=5e5), "transformers 4, modeling_dbrx.py, which reads attn_config",
    ),
]  # fmt: skip

# Text keys beside a tower's, as transformers 4 wrote them.
FLAT = [
    composite("adept/fuyu-8b", "fuyu", Spec(64, rotary_dim=32, base=25000), hidden_size=4096, num_attention_heads=64, num_hidden_layers=36, rope_theta=25000.0),
    *(
        composite(
            "PaddlePaddle/PaddleOCR-VL", "paddleocr_vl", right, part=part, hidden_size=1536,
            num_attention_heads=12, num_hidden_layers=18, head_dim=128, rope_theta=1e6, rope_scaling=VL,
            vision_config={"model_type": "paddleocr_vl", "hidden_size": 1152, "num_attention_heads": 16},
        )
        for part, right in (
            (None, Spec(128, base=1e6, sections=VL_TEXT)),
            ("vision_config", Spec(72, sections=pe.Sections((18, 18), restart=True))),
        )
    ),
    composite(
        "tencent/HunyuanOCR", "hunyuan_vl",
        Spec(128, scaling=pe.NtkScaling(1000), sections=pe.Sections((16, 16, 16, 16))),
        hidden_size=1024, num_attention_heads=16, num_hidden_layers=24, head_dim=128, rope_theta=10000.0,
        rope_scaling={"type": "xdrope", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
                      "mscale": 1.0, "mscale_all_dim": 1.0, "xdrope_section": [16, 16, 16, 16]},
    ),
]  # fmt: skip

ROWS = [*FLAT, *LLAMA, *MISTRAL, *QWEN, *GEMMA, *PHI_AND_NEOX, *FALCON_AND_OTHERS]
