// The functional interface of the cache: thin wrappers around the operators.
#include "posembed/rotary_cache.h"
#include "rotary_cache/operator.h"

namespace posembed {

const char* name(CacheLayout layout) { return layout == CacheLayout::hnd ? "hnd" : "nhd"; }

namespace functional {
namespace {

double number(const CacheScale& scale) {
  const double* given = std::get_if<double>(&scale);
  return given != nullptr ? *given : 1.0;
}

std::optional<torch::Tensor> tensor(const CacheScale& scale) {
  const torch::Tensor* given = std::get_if<torch::Tensor>(&scale);
  return given != nullptr ? std::optional(*given) : std::nullopt;
}

}  // namespace

torch::Tensor rotary_cache_(const torch::Tensor& query, const torch::Tensor& key,
                            const torch::Tensor& value, const torch::Tensor& key_cache,
                            const torch::Tensor& value_cache, const torch::Tensor& slot_mapping,
                            const std::optional<torch::Tensor>& positions, std::string_view spec,
                            const RotaryCacheCall& call) {
  rotary_cache::call_rotary_cache({query, key, value, key_cache, value_cache, slot_mapping,
                                   positions, call.query_out, std::string(spec), name(call.layout),
                                   name(call.cache_layout), call.offset, call.rotate_key,
                                   number(call.key_scale), number(call.value_scale),
                                   tensor(call.key_scale), tensor(call.value_scale)});
  return call.query_out.value_or(query);
}

std::tuple<torch::Tensor, torch::Tensor> mla_rotary(const torch::Tensor& query,
                                                    const torch::Tensor& key_rope,
                                                    const std::optional<torch::Tensor>& positions,
                                                    std::string_view spec, const RotaryCall& call) {
  return rotary_cache::call_mla_rotary(query, key_rope, positions, spec, name(call.layout),
                                       call.offset, call.inverse);
}

torch::Tensor mla_rotary_cache_(const torch::Tensor& query, const torch::Tensor& latent,
                                const torch::Tensor& key_rope, const torch::Tensor& cache,
                                const torch::Tensor& slot_mapping,
                                const std::optional<torch::Tensor>& positions,
                                std::string_view spec, const MlaRotaryCacheCall& call) {
  rotary_cache::call_mla_rotary_cache(query, latent, key_rope, cache, slot_mapping, positions,
                                      call.query_out, spec, name(call.layout), call.offset,
                                      number(call.scale), tensor(call.scale));
  return call.query_out.value_or(query);
}

}  // namespace functional
}  // namespace posembed
