// Every operator's schema on one screen. "(a!)" marks a tensor that the operator writes to; such
// operators return nothing, which is what functionalization and Inductor's re-inplacing expect.
// `spec` is the JSON text of a specification: plain numbers that no dtype cast or checkpoint can
// change. Lengths and offsets are SymInt, so that a compiled graph serves every length.
#include <torch/library.h>

// clang-format off
TORCH_LIBRARY(posembed, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  auto define = [&](const char* schema) { m.def(schema, tags); };

  define("rotary(Tensor query, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, bool inverse=False, bool transpose=False) -> Tensor");
  define("rotary_pair(Tensor query, Tensor key, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, bool inverse=False, bool transpose=False) -> (Tensor, Tensor)");
  define("rotary_(Tensor(a!) query, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, bool inverse=False) -> ()");
  define("rotary_pair_(Tensor(a!) query, Tensor(b!) key, Tensor? positions=None, *, str spec, str layout=\"bshd\", SymInt offset=0, bool inverse=False) -> ()");
  define("rotary_frequencies(str spec) -> Tensor");

  define("check_errors() -> ()");
}
// clang-format on
