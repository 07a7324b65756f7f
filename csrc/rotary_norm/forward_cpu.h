// The forward pass of some tokens. Heads are read twice while they are in the first-level cache,
// once for their statistics and once to be normed and rotated in registers. Part of kernel_cpu.cpp.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/run.h"
#include "core/stream.h"
#include "rotary/gaps_cpu.h"
#include "rotary/streaming_cpu.h"
#include "rotary_norm/rows_cpu.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

/// Heads whose statistics are taken together, so that their square roots and divisions are vectors.
constexpr int64_t heads_at_once = 16;

/// Heads of a token.
template <typename T>
using Heads = rotary::POSEMBED_ISA::RowGroup<T>;

/// The weights of a tensor.
template <typename C>
struct Weights {
  Row<C> from_start, behind_window;                              // of columns, in the order of runs
  alignas(64) C first[rotary::POSEMBED_ISA::max_padded_pairs];   // of the members of pairs, in the
  alignas(64) C second[rotary::POSEMBED_ISA::max_padded_pairs];  // order of angles
};

/// Sine and cosine times weights: multiplied once for all heads of a token.
template <typename C>
struct Coefficients {
  using Row = C[rotary::POSEMBED_ISA::max_padded_pairs + rotary::POSEMBED_ISA::apart];
  alignas(64) Row first_cosine, first_sine;    // times the weight of the first member
  alignas(64) Row second_cosine, second_sine;  // and of the second
};

/// Norms a row while it rotates it.
template <typename C>
struct NormingAngles {
  const Coefficients<C>& coefficients;
  C rstd;

  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    const auto load = [slot](const C* row) {
      return rotary::POSEMBED_ISA::load_values<Values>(row + slot);
    };
    const Values x = *first * rstd, y = *second * rstd;
    *first = core::fma(x, load(coefficients.first_cosine), -(y * load(coefficients.second_sine)));
    *second = core::fma(y, load(coefficients.second_cosine), x * load(coefficients.first_sine));
  }
};

template <typename T, bool interleaved>
class Forward {
 public:
  using C = Compute<T>;
  using Stores = rotary::POSEMBED_ISA::Stores;

  explicit Forward(const Arguments& arguments)
      : arguments_(arguments), rotation_(arguments.rotation) {
    rotary::POSEMBED_ISA::order_turns<T, interleaved>(rotation_, &turns_);
    rotary::POSEMBED_ISA::order_axes<T, interleaved>(rotation_, &turns_);
    for (int64_t r = 0; r < 2; ++r) {
      set_weights(r);
      const Rows& rows = rotation_.rows[r];
      stores_[r] = rotary::POSEMBED_ISA::choose_stores<T>(rotation_, rows);
      fetches_behind_[r] = rotary::POSEMBED_ISA::fetches_gaps<T>(rotation_) &&
                           rotary::POSEMBED_ISA::gap_between_heads(rows, rotation_.head_dim) == 0;
      norm_rotated_[r] = stores_[r] == Stores::streaming ? choose<true>() : choose<false>();
    }
  }

  void run(int64_t begin, int64_t end) {
    const rotary::POSEMBED_ISA::TokenOrder order(rotation_);
    for (int64_t number = begin; number < end; ++number) {
      Token token = order.token(number);
      token.rotated = rotary::POSEMBED_ISA::begin_token<T>(rotation_, turns_, token, &angles_);
      for (int64_t r = 0; r < 2; ++r) {
        norm_token(token, r);
        if (!fetches_behind_[r]) continue;
        const Token next = order.token(number + 1);
        rotary::POSEMBED_ISA::fetch_behind_token<T>(rotation_, r, token, next);
      }
    }
    if (stores_[0] != Stores::ordinary || stores_[1] != Stores::ordinary) core::stream_fence();
  }

 private:
  static constexpr int64_t buffer_elements = rotary::POSEMBED_ISA::buffer_bytes / sizeof(T);

  using NormHeads = void (Forward::*)(const Heads<T>& heads, int64_t r, const C* rstd) const;

  void set_weights(int64_t r) {
    Row<C> row;
    load_weights<T>(arguments_, r, row);
    Weights<C>& weights = weights_[r];
    const int64_t end = rotation_.start + 2 * rotation_.pairs, dim = rotation_.head_dim;
    core::order_values<T>(row, core::round_up_to_runs(dim), weights.from_start);
    core::order_values<T>(row + end, core::round_up_to_runs(dim - end), weights.behind_window);
    const C* window = row + rotation_.start;
    for (int64_t slot = 0; slot < rotary::POSEMBED_ISA::padded(rotation_.pairs); ++slot) {
      const int64_t pair = rotary::POSEMBED_ISA::pair_of_slot<T, interleaved>(slot);
      const bool inside = pair < rotation_.pairs;
      const int64_t first = interleaved ? 2 * pair : pair;
      const int64_t second = interleaved ? first + 1 : first + rotation_.pairs;
      weights.first[slot] = inside ? window[first] : 0;
      weights.second[slot] = inside ? window[second] : 0;
    }
  }

  void set_coefficients(const Weights<C>& weights) {
    Coefficients<C>& to = coefficients_;
    for (int64_t slot = 0; slot < rotary::POSEMBED_ISA::padded(rotation_.pairs); ++slot) {
      const C cosine = angles_.cosine[slot], sine = angles_.sine[slot];
      to.first_cosine[slot] = cosine * weights.first[slot];
      to.first_sine[slot] = sine * weights.first[slot];
      to.second_cosine[slot] = cosine * weights.second[slot];
      to.second_sine[slot] = sine * weights.second[slot];
    }
  }

