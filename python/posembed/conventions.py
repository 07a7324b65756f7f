"""How each known model family rotates: read from the models' own code in transformers 5.23.

A configuration file does not say which components form a pair. Unknown model types therefore have
to be stated by the caller.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text: names by the hundred read better without quotes."""
    return frozenset(text.split())


# Pairs (i, i + rotary_dim / 2).
HALF_SPLIT = words(
    """
EvollaModel afmoe apertus arcee aria_text bamba beam bitnet chameleon cohere_compass_text
cosmos3_edge_text csm csm_depth_decoder_model cwm dbrx deepseek_ocr2_encoder deepseek_ocr2_text
dia_decoder dia_encoder diffllama diffusion_gemma_text doge dots1 dots3_note_audio_encoder
embedding_gemma2_text emu3_text_model esm esmc eurobert evolla exaone4 exaone_moe falcon
falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
glm4_moe glm4v_moe_text glm_image_text glmasr_encoder gpt_neox gpt_neox_japanese gpt_oss
gradium_phonon_tts granite granite4_vision_text granite_docling_text granite_swa granitemoe
granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm_text hunyuan_v1_dense
hunyuan_v1_moe hunyuan_vl_text hy_v3 hy_v4 hyperclovax idefics internlm3 iquestcoder jais2
jetmoe jina_embeddings_v3 kolibri1 kyutai_speech_to_text laguna lasr_encoder lfm2 lfm2_moe lfm3
llama mellum mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm3 minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral mllama_text_model modernbert
modernbert-decoder molmo2_text moshi muse_glimmer_assistant muse_glimmer_text muse_spark_text
nanochat nemotron nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp
nemotron3_diarization_audio neomme neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe
paddleocr_vl_text persimmon phi phi3 phi4_multimodal phimoe pocket_tts
pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder
qwen2 qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_moe
qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text
qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma seamless_m4t seed_oss
smollm3 solar_open
stablelm starcoder2 step3p5 step3p7 t5_gemma_module t5gemma2_decoder t5gemma2_text timesfm2_5
ultrabert unlimited_ocr_text vaultgemma voxtral_realtime_encoder voxtral_realtime_text
wav2vec2-bert wav2vec2-conformer xcodec2 zamba2 zaya
"""
)

# Pairs (2i, 2i + 1). Some models write their results in half-split order: query and key alike, so
# that scores are the same.
INTERLEAVED = words(
    """
axk2 bailing_hybrid blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher
codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v32 deepseek_v4 dots3_note_text ernie4_5
ernie4_5_moe ernie4_5_vl_moe_text glm glm4 glm4v_text glm_moe_dsa glm_ocr_text gptj helium
llama4_text longcat_flash moonshine moonshine_streaming openai_privacy_filter pe_audio_encoder
pe_audio_video_encoder pe_video_encoder roformer
"""
)

# Interleaved where the configuration's rope_interleave says so.
BY_KEY = words("axk1 deepseek_v3 glm4_moe_lite mistral4 youtu")

# The other way round.
REVERSED = frozenset({"nanochat"})

# The rotated window is at the end of the head.
TRAILING = frozenset({"deepseek_v4"})

# Position axes: time, height, width in sections, one after the other or in turns.
CONTIGUOUS_SECTIONS = {
    "glm4v_text": (8, 12, 12),
    "glm4v_moe_text": (8, 12, 12),
    "glm_image_text": (8, 12, 12),
    "glm_ocr_text": (8, 12, 12),
    "paddleocr_vl_text": (16, 24, 24),
    "qwen2_5_omni_talker": (16, 24, 24),
    "qwen2_5_omni_text": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen2_vl_text": (16, 24, 24),
}
INTERLEAVED_SECTIONS = {
    "cosmos3_edge_text": (24, 20, 20),
    "qwen3_5_moe_text": (11, 11, 10),
    "qwen3_5_text": (11, 11, 10),
    "qwen3_omni_moe_talker_text": (24, 20, 20),
    "qwen3_omni_moe_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_vl_text": (24, 20, 20),
    "qwen4_exp_text": (11, 11, 10),
}

