// The backward pass of a part of the tokens. Rotates gradients back in a float32 or float64 buffer
// that stays in the L1 cache, and reads query and key twice. Part of kernel_cpu.cpp.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/block32_sum.h"
#include "core/prefetch.h"
#include "core/stream.h"
#include "rotary/streaming_cpu.h"
#include "rotary_norm/rows_cpu.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

/// The number of heads that take each step together, so that none waits for another's sums.
constexpr int64_t heads_at_once_backward = 2;

/// Whether rows of bfloat16 can be rotated in block order, which differs from memory order.
inline bool rotates_in_block_order(const rotary::Arguments& rotation) {
  return rotation.start % core::block_size == 0 && rotation.pairs % core::block_size == 0;
}

/// Rotates a window of bfloat16 in block order.
template <bool interleaved>
void rotate_in_block_order(const Angles<core::BFloat16>& angles, int64_t pairs, float* window) {
  using kernel::lanes;
  const kernel::AnglesInMemory source(angles);
  for (int64_t slot = 0; slot < pairs; slot += lanes) {
    float* first = window + (interleaved ? 2 * slot : slot);
    float* second = first + (interleaved ? lanes : pairs);
    auto x = core::load_vector<core::Floats>(first), y = core::load_vector<core::Floats>(second);
    source.rotate(&x, &y, slot);
    core::store_vector<false>(x, first);
    core::store_vector<false>(y, second);
  }
}

/// `in_block_order`: see rotates_in_block_order().
template <typename T, bool interleaved, bool in_block_order>
class Backward {
 public:
  using C = Compute<T>;

  explicit Backward(const BackwardArguments& arguments)
      : arguments_(arguments),
        rotation_(arguments.forward.rotation),
        dim_(rotation_.head_dim),
        columns_(core::round_up_to_blocks(dim_)) {
    kernel::order_turns<AngleType, interleaved>(rotation_, &turns_);
    rotate_ = kernel::choose_rotation<C, interleaved, false>(rotation_.pairs);
    for (int64_t r = 0; r < 2; ++r) {
      Row<C> row;
      load_weights<T>(arguments.forward, r, row);
      core::order_values<T>(row, columns_, weights_[r]);
      const HeadView& view = rotation_.views[r];
      const int64_t elements = kernel::elements_of(rotation_, view);
      streaming_[r] = kernel::can_stream<T>(elements, view.out, view.out_stride);
    }
  }

  /// Writes the gradients of a part of the tokens, and the part's sums for the weights' gradients.
  void run(int64_t part) {
    const int64_t tokens = rotation_.batch * rotation_.seq, parts = arguments_.parts;
    for (C* row : sums_) std::fill_n(row, columns_, C(0));
    for (int64_t n = part * tokens / parts; n < (part + 1) * tokens / parts; ++n) {
      Token token{n / rotation_.seq, n % rotation_.seq, false};
      token.rotated = kernel::begin_token<AngleType>(rotation_, turns_, token, &angles_);
      for (int64_t r = 0; r < 2; ++r) {
        const int64_t heads = rotation_.views[r].heads;
        for (int64_t head = 0; head < heads; head += heads_at_once_backward) {
          const int64_t count = std::min(heads - head, heads_at_once_backward);
          through_heads(token, r, head, count, n * heads + head);
        }
      }
    }
    if (streaming_[0] || streaming_[1]) core::stream_fence();
    write_sums(static_cast<C*>(arguments_.partial) + 2 * part * dim_);
  }

 private:
  using AngleType = std::conditional_t<in_block_order, T, C>;  // angles are in this type's order

