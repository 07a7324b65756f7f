// How each known model family rotates: read from the models' own code in transformers 5.23.
//
// A configuration file does not say which components form a pair. For unknown model types, the
// caller must therefore state them.
#pragma once

#include <array>
#include <cstdint>

#include "configuration/fields.h"
#include "configuration/words.h"

namespace posembed::configuration::conventions {

/// Pairs (i, i + rotary_dim / 2).
inline constexpr Words half_split = R"(
EvollaModel afmoe apertus arcee aria_text bamba beam bitnet chameleon clvp_encoder
cohere_compass_text cosmos3_edge_text csm csm_depth_decoder_model cwm dbrx deepseek_ocr2_encoder
deepseek_ocr2_text dia_decoder dia_encoder diffllama diffusion_gemma_text doge dots1
dots3_note_audio_encoder embedding_gemma2_text emu3_text_model esm esmc eurobert evolla exaone4
exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
gemma4_unified_text gemma4_vision glm4_moe glm4v_moe_text glm_image_text glmasr_encoder gpt_neox
gpt_neox_japanese gpt_oss gradium_phonon_tts granite granite4_vision_text granite_docling_text
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm_text
hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v3 hy_v4 hyperclovax idefics internlm3
iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 kyutai_speech_to_text laguna lasr_encoder lfm2
lfm2_moe lfm3 llama mellum mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm3 minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral mllama_text_model modernbert
modernbert-decoder molmo2_text moshi muse_glimmer_assistant muse_glimmer_text muse_spark_text
nanochat nemotron nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp
nemotron3_diarization_audio neomme neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe
paddleocr_vl_text persimmon phi phi3 phi4_multimodal phimoe pocket_tts pocket_tts_audio_tokenizer
pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen qwen2 qwen2_5_omni_dit
qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text
qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma seamless_m4t
seed_oss smollm3 solar_open stablelm starcoder2 step3p5 step3p7 t5_gemma_module t5gemma2_decoder
t5gemma2_text timesfm2_5 ultrabert unlimited_ocr_text vaultgemma voxtral_realtime_encoder
voxtral_realtime_text wav2vec2-bert wav2vec2-conformer xcodec2 zamba2 zaya
)";

/// Pairs (2i, 2i + 1). Some of these models write results in half-split order, for query and key
/// alike, so scores are the same.
inline constexpr Words interleaved = R"(
axk2 bailing_hybrid blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher
codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v32 deepseek_v4 dots3_note_text ernie4_5
ernie4_5_moe ernie4_5_vl_moe_text glm glm4 glm4v_text glm_moe_dsa glm_ocr_text gptj helium
llama4_text longcat_flash mistral_large4_text moonshine moonshine_streaming openai_privacy_filter
pe_audio_encoder pe_audio_video_encoder pe_video_encoder roformer
)";

/// Interleaved if the configuration's rope_interleave says so or is absent, as in DeepSeek's own
/// files.
inline constexpr Words by_key = "axk1 deepseek_v3 glm4_moe_lite mistral4 youtu";

/// The key that `posembed convert` writes into a configuration: "interleaved" or "half_split". It
/// says how this checkpoint is rotated and overrides the model type.
inline constexpr const char* converted = "posembed_rotary_pairs";

/// Keys about rotation that do not change the rotation of a layer that rotates. They say which
/// layers rotate, how scores are scaled, and what else is rotated.
inline constexpr Words no_bearing = R"(
layer_types layers_block_type max_position_embeddings memory_attention_rope_dropout
memory_attention_rope_feat_sizes memory_attention_rope_k_sizes mlp_layer_types per_layer_config
rotary_value sliding_window sliding_window_size
)";

/// Patterns of the kinds of layers. Configuration classes read them; they do not matter if the
/// kinds are listed.
inline constexpr Words patterns = R"(
attn_layer_indices attn_layer_offset attn_layer_period block_types compress_ratios
full_attention_interval global_attn_every_n_layers hybrid_block_size hybrid_layer_pattern
layer_group_size max_window_layers prefix_dense_sliding_window_pattern sliding_window_pattern
)";

/// Families of which only some models rotate: the key that says so, its default, and the value with
/// which the model rotates; values as JSON.
struct Switch {
  Words names;
  const char* key;
  const char* otherwise;
  const char* rotating;
};
inline constexpr Switch switches[] = {
    {"RefinedWeb RefinedWebModel falcon", "alibi", "false", "false"},
    {"seamless_m4t wav2vec2-bert wav2vec2-conformer", "position_embeddings_type", R"("relative")",
     R"("rotary")"},
    {"esm", "position_embedding_type", R"("absolute")", R"("rotary")"},
    {"gptj", "rotary", "true", "true"},
    {"granitemoehybrid", "position_embedding_type", R"("nope")", R"("rope")"},
    {"zamba2", "use_mem_rope", "false", "true"},
};

