// The forward pass of some tokens. Reads heads twice while they are in the L1 cache: for their
// statistics, and to normalise and rotate them in registers. Part of kernel_cpu.cpp.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/block32_sum.h"
#include "core/stream.h"
#include "rotary/gaps_cpu.h"
#include "rotary/streaming_cpu.h"
#include "rotary/tiles_cpu.h"
#include "rotary_norm/rows_cpu.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

/// The number of heads whose statistics are computed together, so that square roots and divisions
/// use vectors.
constexpr int64_t heads_at_once = 16;

/// Heads of a token.
template <typename T>
using Heads = kernel::RowGroup<T>;

/// The weights of query or of key.
template <typename C>
struct Weights {
  Row<C> from_start, behind_window;                // of columns, in block order
  alignas(64) C first[kernel::max_padded_pairs];   // of the members of pairs, in the
  alignas(64) C second[kernel::max_padded_pairs];  // order of angles
};

/// Sine and cosine times weights, computed once for all heads of a token.
template <typename C>
struct Coefficients {
  using Row = C[kernel::max_padded_pairs + kernel::array_padding];
  alignas(64) Row first_cosine, first_sine;    // times the weight of the first member
  alignas(64) Row second_cosine, second_sine;  // and of the second
};

/// Normalises a row while it rotates it.
template <typename C>
struct NormingAngles {
  const Coefficients<C>& coefficients;
  C rstd;

  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    const auto load = [slot](const C* row) { return kernel::load_values<Values>(row + slot); };
    const Values x = *first * rstd, y = *second * rstd;
    *first = core::fma(x, load(coefficients.first_cosine), -(y * load(coefficients.second_sine)));
    *second = core::fma(y, load(coefficients.second_cosine), x * load(coefficients.first_sine));
  }
};

constexpr int64_t max_tokens = 16;  // in a tile

/// The tile for head-major tensors: few enough memory streams for the hardware prefetcher.
constexpr kernel::Tile head_major_tile{max_tokens, 8};

template <typename T, bool interleaved>
class Forward {
 public:
  using C = Compute<T>;
  using Stores = kernel::Stores;

  explicit Forward(const Arguments& arguments)
      : arguments_(arguments),
        rotation_(arguments.rotation),
        tile_(kernel::choose_tile<T>(rotation_, head_major_tile)) {
    kernel::order_turns<T, interleaved>(rotation_, &turns_);
    for (int64_t r = 0; r < 2; ++r) {
      set_weights(r);
      const HeadView& view = rotation_.views[r];
      stores_[r] = kernel::choose_stores<T>(rotation_, view);
      fetches_behind_[r] = tile_.tokens == 1 && kernel::fetches_gaps<T>(rotation_) &&
                           kernel::gap_between_heads(view, rotation_.head_dim) == 0;
      norm_rotated_[r] = stores_[r] == Stores::streaming ? choose<true>() : choose<false>();
    }
  }

  void run(int64_t begin, int64_t end) {
    const TokenOrder order(rotation_);
    for (int64_t first = begin; first < end; first += tile_.tokens) {
      const int64_t count = std::min(tile_.tokens, end - first);
      for (int64_t t = 0; t < count; ++t) {
        rotated_[t] =
            kernel::begin_token<T>(rotation_, turns_, order.token(first + t), angles_ + t);
      }
      for (int64_t r = 0; r < 2; ++r) {
        norm_tile(order, first, count, r);
        if (!fetches_behind_[r]) continue;
        const Token token = order.token(first), next = order.token(first + 1);
        kernel::fetch_behind_token<T>(rotation_, r, token, next);
      }
    }
    if (stores_[0] != Stores::ordinary || stores_[1] != Stores::ordinary) core::stream_fence();
  }

 private:
  static constexpr int64_t buffer_elements = kernel::buffer_bytes / sizeof(T);

  using NormHeads = void (Forward::*)(const Heads<T>& heads, int64_t r, const C* rstd) const;

  void set_weights(int64_t r) {
    Row<C> row;
    load_weights<T>(arguments_, r, row);
    Weights<C>& weights = weights_[r];
    const int64_t end = rotation_.start + 2 * rotation_.pairs, dim = rotation_.head_dim;
    core::order_values<T>(row, core::round_up_to_blocks(dim), weights.from_start);
    core::order_values<T>(row + end, core::round_up_to_blocks(dim - end), weights.behind_window);
    const C* window = row + rotation_.start;
    for (int64_t slot = 0; slot < kernel::padded(rotation_.pairs); ++slot) {
      const int64_t pair = kernel::pair_of_slot<T, interleaved>(slot);
      const bool inside = pair < rotation_.pairs;
      const int64_t first = interleaved ? 2 * pair : pair;
      const int64_t second = interleaved ? first + 1 : first + rotation_.pairs;
      weights.first[slot] = inside ? window[first] : 0;
      weights.second[slot] = inside ? window[second] : 0;
    }
  }

