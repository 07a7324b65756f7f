// The functional interface of the cache: thin wrappers around the operators.
#include "posembed/rotary_cache.h"
#include "rotary/rotary_operator.h"
#include "rotary_cache/rotary_cache_operator.h"

namespace posembed {

const char* name(CacheLayout layout) { return layout == CacheLayout::hnd ? "hnd" : "nhd"; }

namespace {

/// The number that the operators count from, where they do not take positions.
template <typename Call>
c10::SymInt first_position(const Call& call) {
  return call.cu_seqlens().has_value() ? c10::SymInt(0) : call.offset().number();
}

double number(const CacheScale& scale) {
  const double* number = std::get_if<double>(&scale);
  return number != nullptr ? *number : 1.0;
}

std::optional<torch::Tensor> tensor(const CacheScale& scale) {
  const torch::Tensor* tensor = std::get_if<torch::Tensor>(&scale);
  return tensor != nullptr ? std::optional(*tensor) : std::nullopt;
}

}  // namespace

torch::Tensor functional::rotary_cache_(const torch::Tensor& query, const torch::Tensor& key,
                                        const torch::Tensor& value, const torch::Tensor& key_cache,
                                        const torch::Tensor& value_cache,
                                        const torch::Tensor& slot_mapping, const RotarySpec& spec,
                                        const RotaryCacheCall& call) {
  const std::string text = spec.to_json();
  rotary_cache::rotary_cache_(
      {query, key, value, key_cache, value_cache, slot_mapping, text,
       rotary::positions_of(call, query, call.cu_seqlens()), call.layout(),
       name(call.cache_layout()), first_position(call), call.query_out(), call.rotate_key(),
       number(call.key_scale()), number(call.value_scale()), tensor(call.key_scale()),
       tensor(call.value_scale()), call.norm().has_value(), call.norm().value_or(QueryKeyNorm())});
  return call.query_out().value_or(query);
}

std::tuple<torch::Tensor, torch::Tensor> functional::mla_rotary(const torch::Tensor& query,
                                                                const torch::Tensor& key_rope,
                                                                const RotarySpec& spec,
                                                                const RotaryCall& call) {
  TORCH_CHECK_VALUE(!call.frequencies() && !call.seq_len(),
                    "call: expected no frequencies or seq_len for mla_rotary");
  RotaryCall rotary_call = call;
  rotary_call.positions(rotary::positions_of(call, query, call.cu_seqlens()))
      .offset(first_position(call))
      .cu_seqlens(std::nullopt);
  return rotary_cache::mla_rotary(query, key_rope, {spec.to_json(), std::move(rotary_call)});
}

torch::Tensor functional::mla_rotary_cache_(const torch::Tensor& query, const torch::Tensor& latent,
                                            const torch::Tensor& key_rope,
                                            const torch::Tensor& cache,
                                            const torch::Tensor& slot_mapping,
                                            const RotarySpec& spec,
                                            const MlaRotaryCacheCall& call) {
  const std::string text = spec.to_json();
  rotary_cache::mla_rotary_cache_({query, latent, key_rope, cache, slot_mapping, text,
                                   rotary::positions_of(call, query, call.cu_seqlens()),
                                   call.layout(), first_position(call), call.query_out(),
                                   number(call.scale()), tensor(call.scale())});
  return call.query_out().value_or(query);
}

}  // namespace posembed
