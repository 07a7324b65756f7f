"""Metadata of GGUF files, and the rotation that llama.cpp makes of it."""

from typing import Any

import posembed as pe
from published.row import FULL, SLIDING, Right, Row, every

Spec = pe.RotarySpec


def row(
    file: str,
    architecture: str,
    sizes: tuple[int, int, int],
    right: Right,
    *,
    layers: tuple[str, ...] = (),
    arguments: dict[str, Any] | None = None,
    **says: Any,
) -> Row:
    """Sizes are embedding_length, head_count and block_count; dots of keys are double underscores."""
    keys = ("embedding_length", "attention.head_count", "block_count")
    own = {**dict(zip(keys, sizes, strict=True)), "context_length": 131072}
    own |= {key.replace("__", "."): value for key, value in says.items()}
    fields = {f"{architecture}.{key}": value for key, value in own.items()}
    source = "llama.cpp, src/models and llama-model.cpp"
    metadata = {"general.architecture": architecture, **fields}
    return Row(f"{file} (GGUF)", metadata, right, source, arguments or {}, layers)


NORM, NEOX = {"interleaved": True}, {"interleaved": False}
ROWS = [
    row("Llama-2-7B", "llama", (4096, 32, 32), Spec(128, **NORM), rope__dimension_count=128, arguments={"base": 10000.0}),
    row("Meta-Llama-3-8B", "llama", (4096, 32, 32), Spec(128, base=5e5, **NORM), rope__dimension_count=128, rope__freq_base=5e5),
    row("Mistral-Nemo-Instruct-2407", "llama", (5120, 32, 40), Spec(128, base=1e6, **NORM), attention__key_length=128, rope__dimension_count=128, rope__freq_base=1e6),
    row("deepseek-coder-6.7b", "llama", (4096, 32, 32), Spec(128, base=1e5, scaling=pe.LinearScaling(4), **NORM), rope__dimension_count=128, rope__freq_base=1e5, rope__scaling__type="linear", rope__scaling__factor=4.0),
    row("Qwen2-7B", "qwen2", (3584, 28, 28), Spec(128, base=1e6), rope__freq_base=1e6),
    row("Qwen3-8B", "qwen3", (4096, 32, 36), Spec(128, base=1e6), attention__key_length=128, rope__freq_base=1e6),
    row("Qwen2-VL-7B", "qwen2vl", (3584, 28, 28), Spec(128, base=1e6, sections=pe.Sections((16, 24, 24))), rope__freq_base=1e6, rope__dimension_sections=[16, 24, 24, 0]),
    row("gemma-2-9b", "gemma2", (3584, 16, 42), Spec(256), attention__key_length=256, attention__sliding_window=4096, rope__freq_base=1e4),
    row(
        "gemma-3-4b", "gemma3", (2560, 8, 34), {FULL: Spec(256, base=1e6, scaling=pe.LinearScaling(8)), SLIDING: Spec(256)},
        attention__key_length=256, attention__sliding_window=1024, rope__freq_base=1e6, rope__scaling__type="linear",
        rope__scaling__factor=8.0, layers=every(6, 34),
    ),
    row("phi-2", "phi2", (2560, 32, 32), Spec(80, rotary_dim=32), rope__dimension_count=32, rope__freq_base=1e4),
    row("Phi-3-mini-4k", "phi3", (3072, 32, 32), Spec(96), rope__dimension_count=96, rope__freq_base=1e4),
    row("pythia-1b", "gptneox", (2048, 8, 16), Spec(256, rotary_dim=64), rope__dimension_count=64, rope__freq_base=1e4),
    row("stablelm-3b-4e1t", "stablelm", (2560, 32, 32), Spec(80, rotary_dim=20), rope__dimension_count=20, rope__freq_base=1e4),
    row("c4ai-command-r-v01", "command-r", (8192, 64, 40), Spec(128, base=8e6, **NORM), rope__freq_base=8e6, rope__scaling__type="none"),
    row(
        "c4ai-command-r7b-12-2024", "cohere2", (4096, 32, 32), {FULL: None, SLIDING: Spec(128, base=5e4, **NORM)},
        attention__key_length=128, attention__sliding_window=4096, rope__dimension_count=128, rope__freq_base=5e4,
        rope__scaling__type="none", layers=every(4, 32, "no", SLIDING),
    ),
    row(
        "gpt-oss-20b", "gpt-oss", (2880, 64, 24), Spec(64, base=1.5e5, scaling=pe.YarnScaling(32, 4096)),
        attention__key_length=64, attention__sliding_window=128, rope__freq_base=1.5e5, rope__scaling__type="yarn",
        rope__scaling__factor=32.0, rope__scaling__original_context_length=4096,
    ),
    row(
        "Olmo-3-7B", "olmo2", (4096, 32, 32), {FULL: Spec(128, base=5e5, scaling=pe.YarnScaling(8, 8192)), SLIDING: Spec(128, base=5e5)},
        attention__sliding_window=4096, rope__freq_base=5e5, rope__scaling__type="yarn", rope__scaling__factor=8.0,
        rope__scaling__original_context_length=8192, layers=every(4, 32),
    ),
    row("Llama-4-Maverick", "llama4", (5120, 40, 48), Spec(128, base=5e5, **NORM), attention__key_length=128, rope__dimension_count=128, rope__freq_base=5e5, layers=every(4, 48, "no", FULL)),
    row("GLM-4-9B-0414", "glm4", (4096, 32, 40), Spec(128, rotary_dim=64, **NORM), attention__key_length=128, rope__dimension_count=64, rope__freq_base=1e4),
]  # fmt: skip

