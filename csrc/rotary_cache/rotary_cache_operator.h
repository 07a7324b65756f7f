// The operators that write rotated keys to a paged cache, as C++ code calls them and as their
// kernels are registered. Their long list of arguments becomes one struct.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "dispatcher/operator.h"
#include "posembed/rotary_cache.h"
#include "posembed/rotary_norm.h"
#include "rotary/rotary_operator.h"

namespace posembed::rotary_cache {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// The cache_layout that mla_rotary_cache_ passes to rotary_cache_ to identify itself.
inline constexpr const char* latent_layout = "latent";

/// The user's names for the arguments, for error messages.
struct Names {
  const char *function, *key, *value, *key_cache, *value_cache, *key_scale, *value_scale;
};

/// Arguments of rotary_cache_, in the order of its schema. Refers to the texts, which must outlive
/// it.
struct Call {
  Tensor query;           // in `layout`
  Tensor key;             // the same with any number of heads, or only the rotated window
  Tensor value;           // the key's heads, any head_dim
  Tensor key_cache;       // in `cache_layout`: the data's dtype or float8_e4m3fn
  Tensor value_cache;     // the same
  Tensor slot_mapping;    // int [tokens] or [batch, seq]; -1: not written
  Text spec;              // RotarySpec::to_json()
  MaybeTensor positions;  // [seq], [batch, seq] or [tokens]; none: offset, offset + 1, …
  Layout layout = Layout::thd;
  Text cache_layout = "nhd";  // latent_layout: as nhd, in a call of mla_rotary_cache_
  Offset offset = 0;          // a number
  MaybeTensor query_out;      // none: query in place
  bool rotate_key = false;    // also rotate the key in place
  double key_scale = 1.0;     // float8: the divisor of keys
  double value_scale = 1.0;
  MaybeTensor key_scale_tensor;  // instead of the numbers: float32, one element
  MaybeTensor value_scale_tensor;
  bool normed = false;  // normalise query and key first
  QueryKeyNorm norm;

  POSEMBED_FIELDS(self.query, self.key, self.value, self.key_cache, self.value_cache,
                  self.slot_mapping, self.spec, self.positions, self.layout, self.cache_layout,
                  self.offset, self.query_out, self.rotate_key, self.key_scale, self.value_scale,
                  self.key_scale_tensor, self.value_scale_tensor, self.normed,
                  self.norm.query_weight(), self.norm.key_weight(), self.norm.eps(),
                  self.norm.weight_offset(), self.norm.centred(), self.norm.all_heads(),
                  self.norm.query_bias(), self.norm.key_bias())

  /// The tensor that receives the rotated query.
  const Tensor& rotated_query() const { return query_out.has_value() ? *query_out : query; }
};

inline Names names_of(const Call& call) {
  if (call.cache_layout == latent_layout) {
    return {"mla_rotary_cache_", "key_rope", "latent", "cache", "cache", "scale", "scale"};
  }
  return {"rotary_cache_", "key", "value", "key_cache", "value_cache", "key_scale", "value_scale"};
}

/// The rotation of a call, which must outlive it.
inline rotary::Rotation rotation_of(const Call& call) {
  RotaryCall rotation;
  rotation.positions(call.positions).offset(call.offset).layout(call.layout);
  return {call.spec, std::move(rotation)};
}

inline const dispatcher::Operator<void(), Call> rotary_cache_{"rotary_cache_"};

/// Arguments of mla_rotary, of which it passes most on. Refers to the text.
struct LatentRotation {
  Text spec;
  RotaryCall call;

  POSEMBED_FIELDS(self.spec, self.call.positions(), self.call.layout(), self.call.offset(),
                  self.call.inverse())
};

inline const dispatcher::Operator<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&),
                                  LatentRotation>
    mla_rotary{"mla_rotary"};

/// Arguments of mla_rotary_cache_, in the order of its schema. Refers to the text.
struct LatentCall {
  Tensor query, latent, key_rope, cache, slot_mapping;
  Text spec;
  MaybeTensor positions;
  Layout layout = Layout::thd;
  Offset offset = 0;
  MaybeTensor query_out;
  double scale = 1.0;
  MaybeTensor scale_tensor;

  POSEMBED_FIELDS(self.query, self.latent, self.key_rope, self.cache, self.slot_mapping, self.spec,
                  self.positions, self.layout, self.offset, self.query_out, self.scale,
                  self.scale_tensor)
};

inline const dispatcher::Operator<void(), LatentCall> mla_rotary_cache_{"mla_rotary_cache_"};

}  // namespace posembed::rotary_cache
