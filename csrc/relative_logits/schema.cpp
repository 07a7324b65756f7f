#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string factors =
      "Tensor query, Tensor table, Tensor rows, float scale=1.0, bool by_key=False";
  define(m, "relative_logits(" + factors + ", Tensor? scores=None) -> Tensor");
  define(m, "relative_logits_(Tensor(a!) scores, " + factors + ") -> ()");
  define(m, "relative_logits_backward(Tensor gradient, " + factors +
                ", bool query_gradient=True, bool table_gradient=True) -> (Tensor, Tensor)");
  define(m,
         "relative_rows("
         "Tensor like, "
         "SymInt query_length, "
         "SymInt key_length, "
         "int[] num_buckets, "
         "int max_distance=128, "
         "bool bidirectional=True, "
         "str kind=\"t5\", "
         "bool causal=False, "
         "SymInt? query_offset=None, "
         "Tensor? attention_mask=None, "
         "bool positions_from_mask=False, "
         "Tensor? query_positions=None, "
         "Tensor? key_positions=None, "
         "Tensor? cu_seqlens=None, "
         "bool apply_mask=True, "
         "Tensor? query_offsets=None) -> Tensor");
}
