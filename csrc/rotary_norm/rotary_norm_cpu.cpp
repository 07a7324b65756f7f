// Normalises and rotates a head while it is in the cache, so that memory is read and written once.
// Sums have the same bits on every instruction set.
#include "rotary_norm/rotary_norm_cpu.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/block32_sum.h"
#include "core/stream.h"
#include "rotary/rotary_walks_cpu.h"
#include "rotary_norm/rotary_norm.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

// ----------------------------------------------------------------------------------------- forward
// The forward pass of some tokens. Reads heads twice while they are in the L1 cache: for their
// statistics, and to normalise and rotate them in registers.

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

// ---------------------------------------------------------------------------------------- backward
// The backward pass of a part of the tokens. Rotates gradients back in a float32 or float64 buffer
// that stays in the L1 cache, and reads query and key twice.

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
    rotate_ = kernel::choose_rotation<C>(interleaved, false, rotation_.pairs);
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

// ------------------------------------------------------------------------------------------ kernel

template <typename T, bool interleaved>
void backward_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  const auto run = [&](auto&& gradients) {
    for (int64_t part = begin; part < end; ++part) gradients.run(part);
  };
  if constexpr (std::is_same_v<T, core::BFloat16>) {
    if (rotates_in_block_order(arguments.forward.rotation)) {
      run(Backward<T, interleaved, true>(arguments));
      return;
    }
  }
  run(Backward<T, interleaved, false>(arguments));
}

template <typename T>
void add_part_columns(const BackwardArguments& b, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t dim = b.forward.rotation.head_dim;
  for (int64_t column = begin; column < end; ++column) {
    C sum = 0;
    for (int64_t part = 0; part < b.parts; ++part) {
      sum += static_cast<const C*>(b.partial)[2 * part * dim + column];
    }
    void* const gradient = b.weight_gradient[column / dim];
    if (gradient == nullptr) continue;
    core::visit_scalar(b.forward.parameter_scalar, [&](auto tag) {
      using Stored = typename decltype(tag)::type;
      core::store(static_cast<Compute<Stored>>(sum), static_cast<Stored*>(gradient) + column % dim);
    });
  }
}

template <typename T, bool interleaved>
void forward_tokens(const Arguments& arguments, int64_t begin, int64_t end) {
  if (is_general(arguments)) return norm_in_general<T, interleaved>(arguments, begin, end);
  Forward<T, interleaved>(arguments).run(begin, end);
}

}  // namespace

void norm_and_rotate(const Arguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.rotation.interleaved) {
      forward_tokens<T, true>(arguments, begin, end);
    } else {
      forward_tokens<T, false>(arguments, begin, end);
    }
  });
}

void backward(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.forward.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.forward.rotation.interleaved) {
      backward_parts<T, true>(arguments, begin, end);
    } else {
      backward_parts<T, false>(arguments, begin, end);
    }
  });
}

void add_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.forward.rotation.scalar, [&](auto tag) {
    add_part_columns<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::rotary_norm::POSEMBED_ISA
