#include "dispatcher/schema.h"

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string rotation =
      "str spec, "
      "Tensor? positions=None, "
      "str layout=\"bshd\", "
      "SymInt offset=0, "
      "bool inverse=False, "
      "Tensor? cu_seqlens=None, "
      "Tensor? frequencies=None, "
      "bool transpose=False";
  define(m, "rotary(Tensor query, " + rotation + ") -> Tensor");
  define(m, "rotary_pair(Tensor query, Tensor key, " + rotation + ") -> (Tensor, Tensor)");
  define(m, "rotary_(Tensor(a!) query, " + rotation + ") -> ()");
  define(m, "rotary_pair_(Tensor(a!) query, Tensor(b!) key, " + rotation + ") -> ()");
  define(m, "rotary_out(Tensor(a!) out, Tensor query, " + rotation + ") -> ()");
  define(m, "rotary_pair_out(Tensor(a!) query_out, Tensor(b!) key_out, Tensor query, Tensor key, " +
                rotation + ") -> ()");
  define(m, "rotary_tangent(Tensor rotated, " + rotation + ") -> Tensor");
  define(m,
         "rotary_frequencies_backward(Tensor gradient, Tensor query, " + rotation + ") -> Tensor");
  define(m,
         "rotary_rerotate_("
         "Tensor(a!) key, "
         "Tensor old_positions, "
         "Tensor new_positions, "
         "str spec, "
         "str? new_spec=None, "
         "str layout=\"bshd\", "
         "Tensor? frequencies=None) -> ()");
  define(m,
         "rotary_permute_weight("
         "Tensor weight, "
         "int num_heads, "
         "bool interleaved, "
         "int? rotary_dim=None, "
         "int rotary_start=0, "
         "int[]? heads=None) -> Tensor");
  define(m, "rotary_frequencies(str spec, Device? device=None) -> Tensor");
  define(m, "rotary_wavelengths(str spec, Device? device=None) -> Tensor");
  define(m, "rotary_attention_factor(str spec) -> float");
  define(m, "rotary_specification(str spec) -> str");
  define(m, "rotary_resolve(str spec, int seq_len) -> str");
  define(m, "rotary_for_keys(str spec) -> str");
  define(m, "rotary_description(str spec) -> str");
  define(m, "rotary_explanation(str spec, int? seq_len=None, int? max_positions=None) -> str");
  define(m, "rotary_float32_error(str spec, int length) -> (float, int)");
  define(m, "rotary_difference(str spec, str other) -> str");
  define(m, "rotary_axial(str[] axes, bool within_axes=True) -> str");
  define(m,
         "rotary_preset("
         "str name, "
         "int? head_dim=None, "
         "int[]? axes=None, "
         "float? base=None, "
         "float[]? ntk=None) -> str");
  define(m,
         "score_scale("
         "Tensor positions, "
         "float factor, "
         "float growth, "
         "float length, "
         "int offset, "
         "bool logn) -> Tensor");
  define(m, "rotary_sections(int[] sizes, bool interleaved) -> int[]");
}
