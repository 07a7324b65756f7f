// The one formula of ALiBi, shared by CPU and CUDA: bias = -slope * |query position - key
// position|.
#pragma once

#include <cmath>
#include <cstdint>

#include "alibi/kernel.h"
#include "core/macros.h"
#include "core/scalar.h"

namespace posembed::alibi {

/// The bias of one head as a function of distance = key position - query position: two half-lines
/// that meet at distance 0. `after` also says what happens to future keys: -infinity hides them, 0
/// leaves them alone.
template <typename C>
struct Line {
  C before;
  C after;
};

template <typename C>
POSEMBED_INLINE Line<C> line_of(const Slopes& slopes, const Distances& distances, int64_t head) {
  const auto read = [&](int64_t place) -> C {
    switch (slopes.scalar) {
      case core::Scalar::float64:
        return static_cast<C>(static_cast<const double*>(slopes.data)[place]);
      case core::Scalar::bfloat16:
        return core::load(static_cast<const core::BFloat16*>(slopes.data)[place]);
      case core::Scalar::float16:
        return core::load(static_cast<const core::Float16*>(slopes.data)[place]);
      default:
        return static_cast<const float*>(slopes.data)[place];
    }
  };
  const C before = read(head);
  if (!distances.causal) return {before, -read(head + (slopes.sides - 1) * slopes.heads)};
  return {before, distances.hide_future ? -static_cast<C>(INFINITY) : C(0)};
}

/// Computed from the distance itself, so that it is right at any position: slope * key position, as
/// some models do, has lost its last bits when positions are large.
template <typename C>
POSEMBED_INLINE C bias(Line<C> line, int32_t distance) {
  return (distance > 0 ? line.after : line.before) * static_cast<C>(distance);
}

/// Writes the gradient of one head's slopes from the sums of distance * grad on either side.
POSEMBED_INLINE void store_slope_gradient(Line<double> sum, const ReduceArguments& arguments,
                                          int64_t head) {
  const auto write = [&](double value, int64_t place) {
    switch (arguments.out_scalar) {
      case core::Scalar::float64:
        return core::store(value, static_cast<double*>(arguments.out) + place);
      case core::Scalar::bfloat16:
        return core::store(static_cast<float>(value),
                           static_cast<core::BFloat16*>(arguments.out) + place);
      case core::Scalar::float16:
        return core::store(static_cast<float>(value),
                           static_cast<core::Float16*>(arguments.out) + place);
      default:
        return core::store(static_cast<float>(value), static_cast<float*>(arguments.out) + place);
    }
  };
  write(arguments.sides == 1 ? sum.before + sum.after : sum.before, head);
  if (arguments.sides == 2) write(sum.after, arguments.heads + head);
}

}  // namespace posembed::alibi
