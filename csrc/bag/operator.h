// C++ calls of the bag operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/call.h"

namespace posembed::bag {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// Ids, and which of them form a bag.
struct Places {
  const Tensor& ids;           // [bags, size]; or [count], beside offsets
  const MaybeTensor& offsets;  // [bags], where each begins
  int64_t padding_idx = -1;
  bool include_last_offset = false;  // offsets has the end of the last bag too
};

inline Tensor call_token_bag(const Tensor& weight, const Places& places, const MaybeTensor& weights,
                             Text mode, Text gradient = "dense") {
  using Signature = Tensor(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                           Text, int64_t, bool, Text);
  static const auto handle = dispatcher::find<Signature>("posembed::token_bag");
  return handle.call(weight, places.ids, places.offsets, weights, mode, places.padding_idx,
                     places.include_last_offset, gradient);
}

/// The maximum, and the place of each of its elements among the ids (-1: the bag is empty).
inline std::tuple<Tensor, Tensor> call_token_bag_max(const Tensor& weight, const Places& places,
                                                     Text gradient) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                               int64_t, bool, Text);
  static const auto handle = dispatcher::find<Signature>("posembed::token_bag_max");
  return handle.call(weight, places.ids, places.offsets, places.padding_idx,
                     places.include_last_offset, gradient);
}

/// The gradient of the table: `weights` are those of a sum, `maxima` the second result of a
/// maximum.
inline Tensor call_token_bag_backward(const Tensor& gradient, const Places& places,
                                      const MaybeTensor& weights, const MaybeTensor& maxima,
                                      const c10::SymInt& num_embeddings, Text mode) {
  using Signature = Tensor(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                           const MaybeTensor&, c10::SymInt, Text, int64_t, bool);
  static const auto handle = dispatcher::find<Signature>("posembed::token_bag_backward");
  return handle.call(gradient, places.ids, places.offsets, weights, maxima, num_embeddings, mode,
                     places.padding_idx, places.include_last_offset);
}

/// The same gradient as the ids of its touched rows, ascending, and these rows.
inline std::tuple<Tensor, Tensor> call_token_bag_backward_rows(
    const Tensor& gradient, const Places& places, const MaybeTensor& weights,
    const MaybeTensor& maxima, const c10::SymInt& num_embeddings, Text mode) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                               const MaybeTensor&, const MaybeTensor&, c10::SymInt,
                                               Text, int64_t, bool);
  static const auto handle = dispatcher::find<Signature>("posembed::token_bag_backward_rows");
  return handle.call(gradient, places.ids, places.offsets, weights, maxima, num_embeddings, mode,
                     places.padding_idx, places.include_last_offset);
}

/// The gradient of a sum's weights.
inline Tensor call_token_bag_weights_backward(const Tensor& gradient, const Tensor& weight,
                                              const Places& places) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, int64_t, bool);
  static const auto handle = dispatcher::find<Signature>("posembed::token_bag_weights_backward");
  return handle.call(gradient, weight, places.ids, places.offsets, places.padding_idx,
                     places.include_last_offset);
}

}  // namespace posembed::bag
