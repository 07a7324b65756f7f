#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string tables =
      "Tensor cos, "
      "Tensor? sin=None, "
      "str layout=\"bhsd\", "
      "bool interleaved=False, "
      "bool half_width=False, "
      "int start=0, "
      "str numerics=\"float32\", "
      "bool transpose=False";
  define(m, "rotary_tables(Tensor query, " + tables + ") -> Tensor");
  define(m, "rotary_tables_pair(Tensor query, Tensor key, " + tables + ") -> (Tensor, Tensor)");
  define(m, "rotary_tables_(Tensor(a!) query, " + tables + ") -> ()");
  define(m, "rotary_tables_pair_(Tensor(a!) query, Tensor(b!) key, " + tables + ") -> ()");
  define(m, "rotary_tables_out(Tensor(a!) out, Tensor query, " + tables + ") -> ()");
  define(m,
         "rotary_tables_pair_out("
         "Tensor(a!) query_out, "
         "Tensor(b!) key_out, "
         "Tensor query, "
         "Tensor key, " +
             tables + ") -> ()");
}
