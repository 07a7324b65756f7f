// C++ calls of the relative-bias operators, through the dispatcher as in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "dispatcher/call.h"
#include "dispatcher/spread.h"
#include "posembed/relative_bias.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<RelativeBuckets> {
  static constexpr const char* argument = "kind";
  static constexpr RelativeBuckets values[] = {RelativeBuckets::t5, RelativeBuckets::bert};
};

}  // namespace posembed::dispatcher

namespace posembed::relative_bias {

using at::Tensor;

/// How distances map to buckets, in the order of the schemas.
struct Bucketing {
  int64_t max_distance = 128;
  bool bidirectional = true;
  RelativeBuckets kind = RelativeBuckets::t5;

  template <typename Self>
  static auto fields(Self& self) {
    return std::tie(self.max_distance, self.bidirectional, self.kind);
  }
};

using Buckets = dispatcher::Spread<Bucketing, Tensor(const Tensor&, int64_t)>;

inline Tensor call_buckets(const Tensor& distances, int64_t num_buckets, const Bucketing& by) {
  static const auto handle = dispatcher::find<Buckets::Signature>("posembed::relative_buckets");
  return Buckets::call(handle, distances, num_buckets, by);
}

using MaybeOffset = std::optional<c10::SymInt>;
using Bias = dispatcher::Spread<Bucketing, Tensor(const Tensor&, c10::SymInt, c10::SymInt,
                                                  const MaybeOffset&)>;

inline Tensor call_bias(const Tensor& weight, const c10::SymInt& query_length,
                        const c10::SymInt& key_length, const MaybeOffset& query_offset,
                        const Bucketing& by) {
  static const auto handle = dispatcher::find<Bias::Signature>("posembed::relative_bias");
  return Bias::call(handle, weight, query_length, key_length, query_offset, by);
}

}  // namespace posembed::relative_bias
