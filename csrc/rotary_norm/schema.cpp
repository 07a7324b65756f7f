#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string arguments =
      "Tensor query_weight, "
      "Tensor key_weight, "
      "str spec, "
      "Tensor? positions=None, "
      "str layout=\"bshd\", "
      "SymInt offset=0, "
      "float eps=1e-6, "
      "float weight_offset=0.0";
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
