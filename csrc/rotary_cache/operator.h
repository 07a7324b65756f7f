// How C++ code calls the operators that write rotated keys to a paged cache: through the
// dispatcher, as Python does. Their long list of arguments becomes one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/call.h"
#include "rotary/operator.h"

namespace posembed::rotary_cache {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// The cache_layout by which rotary_cache_ knows that mla_rotary_cache_ calls it.
inline constexpr const char* latent_layout = "latent";

/// What errors call the arguments, as the user knows them.
struct Names {
  const char *function, *key, *value, *key_cache, *value_cache, *key_scale, *value_scale;
};

/// Arguments of rotary_cache_, in the order of its schema.
struct Call {
  Tensor query;           // in `layout`
  Tensor key;             // the same with other heads, or the rotated window alone
  Tensor value;           // the key's heads, any head_dim
  Tensor key_cache;       // in `cache_layout`: the data's dtype or float8_e4m3fn
  Tensor value_cache;     // the same
  Tensor slot_mapping;    // int [tokens] or [batch, seq]; -1: not kept
  MaybeTensor positions;  // int [seq], [batch, seq] or [tokens]; none: offset, offset + 1, …
  MaybeTensor query_out;  // none: query in place
  std::string spec;       // RotarySpec::to_json()
  std::string layout = "thd";
  std::string cache_layout = "nhd";  // latent_layout: as nhd, in a call of mla_rotary_cache_
  c10::SymInt offset = 0;
  bool rotate_key = false;  // the key also in place
  double key_scale = 1.0;   // float8: what keys are divided by
  double value_scale = 1.0;
  MaybeTensor key_scale_tensor;  // instead of the numbers: float32, one element
  MaybeTensor value_scale_tensor;

  /// The tensor that gets the rotated query.
  const Tensor& rotated_query() const { return query_out.has_value() ? *query_out : query; }
};

inline Names names_of(const Call& call) {
  if (call.cache_layout == latent_layout) {
    return {"mla_rotary_cache_", "key_rope", "latent", "cache", "cache", "scale", "scale"};
  }
  return {"rotary_cache_", "key", "value", "key_cache", "value_cache", "key_scale", "value_scale"};
}

/// The rotation of a call. Only references to the call.
inline rotary::Rotation rotation_of(const Call& call) {
  static const MaybeTensor none;
  return {call.positions, none, none, call.spec, call.layout, call.offset};
}

/// Turns a kernel that takes the struct into one with a parameter for each of its fields.
template <void (*kernel)(const Call&)>
struct Spread {
  static void call(const Tensor& query, const Tensor& key, const Tensor& value,
                   const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
                   const MaybeTensor& positions, const MaybeTensor& query_out, Text spec,
                   Text layout, Text cache_layout, c10::SymInt offset, bool rotate_key,
                   double key_scale, double value_scale, const MaybeTensor& key_scale_tensor,
                   const MaybeTensor& value_scale_tensor) {
    kernel({query, key, value, key_cache, value_cache, slot_mapping, positions, query_out,
            std::string(spec), std::string(layout), std::string(cache_layout), std::move(offset),
            rotate_key, key_scale, value_scale, key_scale_tensor, value_scale_tensor});
  }
};

using RotaryCache = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const Tensor&, const MaybeTensor&, const MaybeTensor&, Text, Text, Text,
                         c10::SymInt, bool, double, double, const MaybeTensor&, const MaybeTensor&);

inline void call_rotary_cache(const Call& call) {
  static const auto handle = dispatcher::find<RotaryCache>("posembed::rotary_cache_");
  handle.call(call.query, call.key, call.value, call.key_cache, call.value_cache, call.slot_mapping,
              call.positions, call.query_out, call.spec, call.layout, call.cache_layout,
              call.offset, call.rotate_key, call.key_scale, call.value_scale, call.key_scale_tensor,
              call.value_scale_tensor);
}

using MlaRotary = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&, Text,
                                             Text, c10::SymInt, bool);

template <typename... Given>
std::tuple<Tensor, Tensor> call_mla_rotary(Given&&... given) {
  static const auto handle = dispatcher::find<MlaRotary>("posembed::mla_rotary");
  return handle.call(std::forward<Given>(given)...);
}

using MlaRotaryCache = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const Tensor&, const MaybeTensor&, const MaybeTensor&, Text, Text,
                            c10::SymInt, double, const MaybeTensor&);

template <typename... Given>
void call_mla_rotary_cache(Given&&... given) {
  static const auto handle = dispatcher::find<MlaRotaryCache>("posembed::mla_rotary_cache_");
  handle.call(std::forward<Given>(given)...);
}

}  // namespace posembed::rotary_cache
