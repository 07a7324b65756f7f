// Rows of QK-norm on the CPU, and all its norms and rotations. Included by CPU kernels of
// rotary_norm and rotary_cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/block32.h"
#include "core/block32_sum.h"
#include "rotary/rotary.h"
#include "rotary/rotary_angles_cpu.h"
#include "rotary/rotary_walks_cpu.h"
#include "rotary_norm/rotary_norm.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

namespace kernel = rotary::POSEMBED_ISA;

using core::Compute;
using kernel::Angles;
using kernel::Token;
using kernel::TokenOrder;
using kernel::Turns;
using rotary::HeadView;

constexpr int64_t max_columns = max_head_dim + core::block_size;

/// A row with room for whole blocks that start at any column.
template <typename C>
using Row = C[max_columns];

/// Reads `count` weights or biases. `missing`: their value if there are none.
template <typename C>
void load_parameters(const Arguments& arguments, const void* data, int64_t count, double offset,
                     C missing, C* out) {
  if (data == nullptr) return void(std::fill_n(out, count, missing));
  core::visit_scalar(arguments.parameter_scalar, [&](auto tag) {
    const auto* const values = static_cast<const typename decltype(tag)::type*>(data);
    const C added = static_cast<C>(offset);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<C>(core::load(values[i])) + added;
  });
}

/// The factors of columns: the weights plus their common offset, then a block of zeros.
template <typename T>
void load_weights(const Arguments& arguments, int64_t r, Row<Compute<T>>& row) {
  using C = Compute<T>;
  const int64_t dim = arguments.rotation.head_dim;
  load_parameters(arguments, arguments.weight[r], dim, arguments.weight_offset, C(1), &row[0]);
  std::fill_n(row + dim, core::block_size, C(0));
}

// ----------------------------------------------------------------------------------------- general
// Norms that the forward pass in rotary_norm_cpu.cpp does not have, and rotations by tables: each
// head of a token is normalised and rotated in a row of float32 or float64 that stays in the L1
// cache, with the roundings of a PyTorch program if wanted.

/// Rounds each number to T.
template <typename T>
void round_row(int64_t count, Compute<T>* row) {
  for (int64_t i = 0; i < count; ++i) row[i] = rotary::rounded<T>(row[i]);
}

/// Rotates pairs as rotary::rotate_in_steps() does, where members are `step` apart and pairs
/// `next` apart.
template <RowProducts products, typename T>
POSEMBED_IN_STEPS void rotate_row_in_steps(const kernel::ApartAngles<Compute<T>>& angles,
                                           int64_t pairs, int64_t step, int64_t next,
                                           Compute<T>* row) {
  const auto product = [](Compute<T> a, Compute<T> b) {
    return products == RowProducts::to_data_type ? rotary::rounded<T>(a * b) : a * b;
  };
  const auto& [cosine, sine] = angles;
  for (int64_t i = 0; i < pairs; ++i) {
    const Compute<T> x = row[i * next], y = row[i * next + step];
    if constexpr (products == RowProducts::without_tables) {
      row[i * next] = core::fma(x, cosine[0][i], -(y * sine[0][i]));
      row[i * next + step] = core::fma(y, cosine[1][i], x * sine[1][i]);
    } else {
      row[i * next] = product(x, cosine[0][i]) - product(y, sine[0][i]);
      row[i * next + step] = product(y, cosine[1][i]) + product(x, sine[1][i]);
    }
  }
}

/// Normalises and rotates the heads of one token at a time.
template <typename T, bool interleaved>
class General {
 public:
  using C = Compute<T>;

  explicit General(const Arguments& arguments)
      : arguments_(arguments),
        rotation_(arguments.rotation),
        dim_(rotation_.head_dim),
        columns_(core::round_up_to_blocks(dim_)) {
    kernel::order_turns<C, interleaved>(rotation_, &turns_);
    rotate_ = kernel::choose_rotation<C>(interleaved, false, rotation_.pairs);
    for (int64_t r = 0; r < rotation_.count; ++r) {
      const int64_t count = arguments.all_heads ? rotation_.views[r].heads * dim_ : dim_;
      load(arguments.weight[r], count, arguments.weight_offset, &weights_[r]);
      load(arguments.bias[r], count, 0.0, &biases_[r]);
    }
  }

  /// Computes the angles of a token.
  void begin(Token* token) {
    token->rotated = kernel::begin_token<C>(rotation_, turns_, *token, &angles_);
    token->apart = kernel::turns_apart(rotation_, *token);
    const bool in_steps = token->apart || arguments_.row_rounding != RowRounding::once;
    const auto in_order = [](int64_t pair) { return pair; };
    if (in_steps) apart_.read(rotation_, *token, /*head=*/0, rotation_.pairs, in_order);
  }

  /// Writes the query's (r = 0) or key's heads of the token to out(head), then calls done(head).
  template <typename Out, typename Done>
  void run(const Token& token, int64_t r, const Out& out, const Done& done) {
    const HeadView& view = rotation_.views[r];
    const T* first = static_cast<const T*>(view.in) + offset_of(token, 0, view.in_stride);
    const int64_t step = view.in_stride[2];
    Moments moments;
    if (arguments_.all_heads) moments = moments_of(first, view.heads, step);
    for (int64_t head = 0; head < view.heads; ++head) {
      const T* in = first + head * step;
      if (!arguments_.all_heads) {
        moments = moments_of(in, 1, 0);
        keep_rstd(moments.rstd, r, (token.batch * rotation_.seq + token.seq) * view.heads + head);
      }
      norm(in, moments, r, arguments_.all_heads ? head * dim_ : 0);
      if (token.rotated) rotate(token.apart);
      store(out(head));
      done(head);
    }
  }