  void set_coefficients(const Angles<T>& angles, const Weights<C>& weights) {
    Coefficients<C>& to = coefficients_;
    for (int64_t slot = 0; slot < kernel::padded(rotation_.pairs); ++slot) {
      const C cosine = angles.cosine[slot], sine = angles.sine[slot];
      to.first_cosine[slot] = cosine * weights.first[slot];
      to.first_sine[slot] = sine * weights.first[slot];
      to.second_cosine[slot] = cosine * weights.second[slot];
      to.second_sine[slot] = sine * weights.second[slot];
    }
  }

  /// Processes `count` tokens, starting at number `first`. Computes each token again from its
  /// number, in registers, because reading memory just after it was written, with another access
  /// width, waits for all earlier stores.
  void norm_tile(const TokenOrder& order, int64_t first, int64_t count, int64_t r) {
    const int64_t heads = rotation_.views[r].heads;
    for (int64_t head = 0; head < heads; head += tile_.heads) {
      for (int64_t t = 0; t < count; ++t) {
        Token token = order.token(first + t);
        token.rotated = rotated_[t];
        norm_heads(token, angles_[t], r, head, std::min(head + tile_.heads, heads));
      }
    }
  }

  /// Processes heads [begin, end) of a token.
  void norm_heads(const Token& token, const Angles<T>& angles, int64_t r, int64_t begin,
                  int64_t end) {
    const HeadView& view = rotation_.views[r];
    kernel::fetch_next_tile<T>(rotation_, r, tile_, token, begin, end);
    if (token.rotated) set_coefficients(angles, weights_[r]);
    const NormHeads norm = token.rotated ? norm_rotated_[r] : &Forward::norm_unrotated;
    const int64_t max_heads = stores_[r] == Stores::streaming_from_buffer
                                  ? std::min(heads_at_once, buffer_elements / rotation_.head_dim)
                                  : heads_at_once;
    const T* in = static_cast<const T*>(view.in);
    T* out = static_cast<T*>(view.out);
    for (int64_t head = begin; head < end; head += max_heads) {
      const Heads<T> heads{in + offset_of(token, head, view.in_stride),
                           out + offset_of(token, head, view.out_stride),
                           std::min(end - head, max_heads), view.in_stride[2], view.out_stride[2]};
      C rstd[heads_at_once];
      set_rstd(heads, rstd);
      keep_rstd(rstd, heads.count, r,
                (token.batch * rotation_.seq + token.seq) * view.heads + head);
      norm_at_once(heads, norm, r, rstd);
    }
  }

  /// Saves rstd for the backward pass. `index`: of the first head's rstd.
  void keep_rstd(const C* rstd, int64_t count, int64_t r, int64_t index) const {
    C* kept = static_cast<C*>(arguments_.rstd[r]);
    if (kept != nullptr) std::copy_n(rstd, count, kept + index);
  }

  void norm_at_once(const Heads<T>& heads, NormHeads norm, int64_t r, const C* rstd) {
    if (stores_[r] != Stores::streaming_from_buffer) return (this->*norm)(heads, r, rstd);
    const int64_t dim = rotation_.head_dim;
    (this->*norm)({heads.in, buffer_, heads.count, heads.in_step, dim}, r, rstd);
    kernel::copy_rows<T>({buffer_, heads.out, heads.count, dim, heads.out_step}, dim,
                         core::stream_copy);
  }

  void set_rstd(const Heads<T>& heads, C* rstd) const {
    C sums[heads_at_once] = {};
    for (int64_t k = 0; k < heads.count; ++k) {
      const T* row = heads.in + k * heads.in_step;
      core::Block32<T> squares{};
      core::for_blocks(rotation_.head_dim, [&](int64_t i, auto count) {
        const core::Block32<T> x = core::load_block(row + i, count);
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

  /// `fixed_pairs`: the number of pairs as a constant if they make up whole rows, otherwise 0.
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
      kernel::rotate_each<interleaved, streaming>(window, NormingAngles<C>{coefficients_, rstd[k]},
                                                  pairs, kernel::no_margins);
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
    core::for_blocks(count, [&](int64_t i, auto columns) {
      const core::Block32<T> weight = core::load_values<T>(weights + i);
      core::store_block<streaming>(core::load_block(in + i, columns) * rstd * weight, out + i,
                                   columns);
    });
  }

  const Arguments& arguments_;
  const rotary::Arguments& rotation_;
  const kernel::Tile tile_;
  Turns<T> turns_;
  Coefficients<C> coefficients_;
  Weights<C> weights_[2];
  Stores stores_[2];
  bool fetches_behind_[2];
  NormHeads norm_rotated_[2];
  alignas(64) T buffer_[buffer_elements];
  bool rotated_[max_tokens];
  Angles<T> angles_[max_tokens];
};

}  // namespace
}  // namespace posembed::rotary_norm::POSEMBED_ISA
