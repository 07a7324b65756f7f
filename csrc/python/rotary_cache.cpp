#include "posembed/rotary_cache.h"

#include <string_view>

#include "bindings.h"
#include "fast_call.h"

namespace posembed::python {
namespace {

using functional::CacheScale;
using MaybeTensor = std::optional<torch::Tensor>;

CacheLayout cache_layout(std::string_view text) {
  for (const CacheLayout known : {CacheLayout::nhd, CacheLayout::hnd}) {
    if (text == posembed::name(known)) return known;
  }
  TORCH_CHECK_VALUE(false, "cache_layout: expected 'nhd' or 'hnd', got '", text, "'");
}

void rotary_cache(const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value,
                  const torch::Tensor& key_cache, const torch::Tensor& value_cache,
                  const torch::Tensor& slot_mapping, const MaybeTensor& positions,
                  std::string_view spec, std::string_view layout, std::string_view pages,
                  int64_t offset, bool rotate_key, const MaybeTensor& query_out,
                  const CacheScale& key_scale, const CacheScale& value_scale) {
  const functional::RotaryCacheCall call{rotary_layout(layout),
                                         cache_layout(pages),
                                         offset,
                                         rotate_key,
                                         query_out,
                                         key_scale,
                                         value_scale};
  const ReleasedForLongWork release(query);
  functional::rotary_cache_(query, key, value, key_cache, value_cache, slot_mapping, positions,
                            spec, call);
}

std::tuple<torch::Tensor, torch::Tensor> mla_rotary(const torch::Tensor& query,
                                                    const torch::Tensor& key_rope,
                                                    const MaybeTensor& positions,
                                                    std::string_view spec, std::string_view layout,
                                                    int64_t offset, bool inverse) {
  functional::RotaryCall call;
  call.layout = rotary_layout(layout);
  call.offset = offset;
  call.inverse = inverse;
  const ReleasedForLongWork release(query);
  return functional::mla_rotary(query, key_rope, positions, spec, call);
}

void mla_rotary_cache(const torch::Tensor& query, const torch::Tensor& latent,
                      const torch::Tensor& key_rope, const torch::Tensor& cache,
                      const torch::Tensor& slot_mapping, const MaybeTensor& positions,
                      std::string_view spec, std::string_view layout, int64_t offset,
                      const MaybeTensor& query_out, const CacheScale& scale) {
  const functional::MlaRotaryCacheCall call{rotary_layout(layout), offset, query_out, scale};
  const ReleasedForLongWork release(query);
  functional::mla_rotary_cache_(query, latent, key_rope, cache, slot_mapping, positions, spec,
                                call);
}

constexpr const char* cache_arguments[] = {
    "query",        "key",        "value",     "key_cache", "value_cache",
    "slot_mapping", "positions",  "spec",      "layout",    "cache_layout",
    "offset",       "rotate_key", "query_out", "key_scale", "value_scale"};
constexpr const char* mla_arguments[] = {"query",  "key_rope", "positions", "spec",
                                         "layout", "offset",   "inverse"};
constexpr const char* mla_cache_arguments[] = {"query",        "latent",    "key_rope", "cache",
                                               "slot_mapping", "positions", "spec",     "layout",
                                               "offset",       "query_out", "scale"};

PyMethodDef rotary_cache_functions[] = {
    fast_method<rotary_cache, cache_arguments>(
        "rotary_cache_",
        "rotary_cache_(query, key, value, key_cache, value_cache, slot_mapping, positions, spec, "
        "layout, cache_layout, offset, rotate_key, query_out, key_scale, value_scale, /) -> None"),
    fast_method<mla_rotary, mla_arguments>(
        "mla_rotary",
        "mla_rotary(query, key_rope, positions, spec, layout, offset, inverse, /) -> "
        "tuple[Tensor, Tensor]"),
    fast_method<mla_rotary_cache, mla_cache_arguments>(
        "mla_rotary_cache_",
        "mla_rotary_cache_(query, latent, key_rope, cache, slot_mapping, positions, spec, layout, "
        "offset, query_out, scale, /) -> None"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_rotary_cache(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), rotary_cache_functions) != 0)
    throw py::error_already_set();
}

}  // namespace posembed::python
