// The bag operators, as C++ code calls them and as their kernels are registered.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include "dispatcher/operator.h"
#include "posembed/bag.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<BagMode> {
  static constexpr const char* argument = "mode";
  static constexpr const char* names[] = {"sum", "mean", "max"};
};

}  // namespace posembed::dispatcher

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

  POSEMBED_FIELDS(self.ids, self.offsets, self.padding_idx, self.include_last_offset)
};

/// Operators that take a Bag after the arguments of `Function`, and `Trailing` after it.
template <typename Function, typename... Trailing>
using Operator = dispatcher::Operator<Function, Bag, Trailing...>;

/// The sum, mean or maximum of each bag: mode, weights of a sum, form of the table's gradient.
inline const Operator<Tensor(const Tensor&), Text, const MaybeTensor&, Text> token_bag{"token_bag"};

/// The maximum, and the index of each of its elements among the ids (-1: the bag is empty).
inline const Operator<std::tuple<Tensor, Tensor>(const Tensor&), Text> token_bag_max{
    "token_bag_max"};

/// The table's gradient. Its last arguments are mode, the weights of a sum, and the second result
/// of a maximum.
template <typename Result>
using Backward =
    Operator<Result(const Tensor&, c10::SymInt), Text, const MaybeTensor&, const MaybeTensor&>;
inline const Backward<Tensor> token_bag_backward{"token_bag_backward"};

/// The same as the ids of touched rows, ascending, and these rows.
inline const Backward<std::tuple<Tensor, Tensor>> token_bag_backward_rows{
    "token_bag_backward_rows"};

/// The gradient of a sum's weights, from that of the sum and the table.
inline const Operator<Tensor(const Tensor&, const Tensor&)> token_bag_weights_backward{
    "token_bag_weights_backward"};

}  // namespace posembed::bag
