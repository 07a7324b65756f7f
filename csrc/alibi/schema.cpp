#include "dispatcher/schema.h"

// clang-format off
TORCH_LIBRARY_FRAGMENT(posembed, m) {
  const auto define = [&m](const std::string& schema) { posembed::dispatcher::define(m, schema); };
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
}
// clang-format on
