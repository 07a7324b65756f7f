// The kernels of an optimizer's step on rows of a table. All rules are one formula with numbers of
// their own: what skipped steps owe, a first moment, a second moment of each element or of each
// row, and decoupled weight decay. Each row belongs to one worker, so threads change no bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/cuda_launch.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/philox.h"
#include "core/scalar.h"

namespace posembed::optim {

/// How a bfloat16 weight is rounded.
enum class Store : int8_t { nearest, stochastic, remainder };

/// With a second moment of each element:
///   first = first_decay * first + first_weight * g,  where g = gradient_scale * gradient
///   second = second_decay * second + second_weight * g * g
///   weight = keep * weight - rate * first / (sqrt(second_scale * second) + eps)
/// A second moment of a row takes the mean of its squares. Without a moment, g or 1 stands for it.
struct Numbers {
  double gradient_scale = 1.0;
  double first_decay = 0.0, first_weight = 1.0;
  double second_decay = 0.0, second_weight = 1.0, second_scale = 1.0;
  double eps = 0.0;
  double rate = 0.0;
  double keep = 1.0;
};

struct Arguments {
  void* weight = nullptr;  // [rows, dim], rows weight_stride apart
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0, dim = 0;
  int64_t weight_stride = 0;
  core::IndexView ids;             // [count], ascending; data == nullptr: rows 0, 1, …
  const void* gradient = nullptr;  // [count, dim], rows gradient_stride apart
  int64_t gradient_stride = 0;
  bool wide_gradient = false;  // float32 for a weight in bfloat16
  int64_t count = 0;
  // State in float32 (float64 for float64), contiguous; nullptr: the rule has none.
  void* first = nullptr;   // [rows, dim]
  void* second = nullptr;  // [rows, dim], or [rows] if second_of_rows
  bool second_of_rows = false;
  const void* owed = nullptr;  // [count, 3]: Owed of each row; nullptr: nothing is owed
  Numbers numbers;
  Store store = Store::nearest;
  int16_t* remainder =
      nullptr;            // [rows, dim]: the float32 weight minus `weight`, in its last places
  uint64_t key = 0;       // of random bits
  int64_t first_row = 0;  // of the table among random bits, if it is a shard
  core::DeviceError* error = nullptr;  // CUDA: records rows outside, or not in order
};

/// Steps on rows [begin, end) of `gradient`. Ids must have been checked.
POSEMBED_CPU_KERNEL(step, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Steps on all rows; leaves out a row that is outside the table or not above the one before.
const char* step_cuda(const Arguments& arguments, core::CudaStream stream);

// ------------------------------------------------------------------------------------------ update
// The arithmetic of a step, for CPU and CUDA: the formula of one element, and how it is stored.

/// Whose mean of squares divides the step.
enum class Second : int8_t { none, row, element };

/// Numbers in the type of arithmetic.
template <typename C>
struct Update {
  C gradient_scale, first_decay, first_weight, second_decay, second_weight, second_scale;
  C eps, rate, keep;

  static Update of(const Numbers& n) {
    const auto number = [](double value) { return static_cast<C>(value); };
    return {number(n.gradient_scale),
            number(n.first_decay),
            number(n.first_weight),
            number(n.second_decay),
            number(n.second_weight),
            number(n.second_scale),
            number(n.eps),
            number(n.rate),
            number(n.keep)};
  }
};

/// What skipped steps owe: weight = keep * weight - moved * first, first = decay * first.
template <typename C>
struct Owed {
  C keep, moved, decay;
};

template <typename C>
POSEMBED_INLINE Owed<C> owed_of(const Arguments& a, int64_t index) {
  if (a.owed == nullptr) return {1, 0, 1};
  const C* owed = static_cast<const C*>(a.owed) + 3 * index;
  return {owed[0], owed[1], owed[2]};
}

/// What multiplies a step whose second moment is `second`.
template <typename C>
POSEMBED_INLINE C divisor(const Update<C>& u, C second) {
  return std::sqrt(u.second_scale * second) + u.eps;
}

/// The second moment of a row from the sum of its gradient's squares, and the row's rate.
template <typename C>
POSEMBED_INLINE C rate_of_row(const Update<C>& u, C squares, int64_t dim, C* second) {
  const C mean = u.gradient_scale * u.gradient_scale * squares / static_cast<C>(dim);
  *second = u.second_decay * *second + u.second_weight * mean;
  return u.rate / divisor(u, *second);
}

/// The weight after the step; updates its moments.
template <bool has_first, Second kind, typename C>
POSEMBED_INLINE C updated(const Update<C>& u, const Owed<C>& owed, C rate, C weight, C gradient,
                          C* first, C* second) {
  const C g = u.gradient_scale * gradient;
  C direction = g, kept = owed.keep * weight;
  if constexpr (has_first) {
    kept -= owed.moved * *first;
    direction = u.first_decay * (owed.decay * *first) + u.first_weight * g;
    *first = direction;
  }
  if constexpr (kind == Second::element) {
    *second = u.second_decay * *second + u.second_weight * (g * g);
    direction /= divisor(u, *second);
  }
  return u.keep * kept - rate * direction;
}

/// Random bits of eight neighbouring columns; a row has `blocks` of eight.
POSEMBED_INLINE core::Random4 random_block(const Arguments& a, int64_t row, int64_t block) {
  const int64_t blocks = (a.dim + 7) / 8;
  return core::philox(a.key, static_cast<uint64_t>((a.first_row + row) * blocks + block));
}

/// The 16 bits of column `column` of a block.
POSEMBED_INLINE uint32_t random_half(const core::Random4& random, int64_t column) {
  return random.words[column / 2 % 4] >> 16 * (column % 2) & 0xffffu;
}

/// Rounds up with the probability of the part that is cut off.
POSEMBED_INLINE core::BFloat16 round_randomly(float value, uint32_t half) {
  const uint32_t bits = core::float_bits(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : (bits + half) >> 16)};
}

/// A float32 number as the nearest bfloat16 (a tie away from zero), and the rest of its bits.
POSEMBED_INLINE void split(float value, core::BFloat16* weight, int16_t* remainder) {
  const uint32_t given = core::float_bits(value);
  const uint32_t bits = (given & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : given;
  const uint32_t upper = (bits + 0x8000u) >> 16;
  weight->bits = static_cast<uint16_t>(upper);
  *remainder = static_cast<int16_t>(static_cast<uint16_t>(bits - (upper << 16)));
}

POSEMBED_INLINE float joined(core::BFloat16 weight, int16_t remainder) {
  return core::float_from_bits((uint32_t{weight.bits} << 16) + static_cast<uint32_t>(remainder));
}

/// Calls function(has_first, second) with the moments of a call, as types.
template <typename Function>
void visit_moments(const Arguments& a, const Function& function) {
  using None = std::integral_constant<Second, Second::none>;
  using OfRow = std::integral_constant<Second, Second::row>;
  using OfElement = std::integral_constant<Second, Second::element>;
  const auto with = [&](auto has_first) {
    if (a.second == nullptr) return function(has_first, None{});
    a.second_of_rows ? function(has_first, OfRow{}) : function(has_first, OfElement{});
  };
  a.first == nullptr ? with(std::false_type{}) : with(std::true_type{});
}

/// Calls function(weight, gradient) with the element types of a call.
template <typename Function>
void visit_types(const Arguments& a, const Function& function) {
  using Half = core::Tag<core::BFloat16>;
  if (a.scalar == core::Scalar::float64) return function(core::Tag<double>{}, core::Tag<double>{});
  if (a.scalar == core::Scalar::float32) return function(core::Tag<float>{}, core::Tag<float>{});
  a.wide_gradient ? function(Half{}, core::Tag<float>{}) : function(Half{}, Half{});
}

}  // namespace posembed::optim