  void write_sums(C* out) const {
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < columns_; ++i) {
        const int64_t column = i / core::block_size * core::block_size +
                               core::element_of_value<T>(i % core::block_size);
        if (column < dim_) out[r * dim_ + column] = sums_[r][i];
      }
    }
  }

  /// Propagates the gradients of `count` results to query or key. `index`: of the first head's
  /// rstd.
  void through_heads(const Token& token, int64_t r, int64_t head, int64_t count, int64_t index) {
    const HeadView &view = rotation_.views[r], &inputs = arguments_.normed[r];
    const T* input = static_cast<const T*>(inputs.in) + offset_of(token, head, inputs.in_stride);
    const T* result = static_cast<const T*>(view.in) + offset_of(token, head, view.in_stride);
    T* out = static_cast<T*>(view.out) + offset_of(token, head, view.out_stride);
    const C* rstd = static_cast<const C*>(arguments_.forward.rstd[r]) + index;
    for (int64_t k = 0; k < count; ++k) {
      rotate_back(token, result + k * view.in_stride[2], gradient_ + k * columns_);
    }
    C projection[heads_at_once_backward];
    for (int64_t k = 0; k < count; ++k) {
      projection[k] =
          add_to_sums(input + k * inputs.in_stride[2], rstd[k], r, gradient_ + k * columns_);
    }
    for (int64_t k = 0; k < count; ++k) {
      const auto through_norm =
          streaming_[r] ? &Backward::through_norm<true> : &Backward::through_norm<false>;
      (this->*through_norm)(input + k * inputs.in_stride[2], rstd[k], projection[k], r,
                            gradient_ + k * columns_, out + k * view.out_stride[2]);
    }
  }

  /// Reads the gradient of a result, rotates it back and stores it in block order.
  void rotate_back(const Token& token, const T* result, C* gradient) const {
    constexpr bool reorders = std::is_same_v<T, core::BFloat16> && !in_block_order;
    Row<C> row;
    C* target = reorders ? row : gradient;
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      core::prefetch_ahead<core::block_size * sizeof(T)>(result + i);
      if constexpr (reorders) {
        core::load_elements(result + i, count, target + i);
      } else {
        core::store_values(core::load_block(result + i, count), target + i);
      }
    });
    if (token.rotated) rotate(target + rotation_.start);
    if (reorders) core::order_values<T>(target, columns_, gradient);
  }

  void rotate(C* window) const {
    if constexpr (in_block_order) {
      rotate_in_block_order<interleaved>(angles_, rotation_.pairs, window);
    } else {
      rotate_(window, window, 1, 0, 0, angles_, rotation_.pairs, kernel::no_margins);
    }
  }

  /// Adds a head's share to the sums for the weights' gradients. Returns the mean product of the
  /// normalised row and the gradient times the weights.
  C add_to_sums(const T* input, C rstd, int64_t r, const C* gradient) {
    core::Block32<T> products{};
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      core::prefetch_ahead<core::block_size * sizeof(T)>(input + i);
      const core::Block32<T> product =
          core::load_block(input + i, count) * core::load_values<T>(gradient + i);
      core::store_values(core::load_values<T>(sums_[r] + i) + product * rstd, sums_[r] + i);
      products = products + product * core::load_values<T>(weights_[r] + i);
    });
    return core::sum(products) * rstd / static_cast<C>(dim_);
  }

  /// Turns the gradient of a normalised row into that of the row itself.
  template <bool streaming>
  void through_norm(const T* input, C rstd, C projection, int64_t r, const C* gradient,
                    T* out) const {
    constexpr auto size = static_cast<int64_t>(sizeof(T));
    if (streaming) core::expect_stream(out + core::page / size, dim_ * size);
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      const core::Block32<T> of_normed =
          core::load_values<T>(gradient + i) * core::load_values<T>(weights_[r] + i);
      const core::Block32<T> x = core::load_block(input + i, count);
      core::store_block<streaming>((of_normed - x * (projection * rstd)) * rstd, out + i, count);
    });
  }

  const BackwardArguments& arguments_;
  const rotary::Arguments& rotation_;
  const int64_t dim_, columns_;
  kernel::RotateGroup<C> rotate_;
  bool streaming_[2];
  Turns<AngleType> turns_;
  Angles<AngleType> angles_;
  Row<C> weights_[2], sums_[2];                                   // in block order
  alignas(64) C gradient_[heads_at_once_backward * max_columns];  // rows of `columns_`, likewise
};

}  // namespace
}  // namespace posembed::rotary_norm::POSEMBED_ISA