/// Families whose full-attention layers rotate only if the configuration has no sliding window.
inline constexpr Words rotated_without_window = "exaone4 exaone_moe kolibri1";

/// Families whose full-attention layers never rotate.
inline constexpr Words rotated_if_sliding = "afmoe cohere2 cohere2_moe flint";

/// Kinds of layers that rotate in no model.
inline constexpr Words without_rotation = R"(
conv cross_attention linear_attention mamba mlp moe recurrent
)";

/// Families that scale frequencies only in full-attention layers, if rope_scaling is flat.
inline constexpr Words scaled_if_full = "olmo3 step3p5";

/// Families whose use_dynamic_ntk works in steps: the base grows whenever the length doubles.
inline constexpr Words doubled_ntk = "qwen";

/// Families whose rope_parameters distinguish layers by whether they compress.
inline constexpr Words compressed = "deepseek_v4";

/// Keys for which the configuration class has its own rule if they are missing, and the model types
/// with such a rule.
struct Rule {
  const char* key;
  Words names;
};
inline constexpr Rule rules_of_classes[] = {
    {"cross_attention_layers", "mllama_text_model"},
    {"head_dim", R"(
afmoe beam cohere2_moe cosmos3_edge_text cwm dia_decoder dia_encoder diffusion_gemma_text
embedding_gemma2_text ernie4_5 flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
gemma4_unified_text gemma4_vision glm glm4 glm4v_moe_text gpt_oss helium higgs_audio_v2 hrm_text
hy_v3 internlm3 iquestcoder kolibri1 laguna lfm3 llama4_text mellum mimo_v2_flash minimax_m2
minimax_m3_vl_text ministral3 molmo2_text muse_glimmer_assistant muse_glimmer_text muse_spark_text
neomme neucodec openai_privacy_filter paddleocr_vl_text pe_audio_encoder pe_audio_video_encoder
pe_video_encoder qwen2_5_omni_dit qwen2_5_omni_talker qwen3 qwen3_5_moe_text qwen3_5_text qwen3_next
qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_text qwen3_vl_text qwen4_exp_text seed_oss
solar_open step3p5 t5_gemma_module t5gemma2_decoder t5gemma2_text timesfm2_5 vaultgemma
voxtral_realtime_encoder xcodec2 zaya
)"},
    {"layer_rope_theta", "granite_swa granitemoe_swa muse_glimmer_text muse_spark_text"},
    {"layer_types", R"(
afmoe bailing_hybrid bamba beam cohere2 cohere2_moe cohere_compass_text deepseek_v4
diffusion_gemma_text dots3_note_text embedding_gemma2_text exaone4 exaone_moe flint gemma3_text
gemma3n_text gemma4_text gemma4_unified_text granitemoehybrid kolibri1 laguna lfm3 lfm3_vl_vision
mellum mimo_v2_flash minimax modernbert modernbert-decoder muse_glimmer_text muse_spark_text neomme
olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma t5gemma2_decoder t5gemma2_text
ultrabert zaya
)"},
    {"no_rope_layers", "llama4_text mistral_large4_text smollm3"},
    {"partial_rotary_factor", R"(
bamba deepseek_v4 diffusion_gemma_text dots3_note_audio_encoder dots3_note_text efficientloftr
gemma4_text gemma4_unified_text gpt_neox laguna lfm3 mimo_v2_flash mistral4 moonshine_streaming
nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp neomme zaya
)"},
    {"qk_rope_head_dim", R"(
axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note_text
glm4_moe_lite glm5_next_text glm_moe_dsa hy_v4 kimi_linear longcat_flash minicpm3 mistral4
mistral_large4_text youtu
)"},
    {"rope_parameters", R"(
apertus cwm diffusion_gemma_text gemma4_text gemma4_unified_text gpt_oss higgs_audio_v2 lfm3
ministral3 mistral4 mistral_large4_text openai_privacy_filter
)"},
};

/// Composite models whose older files have the text model's keys at the top level, beside the
/// towers; and the type of their text model.
struct FlatText {
  Words names;
  const char* text;
};
inline constexpr FlatText flat_texts[] = {
    {"fuyu", "persimmon"},
    {"hunyuan_vl", "hunyuan_vl_text"},
    {"paddleocr_vl", "paddleocr_vl_text"},
    {"qwen2_5_vl", "qwen2_5_vl_text"},
    {"qwen2_vl", "qwen2_vl_text"},
};

/// Rotation by minus the angle.
inline constexpr Words reversed = "nanochat";

/// The rotated window is at the end of the head.
inline constexpr Words trailing = "deepseek_v4";

