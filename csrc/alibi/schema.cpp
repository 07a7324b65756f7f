#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "alibi_slopes("
         "int num_heads, "
         "str kind=\"paper\", "
         "float max_bias=8.0, "
         "int? total_heads=None, "
         "int head_start=0, "
         "float[] values=[], "
         "float factor=1.0, "
         "Device? device=None) -> Tensor");
  define(m,
         "alibi_scaled_slopes(Tensor(a) slopes, SymInt key_length, int train_length) -> Tensor(a)");
  define(m, "alibi_positions(Tensor attention_mask) -> Tensor");

  // The fields of alibi::Call, those of a generation step first.
  const std::string call =
      "bool causal=True, "
      "SymInt? query_offset=None, "
      "Tensor? attention_mask=None, "
      "bool positions_from_mask=False, "
      "Tensor? query_positions=None, "
      "Tensor? key_positions=None, "
      "Tensor? cu_seqlens=None, "
      "bool apply_mask=True, "
      "Tensor? query_offsets=None";
  const std::string lengths = "Tensor slopes, SymInt query_length, SymInt key_length, ";
  define(m, "alibi_bias(" + lengths + "ScalarType? dtype=None, " + call + ") -> Tensor");
  define(m, "alibi_bias_out(Tensor(a!) out, " + lengths + call + ") -> ()");
  define(m,
         "alibi_bias_backward("
         "Tensor grad, "
         "bool two_sided=False, "
         "bool by_sample=False, "
         "ScalarType? dtype=None, " +
             call + ") -> Tensor");
  const std::string scores = "Tensor slopes, float scale=1.0, " + call;
  define(m, "alibi_add(Tensor scores, " + scores + ") -> Tensor");
  define(m, "alibi_add_(Tensor(a!) scores, " + scores + ") -> ()");
  define(m, "alibi_softmax(Tensor scores, " + scores + ") -> Tensor");
  define(m, "alibi_softmax_(Tensor(a!) scores, " + scores + ") -> ()");
  define(m,
         "alibi_softmax_backward("
         "Tensor grad, "
         "Tensor weights, "
         "float scale=1.0, "
         "int sides=1, "
         "bool by_sample=False, "
         "ScalarType? dtype=None, " +
             call + ") -> (Tensor, Tensor)");
  define(m,
         "alibi_attention("
         "Tensor query, "
         "Tensor key, "
         "Tensor value, "
         "Tensor slopes, "
         "float? scale=None, "
         "float dropout=0.0, " +
             call + ") -> Tensor");
  define(m,
         "alibi_check_attention(Tensor query, Tensor key, Tensor value, float dropout=0.0) -> ()");
  define(m,
         "alibi_lse_correction("
         "Tensor slopes, "
         "SymInt query_length, "
         "SymInt query_start, "
         "SymInt key_start, "
         "str form=\"distance\", "
         "bool causal=True) -> Tensor");
}
