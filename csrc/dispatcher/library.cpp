// Every operator's schema on one screen. "(a!)" marks a tensor that the operator writes to; such
// operators return nothing, which is what functionalization and Inductor's re-inplacing expect.
// `spec` is the JSON text of a specification: numbers that no dtype cast can change. Lengths and
// offsets are SymInt, so that a compiled graph serves every length. Operators without tensor
// arguments take a device, as FakeTensorMode requires.
#include <torch/library.h>

#include <string>
#include <vector>

// clang-format off
TORCH_LIBRARY(posembed, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  auto define = [&](const std::string& schema) { m.def(schema.c_str(), tags); };

  const std::string rotation = "Tensor? positions=None, Tensor? frequencies=None, Tensor? cu_seqlens=None, *, str spec, str layout=\"bshd\", SymInt offset=0, bool inverse=False, bool transpose=False";
  define("rotary(Tensor query, " + rotation + ") -> Tensor");
  define("rotary_pair(Tensor query, Tensor key, " + rotation + ") -> (Tensor, Tensor)");
  define("rotary_(Tensor(a!) query, " + rotation + ") -> ()");
  define("rotary_pair_(Tensor(a!) query, Tensor(b!) key, " + rotation + ") -> ()");
  define("rotary_out(Tensor(a!) out, Tensor query, " + rotation + ") -> ()");
  define("rotary_pair_out(Tensor(a!) query_out, Tensor(b!) key_out, Tensor query, Tensor key, " + rotation + ") -> ()");
  define("rotary_tangent(Tensor rotated, " + rotation + ") -> Tensor");
  define("rotary_frequencies_backward(Tensor gradient, Tensor query, " + rotation + ") -> Tensor");
  define("rotary_frequencies(str spec, *, Device? device=None) -> Tensor");
  define("rotary_attention_factor(str spec) -> float");
  define("rotary_specification(str spec) -> str");
  define("rotary_resolve(str spec, int seq_len) -> str");
  define("rotary_for_keys(str spec) -> str");
  define("rotary_description(str spec) -> str");
  define("rotary_explanation(str spec, int? seq_len=None) -> str");
  define("rotary_difference(str spec, str other) -> str");
  define("rotary_wavelengths(str spec, *, Device? device=None) -> Tensor");
  define("rotary_rerotate_(Tensor(a!) key, Tensor old_positions, Tensor new_positions, Tensor? frequencies=None, *, str spec, str? new_spec=None, str layout=\"bshd\") -> ()");
  define("rotary_permute_weight(Tensor weight, int num_heads, *, bool interleaved, int? rotary_dim=None, int rotary_start=0, int[]? heads=None) -> Tensor");
  define("rotary_sections(int[] sizes, bool interleaved) -> int[]");

  const std::string norm_rotary = "Tensor key, Tensor query_weight, Tensor key_weight, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, float eps=1e-6, float weight_offset=0.0";
  define("norm_rotary(Tensor query, " + norm_rotary + ") -> (Tensor, Tensor)");
  define("norm_rotary_forward(Tensor query, " + norm_rotary + ") -> (Tensor, Tensor, Tensor, Tensor)");
  define("norm_rotary_backward(Tensor query_gradient, Tensor key_gradient, Tensor query_rstd, Tensor key_rstd, Tensor query, " + norm_rotary + ") -> (Tensor, Tensor, Tensor, Tensor)");
  define("norm_rotary_(Tensor(a!) query, Tensor(b!) key, Tensor query_weight, Tensor key_weight, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, float eps=1e-6, float weight_offset=0.0) -> ()");
  define("rotary_cache_(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor(c!) key_cache, Tensor(d!) value_cache, Tensor slot_mapping, Tensor? positions=None, Tensor(e!)? query_out=None, *, str spec, str layout=\"thd\", str cache_layout=\"nhd\", SymInt offset=0, bool rotate_key=False, float key_scale=1.0, float value_scale=1.0, Tensor? key_scale_tensor=None, Tensor? value_scale_tensor=None) -> ()");
  define("mla_rotary(Tensor query, Tensor key_rope, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, bool inverse=False) -> (Tensor, Tensor)");
  define("mla_rotary_cache_(Tensor(a!) query, Tensor latent, Tensor key_rope, Tensor(b!) cache, Tensor slot_mapping, Tensor? positions=None, Tensor(c!)? query_out=None, *, str spec, str layout=\"thd\", SymInt offset=0, float scale=1.0, Tensor? scale_tensor=None) -> ()");

  define("embedding(Tensor weight, Tensor ids, *, int padding_idx=-1, float scale=1.0, bool scale_grad_by_freq=False, str gradient=\"dense\", int vocabulary_start=-1) -> Tensor");
  define("embedding_backward(Tensor gradient, Tensor ids, *, SymInt num_embeddings, int padding_idx=-1, float scale=1.0, bool scale_grad_by_freq=False, int vocabulary_start=-1) -> Tensor");
  define("embedding_backward_rows(Tensor gradient, Tensor ids, *, SymInt num_embeddings, int padding_idx=-1, float scale=1.0, bool scale_grad_by_freq=False, int vocabulary_start=-1) -> (Tensor, Tensor)");

  define("embedding_resize(Tensor weight, int num_embeddings, Tensor? rows=None, *, str initialization=\"mean\", float covariance_scale=1e-9, Generator? generator=None) -> Tensor");

  const std::string bag_places = "Tensor ids, Tensor? offsets=None, ";
  const std::string bags = "int padding_idx=-1, bool include_last_offset=False";
  define("token_bag(Tensor weight, " + bag_places + "Tensor? weights=None, *, str mode=\"sum\", " + bags + ", str gradient=\"dense\") -> Tensor");
  define("token_bag_max(Tensor weight, " + bag_places + "*, " + bags + ", str gradient=\"dense\") -> (Tensor, Tensor)");
  const std::string bag_backward = bag_places + "Tensor? weights=None, Tensor? maxima=None, *, SymInt num_embeddings, str mode=\"sum\", " + bags;
  define("token_bag_backward(Tensor gradient, " + bag_backward + ") -> Tensor");
  define("token_bag_backward_rows(Tensor gradient, " + bag_backward + ") -> (Tensor, Tensor)");
  define("token_bag_weights_backward(Tensor gradient, Tensor weight, " + bag_places + "*, " + bags + ") -> Tensor");

  define("learned_add(Tensor x, Tensor weight, Tensor? positions=None, *, SymInt offset=0, int first_row=0) -> Tensor");
  define("learned_encode(Tensor weight, Tensor positions, *, int first_row=0) -> Tensor");
  define("learned_extend(Tensor weight, int max_positions, *, int first_row=0, str method=\"linear\") -> Tensor");
  define("learned_positions(Tensor mask, *, SymInt past=0, SymInt skip=0) -> Tensor");
  define("learned_backward(Tensor gradient, Tensor? positions=None, *, SymInt rows, SymInt offset=0, int first_row=0) -> Tensor");

  define("sinusoidal_add(Tensor x, Tensor? positions=None, Tensor? scale=None, *, str spec, SymInt offset=0) -> Tensor");
  define("sinusoidal_encode(Tensor positions, Tensor? scale=None, *, str spec, int order=0, ScalarType? dtype=None) -> Tensor");
  define("sinusoidal_frequencies(str spec, *, Device? device=None) -> Tensor");
  define("sinusoidal_shift_matrix(float distance, *, str spec) -> Tensor");
  define("sinusoidal_permutation(str spec, str other) -> Tensor");
  define("sinusoidal_specification(str spec) -> str");

  define("alibi_slopes(int num_heads, *, str kind=\"press\", float max_bias=8.0, int? total_heads=None, int head_start=0, float[] values=[], float factor=1.0, Device? device=None) -> Tensor");
  define("alibi_positions(Tensor attention_mask) -> Tensor");
  const std::string places = "Tensor? query_positions=None, Tensor? key_positions=None, Tensor? cu_seqlens=None, Tensor? attention_mask=None, *, SymInt? query_offset=None, bool causal=True, ";
  const std::string scores = "Tensor slopes, " + places + "bool hide=True, float scale=1.0) -> ";
  define("alibi_bias(Tensor slopes, SymInt query_length, SymInt key_length, " + places + "bool hide=True, ScalarType? dtype=None) -> Tensor");
  define("alibi_bias_out(Tensor(a!) out, Tensor slopes, SymInt query_length, SymInt key_length, " + places + "bool hide=True) -> ()");
  define("alibi_bias_backward(Tensor grad, " + places + "bool two_sided=False, ScalarType? dtype=None) -> Tensor");
  define("alibi_add(Tensor scores, " + scores + "Tensor");
  define("alibi_add_(Tensor(a!) scores, " + scores + "()");
  define("alibi_softmax(Tensor scores, " + scores + "Tensor");
  define("alibi_softmax_(Tensor(a!) scores, " + scores + "()");
  define("alibi_softmax_backward(Tensor grad, Tensor weights, " + places + "bool hide=True, float scale=1.0, int sides=1, ScalarType? dtype=None) -> (Tensor, Tensor)");
  define("alibi_lse_correction(Tensor slopes, SymInt query_length, *, SymInt query_start, SymInt key_start, str form=\"distance\", bool causal=True) -> Tensor");

  const std::string input = "Tensor token, Tensor ids, Tensor? position=None, Tensor? positions=None, Tensor? token_type=None, Tensor? types=None, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor? seed=None, *, SymInt offset=0, int first_row=0, str sinusoid=\"\", str norm=\"none\", float eps=1e-5, float scale=1.0, float dropout=0.0, int padding_idx=-1, int position_padding_idx=-1, str gradient=\"dense\", SymInt first_token=0";
  define("input_embedding(" + input + ") -> Tensor");
  define("input_embedding_forward(" + input + ") -> (Tensor, Tensor, Tensor)");
  define("input_embedding_backward(Tensor output_gradient, Tensor mean, Tensor rstd, " + input + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("input_embedding_backward_rows(Tensor output_gradient, Tensor mean, Tensor rstd, " + input + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define("input_dropout(Tensor x, Tensor seed, *, float probability, SymInt first=0) -> Tensor");

  define("check_errors(bool wait=True) -> ()");
}
// clang-format on