# Why a known family has no RotarySpec.
UNSUPPORTED = {
    "clvp_encoder": "rotates values too, by a width that its projection gives",
    "dinov3_vit": "positions are coordinates between -1 and 1, not whole numbers",
    "efficientloftr": "positions alternate between rows and columns within its aggregated grid",
    "eomt_dinov3": "positions are coordinates between -1 and 1, not whole numbers",
    "gemma4_vision": "each axis pairs halves of its own window: use a RotarySpec for each window",
    "glm5_next_text": "its text layers have no rotary dimensions",
    "kimi_linear": "its layers are not rotated",
    "mistral_large4_text": "its frequencies are learned, pair by pair",
    "musicflamingo": "positions are times in seconds, not whole numbers",
    "sapiens2": "positions are coordinates between -1 and 1, not whole numbers",
}

# Vision towers, position axes (height, width): each axis has the whole series of frequencies.
HEIGHT_THEN_WIDTH = words(
    """
cohere_compass_vision dots3_note_vision_encoder ernie4_5_vl_moe_vision exaone4_5_vision
glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision lfm3_vl_vision mlcd
mlcd_vision_model muse_glimmer_vision muse_spark_vision paddleocr_vl_vision
qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision
qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision
video_llama_3_vision
"""
)
WIDTH_THEN_HEIGHT = frozenset({"inkling2_vision", "llama4_vision_model", "step3p5_vision"})
WIDTH_AND_HEIGHT_IN_TURNS = frozenset({"kimi_k25_vision"})
TIME_HEIGHT_WIDTH = frozenset({"minimax_m3_vl_vision"})
# Axes share one series: height has its even members, width the odd ones.
SHARED_SERIES = frozenset({"pixtral"})
INTERLEAVED_AXIAL = words(
    """
edgetam_video inkling2_vision llama4_vision_model sam2_video sam3_tracker_video sam3_vit_model
"""
)
AXIAL = (
    HEIGHT_THEN_WIDTH
    | WIDTH_THEN_HEIGHT
    | WIDTH_AND_HEIGHT_IN_TURNS
    | TIME_HEIGHT_WIDTH
    | SHARED_SERIES
    | INTERLEAVED_AXIAL
)

# Sections only where the configuration has mrope_section; whether axes take turns.
OPTIONAL_SECTIONS = {"cohere_compass_text": True, "hunyuan_vl_text": False}

# The last of two axes has every other pair.
ALTERNATING_AXES = frozenset({"neomme"})

# A rotary_dim beside partial_rotary_factor is not what the code reads.
WIDTH_BY_PART = frozenset({"minimax_m3_vl_text"})

# Bases that the code has and the configuration has not.
FIXED_BASE = {"gptj": 10000.0, "codegen": 10000.0, "roformer": 10000.0}

# GGUF: architectures of llama.cpp whose pairs are interleaved, and those whose are not.
GGUF_INTERLEAVED = dict.fromkeys(
    words(
        """
arcee baichuan chameleon command-r cohere2 deci deepseek deepseek2 glm4 granite granitemoe
internlm2 llama llama4 minicpm mistral3 olmo smollm3 starcoder xverse
"""
    ),
    True,
) | dict.fromkeys(
    words(
        """
bert bloom dbrx exaone exaone4 falcon gemma gemma2 gemma3 gpt-oss gptneox grok nemotron olmo2
olmoe openelm orion phi2 phi3 phimoe plamo qwen qwen2 qwen2moe qwen3 qwen3moe seed_oss stablelm
starcoder2
"""
    ),
    False,
)
GGUF_ROPE_KEYS = words(
    """
freq_base dimension_count scale_linear scaling.type scaling.factor scaling.attn_factor
scaling.original_context_length scaling.finetuned
"""
)