# How llama.cpp rotates each architecture: llama_model_rope_type in src/llama-model.cpp and the names of src/llama-arch.cpp,
# commit 0c1e57098bba43ac29e6e3b677cdceebdd22334f of 2026-10-01. NORM pairs neighbours; NEOX, MROPE and IMROPE pair halves;
# MROPE gives one section of pairs to each axis, IMROPE alternates between axes. The graphs of four do otherwise: bert and
# starcoder do not rotate, deepseek2-ocr pairs halves, and deepseek4, which is left out, rotates its outputs back.
TYPES = {
    "NORM": """
        arcee arctic baichuan bailingmoe bailingmoe3 chameleon chatglm cohere2 cohere2moe command-r deci deepseek deepseek2
        deepseek32 dots3note eagle3 ernie4_5 ernie4_5-moe glm-dsa glm4 granite granite_swa granitehybrid granitemoe
        graniteswitch hy_v4 internlm2 llada llama llama-embed llama4 maincoder minicpm mistral3 mistral4 muse-glimmer nanbeige
        neo-bert olmo plm pockettts smollm3 xverse
    """,
    "NEOX": """
        afmoe apertus bailingmoe2 bitnet codeshell cogvlm dbrx deepseek2-ocr dflash dots1 dream eurobert exaone exaone-moe
        exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm4moe gpt-oss gptneox
        grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 jais2 jina-bert-v3 laguna lfm2 lfm2moe llada-moe
        maple mellum mimo2 minicpm3 minimax-01 minimax-m2 minimax-m3 modern-bert nemotron nomic-bert nomic-bert-moe olmo2
        olmoe openelm orion pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 qwen qwen2 qwen2moe qwen3 qwen3moe qwen3next
        rnd1 seed_oss smallthinker spark2_5 stablelm starcoder2 step35 talkie
    """,
    # With sections in the file; those that are above too rotate as there without.
    "MROPE": "bailingmoe3 dflash glm4 glm4moe hunyuan_vl paddleocr qwen2vl",
    "IMROPE": "qwen35 qwen35moe qwen3tts qwen3vl qwen3vlmoe qwen4exp",
    "NONE": """
        arwkv7 bert bloom clip glm5-next gpt2 gptj jais jamba jina-bert-v2 kimi-k3 kimi-linear mamba mamba2 mpt nemotron_h
        nemotron_h_moe refact rwkv6 rwkv6qwen2 rwkv7 starcoder t5 t5encoder wavtokenizer-dec
    """,
}
