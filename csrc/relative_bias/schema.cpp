#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "relative_buckets("
         "Tensor distances, "
         "int num_buckets, "
         "int max_distance=128, "
         "bool bidirectional=True, "
         "str kind=\"t5\") -> Tensor");
  define(m,
         "relative_bias("
         "Tensor weight, "
         "SymInt query_length, "
         "SymInt key_length, "
         "SymInt? query_offset=None, "
         "int max_distance=128, "
         "bool bidirectional=True, "
         "str kind=\"t5\") -> Tensor");
}