  void norm_token(const Token& token, int64_t r) {
    const Rows& rows = rotation_.rows[r];
    const T* in = static_cast<const T*>(rows.in) + place_of(token, 0, rows.in_stride);
    T* out = static_cast<T*>(rows.out) + place_of(token, 0, rows.out_stride);
    if (token.rotated) set_coefficients(weights_[r]);
    const NormHeads norm = token.rotated ? norm_rotated_[r] : &Forward::norm_unrotated;
    const bool buffered = stores_[r] == Stores::streaming_from_buffer;
    const int64_t dim = rotation_.head_dim;
    const int64_t most = buffered ? std::min(heads_at_once, buffer_elements / dim) : heads_at_once;
    const int64_t number = token.batch * rotation_.seq + token.seq;
    C rstd[heads_at_once];
    for (int64_t head = 0; head < rows.heads; head += most) {
      const Heads<T> heads{in + head * rows.in_stride[2], out + head * rows.out_stride[2],
                           std::min(rows.heads - head, most), rows.in_stride[2],
                           rows.out_stride[2]};
      set_rstd(heads, rstd);
      if (arguments_.rstd[r] != nullptr) {
        std::copy(rstd, rstd + heads.count,
                  static_cast<C*>(arguments_.rstd[r]) + number * rows.heads + head);
      }
      if (buffered) {
        (this->*norm)({heads.in, buffer_, heads.count, heads.in_step, dim}, r, rstd);
        rotary::POSEMBED_ISA::copy_rows<T>({buffer_, heads.out, heads.count, dim, heads.out_step},
                                           dim, core::stream_copy);
      } else {
        (this->*norm)(heads, r, rstd);
      }
    }
  }

  void set_rstd(const Heads<T>& heads, C* rstd) const {
    C sums[heads_at_once] = {};
    for (int64_t k = 0; k < heads.count; ++k) {
      const T* row = heads.in + k * heads.in_step;
      core::Run<T> squares{};
      core::for_runs(rotation_.head_dim, [&](int64_t i, auto count) {
        const core::Run<T> x = core::load_run(row + i, count);
        squares = squares + x * x;
      });
      sums[k] = core::sum(squares);
    }
    const C dim = static_cast<C>(rotation_.head_dim), eps = static_cast<C>(arguments_.eps);
    for (int64_t k = 0; k < heads_at_once; ++k) rstd[k] = C(1) / std::sqrt(sums[k] / dim + eps);
  }

  template <bool streaming>
  NormHeads choose() const {
    if (2 * rotation_.pairs == rotation_.head_dim) {
      if (rotation_.pairs == 32) return &Forward::norm_rotated<streaming, 32>;
      if (rotation_.pairs == 40) return &Forward::norm_rotated<streaming, 40>;
      if (rotation_.pairs == 48) return &Forward::norm_rotated<streaming, 48>;
      if (rotation_.pairs == 64) return &Forward::norm_rotated<streaming, 64>;
      if (rotation_.pairs == 128) return &Forward::norm_rotated<streaming, 128>;
    }
    return &Forward::norm_rotated<streaming, 0>;
  }

  /// `fixed_pairs`: the number of pairs where they are all of a row and the compiler is to know it,
  /// otherwise 0.
  template <bool streaming, int64_t fixed_pairs>
  void norm_rotated(const Heads<T>& heads, int64_t r, const C* rstd) const {
    const int64_t start = fixed_pairs > 0 ? 0 : rotation_.start;
    const int64_t pairs = fixed_pairs > 0 ? fixed_pairs : rotation_.pairs;
    const int64_t dim = fixed_pairs > 0 ? 2 * fixed_pairs : rotation_.head_dim;
    const int64_t end = start + 2 * pairs;
    const T* in = heads.in;
    T* out = heads.out;
    for (int64_t k = 0; k < heads.count; ++k, in += heads.in_step, out += heads.out_step) {
      constexpr auto size = static_cast<int64_t>(sizeof(T));
      if (streaming) core::expect_stream(out + core::page / size, dim * size);
      norm_columns<streaming>(in, out, start, rstd[k], weights_[r].from_start);
      const Heads<T> window{in + start, out + start, 1, 0, 0};
      rotary::POSEMBED_ISA::rotate_each<interleaved, streaming>(
          window, NormingAngles<C>{coefficients_, rstd[k]}, pairs,
          rotary::POSEMBED_ISA::no_margins);
      norm_columns<streaming>(in + end, out + end, dim - end, rstd[k], weights_[r].behind_window);
    }
  }

  void norm_unrotated(const Heads<T>& heads, int64_t r, const C* rstd) const {
    for (int64_t k = 0; k < heads.count; ++k) {
      norm_columns<false>(heads.in + k * heads.in_step, heads.out + k * heads.out_step,
                          rotation_.head_dim, rstd[k], weights_[r].from_start);
    }
  }

  template <bool streaming>
  static void norm_columns(const T* in, T* out, int64_t count, C rstd, const C* weights) {
    core::for_runs(count, [&](int64_t i, auto columns) {
      const core::Run<T> weight = core::load_values<T>(weights + i);
      core::store_run<streaming>(core::load_run(in + i, columns) * rstd * weight, out + i, columns);
    });
  }

  const Arguments& arguments_;
  const rotary::Arguments& rotation_;
  Turns<T> turns_;
  Angles<T> angles_;
  Coefficients<C> coefficients_;
  Weights<C> weights_[2];
  Stores stores_[2];
  bool fetches_behind_[2];
  NormHeads norm_rotated_[2];
  alignas(64) T buffer_[buffer_elements];
};

}  // namespace
}  // namespace posembed::rotary_norm::POSEMBED_ISA
