#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "rotary_cache_("
         "Tensor(a!) query, "
         "Tensor(b!) key, "
         "Tensor value, "
         "Tensor(c!) key_cache, "
         "Tensor(d!) value_cache, "
         "Tensor slot_mapping, "
         "str spec, "
         "Tensor? positions=None, "
         "str layout=\"thd\", "
         "str cache_layout=\"nhd\", "
         "SymInt offset=0, "
         "Tensor(e!)? query_out=None, "
         "bool rotate_key=False, "
         "float key_scale=1.0, "
         "float value_scale=1.0, "
         "Tensor? key_scale_tensor=None, "
         "Tensor? value_scale_tensor=None) -> ()");
  define(m,
         "mla_rotary("
         "Tensor query, "
         "Tensor key_rope, "
         "str spec, "
         "Tensor? positions=None, "
         "str layout=\"bshd\", "
         "SymInt offset=0, "
         "bool inverse=False) -> (Tensor, Tensor)");
  define(m,
         "mla_rotary_cache_("
         "Tensor(a!) query, "
         "Tensor latent, "
         "Tensor key_rope, "
         "Tensor(b!) cache, "
         "Tensor slot_mapping, "
         "str spec, "
         "Tensor? positions=None, "
         "str layout=\"thd\", "
         "SymInt offset=0, "
         "Tensor(c!)? query_out=None, "
         "float scale=1.0, "
         "Tensor? scale_tensor=None) -> ()");
}
