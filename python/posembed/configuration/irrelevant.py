"""Keys of configuration files that have no bearing on rotary positions.

Reading is strict: a key that is neither read, nor known to the model's configuration class, nor
listed here raises. A new name for the base or the scaling is therefore never passed over.
"""

from __future__ import annotations

import re

from posembed.configuration.keys import words

# Whole families of keys: tokens, dropout, losses, initial values, activations, experts, training.
FAMILIES = re.compile(
    r"""
    ^_ | ^transformers | ^unsloth | ^summary_ | ^task_ | ^generation | ^forced_ | ^mamba_ | ^ssm_
    | ^linear_(?!attention_layers) | ^moe_ | ^router_ | ^index_(?!rope) | ^mtp_ | ^output_ | ^mask_
    | ^decoder_(?!head) | ^encoder_(?!head) | ^quant | ^image_(?!size) | ^video_ | ^audio_
    | ^vision_(?!rope) | ^projector_ | ^num_beam | ^remove_
    | (?<!attn)(?<!rope)_config$ | _dtype$ | _token(_id|_index)?s?$ | _token_ids$ | dropout
    | _pdrop$ | _coef(f|ficient)?$ | _loss(_weight)?$ | _eps(ilon)?$ | _std$ | _act(ivation)?$
    | _act_fn$ | _activation_function$ | expert | _jitter | bias$ | softcap | lora_rank$
    """,
    re.VERBOSE,
)

NAMES = words(
    """
_name_or_path act_fn activation activation_function activation_type adapt_layers
add_cross_attention add_qkv_bias_linear apply_query_key_layer_scaling
apply_residual_connection_post_layernorm architectures attention_bias attention_chunk_size
attention_k_eq_v attention_multiplier attention_softmax_in_fp32 attn_implementation
attn_logit_softcapping attn_pdrop attn_scale attn_temperature_tuning attn_type auto_map
bad_words_ids batch_size
begin_suppress_tokens bf16 bias_dropout_fusion block_size bos_token_id cache_implementation
chunk_size_feed_forward classifier_dropout clip_qkv cls_token_id cross_attention_hidden_size
dense_attention_every_n_layers depth dim_model_base diversity_penalty do_sample dtype
early_stopping emb_pdrop embd_pdrop embedding_multiplier embedding_size eos_token_id ep_size
exponential_decay_length_penalty ffn_dim ffn_dim_multiplier ffn_hidden ffn_hidden_size
final_norm finetuning_task first_k_dense_replace floor_scale fp16 fp32 fp32_residual_connection
fused_bias_fc fused_dropout_add_ln fused_mlp glu_linear gradient_checkpointing hidden_act
hidden_activation hidden_dim hidden_size_per_layer_input hidden_sizes id2label in_channels
in_chans initializer_factor initializer_range interleave_moe_layer_step intermediate_size
intermediate_size_mlp is_causal is_decoder is_encoder_decoder kv_n_heads label2id language_model
layer_norm_elementwise_affine layer_norm_epsilon layer_norm_type layernorm_epsilon
length_penalty lm_head_bias logit_scale logits_scaling logits_soft_cap max_batch_size max_length
max_seq_len max_window_layers mha_num_key_value_heads min_length mlp_bias mlp_hidden_size
mlp_layer_types mlp_only_layers mlp_ratio model_id model_max_length model_type moe_layers
multi_query multi_query_attention multi_query_group_num multiple_of n_ctx n_group n_inner
n_kv_heads n_layer n_layers n_positions n_routed_experts n_shared_experts n_special
new_decoder_architecture no_bias no_repeat_ngram_size norm_after norm_eps norm_topk_prob
norm_type normalization_type num_channels num_experts num_experts_per_tok num_hidden_layers
num_key_value_heads num_kv num_kv_heads num_layers num_local_experts num_logits_to_keep
num_nextn_predict_layers num_return_sequences onnx_export onnx_safe out_features out_hidden_size
output_router_logits pad_token_id padded_vocab_size padding_side parallel_attn parallel_block
patch_size pooler_hidden_size pooling_type post_layer_norm post_norm pre_norm pre_seq_len prefix
prefix_projection pretraining_tp problem_type pruned_heads qk_layernorm qk_norm
query_pre_attn_scalar repetition_penalty resid_dropout resid_pdrop residual_multiplier
return_dict return_dict_in_generate rms_norm rms_norm_eps rmsnorm routed_scaling_factor
safe_serialization scale_attn scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth
scale_emb scale_embedding score_function scoring_func self_attn_type sep_token_id seq_aux
shared_expert_gate softmax_in_fp32 softmax_scale spatial_merge_size suppress_tokens temperature
temporal_patch_size tensor_parallel_degree tf_legacy_loss tie_embeddings tie_encoder_decoder
tie_word_embeddings tokenizer_class top_k top_p topk_group topk_method torchscript
training_precision type_vocab_size typical_p use_bfloat16 use_bias use_cache use_cache_kernel
use_cache_quantization use_cautious_attention use_conv_bias use_flash_attention use_flash_attn
use_gated_attention use_kernel_forward use_logn_attn use_mean_pooling use_parallel_residual
use_qk_norm use_qkv_bias use_return_dict use_sliding_window use_xattn v_head_dim version
vocab_size weight_tying window_size word_embed_proj_dim z_loss z_loss_weight
""",
)


def is_irrelevant(key: str) -> bool:
    """Whether a key is known to have no bearing on rotary positions."""
    return key in NAMES or FAMILIES.search(key) is not None