/// Position axes time, height and width, and the default number of pairs of each.
struct AxisSizes {
  Words names;
  std::array<int64_t, 3> sizes;
};
/// Contiguous axes, one after the other.
inline constexpr AxisSizes contiguous_sections[] = {
    {"glm4v_moe_text glm4v_text glm_image_text glm_ocr_text", {8, 12, 12}},
    {R"(
paddleocr_vl_text qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text
)",
     {16, 24, 24}},
};
/// Alternating axes.
inline constexpr AxisSizes interleaved_sections[] = {
    {R"(
cosmos3_edge_text qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text
)",
     {24, 20, 20}},
    {"qwen3_5_moe_text qwen3_5_text qwen4_exp_text", {11, 11, 10}},
};
/// Height and width alternate over the faster pairs, and time has the slowest. Sizes are in this
/// order.
inline constexpr AxisSizes time_last[] = {
    {"ernie4_5_vl_moe_text", {22, 22, 20}},
};

/// Families that multiply frequencies by the exponential of a tensor that only the checkpoint has;
/// and its name.
struct LearnedScale {
  Words names;
  const char* tensor;
};
inline constexpr LearnedScale learned_scales[] = {
    {"mistral_large4_text", "rotary_emb.alpha"},
};

/// The configuration mentions rotated components, but the code rotates none (NoPE).
inline constexpr Words unrotated = "glm5_next_text kimi_linear";

/// Why a known family has no RotarySpec.
struct Unsupported {
  Words names;
  const char* reason;
};
inline constexpr Unsupported unsupported[] = {
    {"blt", "made of models with rotations of their own: pass part='global_config', say"},
    {"esmfold2", "positions are coordinates of atoms in space, not whole numbers"},
    {"lightglue", "frequencies are a learned projection of keypoints' coordinates"},
    {"musicflamingo", "angles are products of a position and a time in seconds"},
    {"vjepa2", "its code turns the two components of a pair by different angles: no rotation"},
};

/// Vision towers, position axes (height, width): each axis has the whole series of frequencies.
inline constexpr Words height_then_width = R"(
cohere_compass_vision dots3_note_vision_encoder ernie4_5_vl_moe_vision exaone4_5_vision
glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision lfm3_vl_vision mlcd mlcd_vision_model
muse_glimmer_vision muse_spark_vision paddleocr_vl_vision qwen2_5_omni_vision_encoder
qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder
qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision video_llama_3_vision
)";

inline constexpr Words width_then_height = "inkling2_vision llama4_vision_model step3p5_vision";
inline constexpr Words width_and_height_in_turns = "kimi_k25_vision";
inline constexpr Words time_height_width = "minimax_m3_vl_vision";

/// Rows and columns alternate over all heads at once.
inline constexpr Words whole_grid = "efficientloftr";

/// Coordinates from -1 to 1, whatever the image's size.
inline constexpr Words normalised_grid = "dinov3_vit eomt_dinov3 sapiens2";

/// Each axis pairs the halves of its own window, so each axis has a RotarySpec.
inline constexpr Words window_of_axis = "gemma4_vision";

/// Axes share one series: height uses its even members, width the odd ones.
inline constexpr Words shared_series = "pixtral";

inline constexpr Words interleaved_axial = R"(
edgetam_video efficientloftr inkling2_vision llama4_vision_model sam2_video sam3_tracker_video
sam3_vit_model
)";

/// Families with sections only if the configuration has mrope_section; and whether axes alternate.
struct OptionalSections {
  Words names;
  bool in_turns;
};
inline constexpr OptionalSections optional_sections[] = {
    {"cohere_compass_text", true},
    {"hunyuan_vl_text", false},
};

/// Two axes alternate over the pairs.
inline constexpr Words alternating_axes = "neomme";

/// The code reads partial_rotary_factor and ignores rotary_dim.
inline constexpr Words width_by_part = "minimax_m3_vl_text";

/// The default part of the head that is rotated.
struct Part {
  Words names;
  double part;
};
inline constexpr Part default_parts[] = {
    {R"(
glm glm4 glm4_moe glm4v_moe_text glmasr_encoder nemotron persimmon phi recurrent_gemma
)",
     0.5},
    {"qwen3_5_moe_text qwen3_5_text qwen3_next stablelm", 0.25},
    {"moonshine", 0.9},
};

/// Bases that are in the code and not in the configuration.
struct Base {
  Words names;
  double base;
};
inline constexpr Base fixed_bases[] = {
    {"clvp_encoder codegen gptj roformer", 10000.0},
};

/// Whether a model's positions have rows and columns.
bool is_axial(const std::string& model_type);

/// The base in the model's code; files of towers rarely have one.
std::optional<double> fixed_base(const std::string& model_type);

/// All tables by name, for tests and documentation: lists of model types, or objects by model type.
json tables();

}  // namespace posembed::configuration::conventions
