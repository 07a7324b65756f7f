#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string arguments =
      "Tensor? query_weight, "
      "Tensor? key_weight, "
      "str spec, "
      "Tensor? positions=None, "
      "str layout=\"bshd\", "
      "SymInt offset=0, "
      "float eps=1e-6, "
      "float weight_offset=0.0, "
      "bool centred=False, "
      "bool all_heads=False, "
      "Tensor? query_bias=None, "
      "Tensor? key_bias=None, "
      "Tensor? cos=None, "
      "Tensor? sin=None, "
      "str numerics=\"float32\", "
      "bool round_before_weight=True";
  define(m, "norm_rotary(Tensor query, Tensor key, " + arguments + ") -> (Tensor, Tensor)");
  define(m, "norm_rotary_(Tensor(a!) query, Tensor(b!) key, " + arguments + ") -> ()");
  define(m, "norm_rotary_forward(Tensor query, Tensor key, " + arguments +
                ") -> (Tensor, Tensor, Tensor, Tensor)");
  define(m,
         "norm_rotary_backward("
         "Tensor query_gradient, "
         "Tensor key_gradient, "
         "Tensor query_rstd, "
         "Tensor key_rstd, "
         "Tensor query, "
         "Tensor key, " +
             arguments + ") -> (Tensor, Tensor, Tensor, Tensor)");
}
