// A cache has no gradient: rotary_cache_ is for inference and throws if a gradient would be lost.
// Which tensors it writes depends on its arguments, so it has a kernel of its own for that.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/inference_only.h"
#include "dispatcher/tangent.h"
#include "rotary_cache/operator.h"

namespace posembed::rotary_cache {
namespace {

void check_inference_only(const Call& call) {
  constexpr const char* alternative = "posembed::rotary_pair";
  const Names names = names_of(call);
  dispatcher::check_inference_only(call.query, "query", alternative);
  dispatcher::check_inference_only(call.key, names.key, alternative);
  dispatcher::check_inference_only(call.value, names.value, alternative);
  dispatcher::check_inference_only(call.key_cache, names.key_cache, alternative);
  dispatcher::check_inference_only(call.value_cache, names.value_cache, alternative);
  if (!call.query_out.has_value()) return;
  dispatcher::check_inference_only(*call.query_out, "query_out", alternative);
}

/// Checks tensors that are written.
void check_versioned(const Call& call) {
  const Names names = names_of(call);
  dispatcher::check_versioned(call.rotated_query(), call.query_out ? "query_out" : "query");
  if (call.rotate_key) dispatcher::check_versioned(call.key, names.key);
  dispatcher::check_versioned(call.key_cache, names.key_cache);
  dispatcher::check_versioned(call.value_cache, names.value_cache);
}

void rotary_cache_autograd(const Call& call) {
  check_inference_only(call);
  check_versioned(call);
  dispatcher::below_autograd([&] { rotary_cache_(call); });
  torch::autograd::impl::bump_version(call.rotated_query());
  if (call.rotate_key) torch::autograd::impl::bump_version(call.key);
  torch::autograd::impl::bump_version(call.key_cache);
  torch::autograd::impl::bump_version(call.value_cache);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) { rotary_cache_.differentiate<rotary_cache_autograd>(m); }

}  // namespace posembed::rotary_cache
