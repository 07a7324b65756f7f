#include "configuration/irrelevant.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "configuration/words.h"

namespace posembed::configuration {
namespace {

// Whole families of keys: tokens, dropout, losses, initial values, activations, experts, training.

/// A prefix of irrelevant keys, unless `unless` follows it.
struct Beginning {
  std::string_view text;
  std::string_view unless = {};
};

constexpr Beginning beginnings[] = {
    {"_"},
    {"transformers"},
    {"unsloth"},
    {"summary_"},
    {"task_"},
    {"generation"},
    {"forced_"},
    {"mamba_"},
    {"ssm_"},
    {"moe_"},
    {"router_"},
    {"mtp_"},
    {"output_"},
    {"mask_"},
    {"quant"},
    {"video_"},
    {"audio_"},
    {"projector_"},
    {"num_beam"},
    {"remove_"},
    {"index_", "rope"},
    {"decoder_", "head"},
    {"encoder_", "head"},
    {"image_", "size"},
    {"vision_", "rope"},
    {"linear_", "attention_layers"},
};
constexpr std::string_view ends[] = {
    "_dtype",       "_token",        "_tokens",      "_token_id", "_token_ids",
    "_token_index", "_token_indexs", "_pdrop",       "_coef",     "_coeff",
    "_coefficient", "_loss",         "_loss_weight", "_eps",      "_epsilon",
    "_std",         "_act",          "_activation",  "_act_fn",   "_activation_function",
    "bias",         "lora_rank",
};
constexpr std::string_view middles[] = {"dropout", "expert", "_jitter", "softcap"};

constexpr Words irrelevant_names = R"(
_name_or_path act_fn activation activation_function activation_type adapt_layers add_cross_attention
add_qkv_bias_linear apply_query_key_layer_scaling apply_residual_connection_post_layernorm
architectures attention_bias attention_chunk_size attention_k_eq_v attention_multiplier
attention_softmax_in_fp32 attn_implementation attn_logit_softcapping attn_pdrop attn_scale
attn_temperature_tuning attn_type auto_map bad_words_ids batch_size begin_suppress_tokens bf16
bias_dropout_fusion block_size bos_token_id cache_implementation chunk_size_feed_forward
classifier_dropout clip_qkv cls_token_id cross_attention_hidden_size dense_attention_every_n_layers
depth dim_model_base diversity_penalty do_sample dtype early_stopping emb_pdrop embd_pdrop
embedding_multiplier embedding_size eos_token_id ep_size exponential_decay_length_penalty ffn_dim
ffn_dim_multiplier ffn_hidden ffn_hidden_size final_norm finetuning_task first_k_dense_replace
floor_scale fp16 fp32 fp32_residual_connection fused_bias_fc fused_dropout_add_ln fused_mlp
glu_linear gradient_checkpointing hidden_act hidden_activation hidden_dim
hidden_size_per_layer_input hidden_sizes id2label in_channels in_chans initializer_factor
initializer_range interleave_moe_layer_step intermediate_size intermediate_size_mlp is_causal
is_decoder is_encoder_decoder kv_n_heads label2id language_model layer_norm_elementwise_affine
layer_norm_epsilon layer_norm_type layernorm_epsilon length_penalty lm_head_bias logit_scale
logits_scaling logits_soft_cap max_batch_size max_length max_seq_len max_window_layers
mha_num_key_value_heads min_length mlp_bias mlp_hidden_size mlp_layer_types mlp_only_layers
mlp_ratio model_id model_max_length model_type moe_layers multi_query multi_query_attention
multi_query_group_num multiple_of n_ctx n_group n_inner n_kv_heads n_layer n_layers n_positions
n_routed_experts n_shared_experts n_special new_decoder_architecture no_bias no_repeat_ngram_size
norm_after norm_eps norm_topk_prob norm_type normalization_type num_channels num_experts
num_experts_per_tok num_hidden_layers num_key_value_heads num_kv num_kv_heads num_layers
num_local_experts num_logits_to_keep num_nextn_predict_layers num_return_sequences onnx_export
onnx_safe out_features out_hidden_size output_router_logits pad_token_id padded_vocab_size
padding_side parallel_attn parallel_block patch_size pooler_hidden_size pooling_type post_layer_norm
post_norm pre_norm pre_seq_len prefix prefix_projection pretraining_tp problem_type pruned_heads
qk_layernorm qk_norm query_pre_attn_scalar repetition_penalty resid_dropout resid_pdrop
residual_multiplier return_dict return_dict_in_generate rms_norm rms_norm_eps rmsnorm
routed_scaling_factor safe_serialization scale_attn scale_attn_by_inverse_layer_idx
scale_attn_weights scale_depth scale_emb scale_embedding score_function scoring_func self_attn_type
sep_token_id seq_aux shared_expert_gate softmax_in_fp32 softmax_scale spatial_merge_size
suppress_tokens temperature temporal_patch_size tensor_parallel_degree tf_legacy_loss tie_embeddings
tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p topk_group topk_method
torchscript training_precision type_vocab_size typical_p use_bfloat16 use_bias use_cache
use_cache_kernel use_cache_quantization use_cautious_attention use_conv_bias use_flash_attention
use_flash_attn use_gated_attention use_kernel_forward use_logn_attn use_mean_pooling
use_parallel_residual use_qk_norm use_qkv_bias use_return_dict use_sliding_window use_xattn
v_head_dim version vocab_size weight_tying window_size word_embed_proj_dim z_loss z_loss_weight
)";

bool begins(std::string_view key, std::string_view text) {
  return key.substr(0, text.size()) == text;
}

bool ends_in(std::string_view key, std::string_view text) {
  return key.size() >= text.size() && key.substr(key.size() - text.size()) == text;
}

bool has_beginning(std::string_view key) {
  return std::any_of(std::begin(beginnings), std::end(beginnings), [&](const Beginning& known) {
    if (!begins(key, known.text)) return false;
    return known.unless.empty() || !begins(key.substr(known.text.size()), known.unless);
  });
}

/// Nested configurations are separate parts, except those about attention and rotation.
bool is_part(std::string_view key) {
  return ends_in(key, "_config") && !ends_in(key, "attn_config") && !ends_in(key, "rope_config");
}

bool has_end(std::string_view key) {
  return std::any_of(std::begin(ends), std::end(ends),
                     [&](std::string_view text) { return ends_in(key, text); });
}

bool has_middle(std::string_view key) {
  return std::any_of(std::begin(middles), std::end(middles), [&](std::string_view text) {
    return key.find(text) != std::string_view::npos;
  });
}

}  // namespace

bool is_irrelevant(std::string_view key) {
  return irrelevant_names.has(key) || has_beginning(key) || is_part(key) || has_end(key) ||
         has_middle(key);
}

void check_understood(const Keys& keys, const std::set<std::string>& accounted,
                      const std::vector<std::string>& ignore) {
  std::vector<std::string> unknown;
  for (const std::string& key : keys.left()) {
    const bool ignored = std::find(ignore.begin(), ignore.end(), key) != ignore.end();
    if (accounted.count(key) == 0 && !ignored && !is_irrelevant(key)) unknown.push_back(key);
  }
  TORCH_CHECK_VALUE(unknown.empty(), keys.where(),
                    ": keys that are not understood: ", repr(unknown),
                    ": pass ignore=", repr(unknown), " if they do not concern rotary positions");
}

}  // namespace posembed::configuration
