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
  define(m,
         "relative_window_bias(Tensor weight, SymInt[] window, bool class_token=False) -> Tensor");
  define(m,
         "relative_window_resample("
         "Tensor weight, "
         "SymInt[] window, "
         "SymInt[] new_window, "
         "str method=\"bilinear\", "
         "bool align_corners=False, "
         "bool antialias=False, "
         "float scale_offset=0.0) -> Tensor");
  define(m,
         "relative_log_distances(Tensor like, SymInt[] window, SymInt[] scale_window) -> Tensor");
}
