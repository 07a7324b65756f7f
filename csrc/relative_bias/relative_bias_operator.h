// C++ calls of the relative-bias operators, through the dispatcher as in Python.
#pragma once

#include <optional>

#include "dispatcher/operator.h"
#include "learned/learned_operator.h"
#include "posembed/relative_bias.h"

namespace posembed::dispatcher {

template <>
struct EnumArgument<RelativeBuckets> {
  static constexpr const char* argument = "kind";
  static constexpr const char* names[] = {"t5", "bert", "clipped", "deberta", "band", "grid"};
};

template <>
struct EnumArgument<RelativeMlp> {
  static constexpr const char* argument = "mlp_rule";
  static constexpr const char* names[] = {"swin", "cr"};
};

}  // namespace posembed::dispatcher

namespace posembed::relative_bias {

using at::Tensor;

/// How distances map to buckets, in the order of the schemas.
struct Bucketing {
  int64_t max_distance = 128;
  bool bidirectional = true;
  RelativeBuckets kind = RelativeBuckets::t5;

  POSEMBED_FIELDS(self.max_distance, self.bidirectional, self.kind)
};

/// Those fields in a schema.
inline constexpr const char* bucketing_schema =
    "int max_distance=128, bool bidirectional=True, str kind=\"t5\"";

/// The buckets of distances, int64: distances, num_buckets.
inline const dispatcher::Operator<Tensor(const Tensor&, int64_t), Bucketing> relative_buckets{
    "relative_buckets"};

/// weight, query length, key length, query offset.
using MaybeOffset = std::optional<c10::SymInt>;
inline const dispatcher::Operator<
    Tensor(const Tensor&, c10::SymInt, c10::SymInt, const MaybeOffset&), Bucketing>
    relative_bias{"relative_bias"};

/// The bias of a window in two or three dimensions: a table of its differences, {rows, columns},
/// whether a class token stands before its cells.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymIntArrayRef, bool)>
    relative_window_bias{"relative_window_bias"};

/// That table for another window.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef),
                                  learned::Resample>
    relative_window_resample{"relative_window_resample"};

/// The logarithms of a window's differences, which an MLP maps to a table. The last argument is the
/// window whose largest differences are 1; empty: their natural logarithms, unscaled.
inline const dispatcher::Operator<Tensor(const Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef)>
    relative_log_distances{"relative_log_distances"};

/// A window of rows and columns, or of frames too, whose cells can be counted.
void check_window(c10::SymIntArrayRef window, const char* argument, size_t most_axes = 2);

}  // namespace posembed::relative_bias
