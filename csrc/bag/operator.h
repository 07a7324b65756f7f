// C++ calls of the bag operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"

namespace posembed::bag {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Text = std::string_view;

/// Ids and their division into bags, in the order of the schemas.
struct Bag {
  Tensor ids;           // [bags, size]; or [count], with offsets
  MaybeTensor offsets;  // [bags]: where each bag begins
  int64_t padding_idx = -1;
  bool include_last_offset = false;  // offsets has the end of the last bag too

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.ids, self.offsets, self.padding_idx, self.include_last_offset);
  }
};

/// Operators that take a Bag after the arguments of `Function`, and `Trailing` after it.
template <typename Function, typename... Trailing>
using Spread = dispatcher::Spread<Bag, Function, Trailing...>;

using TokenBag = Spread<Tensor(const Tensor&), Text, const MaybeTensor&, Text>;

inline Tensor call_token_bag(const Tensor& weight, const Bag& bag, Text mode,
                             const MaybeTensor& weights, Text gradient = "dense") {
  static const auto handle = dispatcher::find<TokenBag::Signature>("posembed::token_bag");
  return TokenBag::call(handle, weight, bag, mode, weights, gradient);
}

using TokenBagMax = Spread<std::tuple<Tensor, Tensor>(const Tensor&), Text>;

/// The maximum, and the place of each of its elements among the ids (-1: the bag is empty).
inline std::tuple<Tensor, Tensor> call_token_bag_max(const Tensor& weight, const Bag& bag,
                                                     Text gradient) {
  static const auto handle = dispatcher::find<TokenBagMax::Signature>("posembed::token_bag_max");
  return TokenBagMax::call(handle, weight, bag, gradient);
}

/// The arguments of the table's gradient: `weights` are those of a sum, `maxima` the second result
/// of a maximum.
template <typename Result>
using BagBackward =
    Spread<Result(const Tensor&, c10::SymInt), Text, const MaybeTensor&, const MaybeTensor&>;
using TokenBagBackward = BagBackward<Tensor>;
using TokenBagBackwardRows = BagBackward<std::tuple<Tensor, Tensor>>;

inline Tensor call_token_bag_backward(const Tensor& gradient, const c10::SymInt& num_embeddings,
                                      const Bag& bag, Text mode, const MaybeTensor& weights,
                                      const MaybeTensor& maxima) {
  static const auto handle =
      dispatcher::find<TokenBagBackward::Signature>("posembed::token_bag_backward");
  return TokenBagBackward::call(handle, gradient, num_embeddings, bag, mode, weights, maxima);
}

/// The same gradient as the ids of its touched rows, ascending, and these rows.
inline std::tuple<Tensor, Tensor> call_token_bag_backward_rows(const Tensor& gradient,
                                                               const c10::SymInt& num_embeddings,
                                                               const Bag& bag, Text mode,
                                                               const MaybeTensor& weights,
                                                               const MaybeTensor& maxima) {
  static const auto handle =
      dispatcher::find<TokenBagBackwardRows::Signature>("posembed::token_bag_backward_rows");
  return TokenBagBackwardRows::call(handle, gradient, num_embeddings, bag, mode, weights, maxima);
}

using TokenBagWeightsBackward = Spread<Tensor(const Tensor&, const Tensor&)>;

/// The gradient of a sum's weights.
inline Tensor call_token_bag_weights_backward(const Tensor& gradient, const Tensor& weight,
                                              const Bag& bag) {
  static const auto handle =
      dispatcher::find<TokenBagWeightsBackward::Signature>("posembed::token_bag_weights_backward");
  return TokenBagWeightsBackward::call(handle, gradient, weight, bag);
}

}  // namespace posembed::bag