 private:
  using Numbers = std::unique_ptr<C[]>;  // a vector would share functions between instruction sets

  struct Moments {
    C mean = 0, rstd = 0;  // mean: 0 unless centred
  };

  void load(const void* data, int64_t count, double offset, Numbers* to) const {
    if (data == nullptr) return;
    to->reset(new C[static_cast<size_t>(count)]);
    load_parameters(arguments_, data, count, offset, C(0), to->get());
  }

  /// The sum of function(block, number of its elements) over rows.
  template <typename Function>
  C sum_of(const T* rows, int64_t count, int64_t step, const Function& function) const {
    C total = 0;
    for (int64_t k = 0; k < count; ++k) {
      const T* row = rows + k * step;
      core::Block32<T> sums{};
      core::for_blocks(dim_, [&](int64_t i, auto elements) POSEMBED_INLINE_LAMBDA {
        sums = sums + function(core::load_block(row + i, elements), elements);
      });
      total += core::sum(sums);
    }
    return total;
  }

  Moments moments_of(const T* rows, int64_t count, int64_t step) const {
    const C elements = static_cast<C>(count * dim_);
    Moments moments;
    C squares;
    if (arguments_.centred) {
      const C mean = moments.mean =
          sum_of(rows, count, step, [](auto x, auto) POSEMBED_INLINE_LAMBDA { return x; }) /
          elements;
      squares = sum_of(rows, count, step, [mean](auto x, auto kept) POSEMBED_INLINE_LAMBDA {
        const core::Block32<T> centred = core::keep_first(x - mean, kept);
        return centred * centred;
      });
    } else {
      squares =
          sum_of(rows, count, step, [](auto x, auto) POSEMBED_INLINE_LAMBDA { return x * x; });
    }
    moments.rstd = C(1) / std::sqrt(squares / elements + static_cast<C>(arguments_.eps));
    return moments;
  }

  /// Saves rstd for the backward pass. `index`: of the head's rstd.
  void keep_rstd(C rstd, int64_t r, int64_t index) const {
    if (arguments_.rstd[r] != nullptr) static_cast<C*>(arguments_.rstd[r])[index] = rstd;
  }

  /// Fills row_. `first`: the first of the head's weights.
  void norm(const T* in, const Moments& moments, int64_t r, int64_t first) {
    core::for_blocks(dim_,
                     [&](int64_t i, auto count) { core::load_elements(in + i, count, row_ + i); });
    const C mean = moments.mean, rstd = moments.rstd;
    for (int64_t i = 0; i < dim_; ++i) row_[i] = (row_[i] - mean) * rstd;
    const RowRounding rounding = arguments_.row_rounding;
    if (rounding == RowRounding::before_weight) round_row<T>(dim_, row_);
    if (weights_[r] != nullptr) {
      const C* weight = weights_[r].get() + first;
      for (int64_t i = 0; i < dim_; ++i) row_[i] *= weight[i];
    }
    if (biases_[r] != nullptr) {
      const C* bias = biases_[r].get() + first;
      for (int64_t i = 0; i < dim_; ++i) row_[i] += bias[i];
    }
    if (rounding != RowRounding::once) round_row<T>(dim_, row_);
  }

  void rotate(bool apart) {
    C* window = row_ + rotation_.start;
    const int64_t pairs = rotation_.pairs;
    const auto products = products_of(arguments_.row_rounding, rotation_.product_rounding);
    if (products == RowProducts::without_tables && !apart) {
      rotate_(window, window, 1, 0, 0, angles_, pairs, kernel::no_margins);
      return;
    }
    const auto rotate = products == RowProducts::without_tables
                            ? rotate_row_in_steps<RowProducts::without_tables, T>
                        : products == RowProducts::to_data_type
                            ? rotate_row_in_steps<RowProducts::to_data_type, T>
                            : rotate_row_in_steps<RowProducts::none, T>;
    rotate(apart_, pairs, interleaved ? 1 : pairs, interleaved ? 2 : 1, window);
  }

  void store(T* out) {
    C* ordered = row_;
    if constexpr (std::is_same_v<T, core::BFloat16>) {
      ordered = ordered_;
      core::order_values<T>(row_, columns_, ordered);
    }
    core::for_blocks(dim_, [&](int64_t i, auto count) {
      core::store_block(core::load_values<T>(ordered + i), out + i, count);
    });
  }

  const Arguments& arguments_;
  const rotary::Arguments& rotation_;
  const int64_t dim_, columns_;
  kernel::RotateGroup<C> rotate_;
  Turns<C> turns_;
  Angles<C> angles_;
  kernel::ApartAngles<C> apart_;    // read if pairs are rotated in steps
  Numbers weights_[2], biases_[2];  // nullptr: none
  alignas(64) Row<C> row_;          // in memory order
  alignas(64) Row<C> ordered_;      // in block order
};

template <typename T, bool interleaved>
void norm_in_general(const Arguments& arguments, int64_t begin, int64_t end) {
  General<T, interleaved> general(arguments);
  const rotary::Arguments& rotation = arguments.rotation;
  const TokenOrder order(rotation);
  for (int64_t number = begin; number < end; ++number) {
    Token token = order.token(number);
    general.begin(&token);
    for (int64_t r = 0; r < rotation.count; ++r) {
      const HeadView& view = rotation.views[r];
      T* out = static_cast<T*>(view.out) + offset_of(token, 0, view.out_stride);
      general.run(
          token, r, [&](int64_t head) { return out + head * view.out_stride[2]; }, [](int64_t) {});
    }
  }
}

}  // namespace
}  // namespace posembed::rotary_norm::POSEMBED_ISA
