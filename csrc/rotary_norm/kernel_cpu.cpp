// Norms and rotates a head while it is in cache: memory is read once and written once. Sums have
// the same bits on every instruction set.
#include <algorithm>
#include <cmath>

#include "core/prefetch.h"
#include "core/run.h"
#include "core/stream.h"
#include "rotary/angles_cpu.h"
#include "rotary/rotate_rows_cpu.h"
#include "rotary/streaming_cpu.h"
#include "rotary_norm/kernel.h"

namespace posembed::rotary_norm::POSEMBED_ISA {
namespace {

using core::Compute;
using rotary::Rows;
using rotary::POSEMBED_ISA::Angles;
using rotary::POSEMBED_ISA::RotateGroup;
using rotary::POSEMBED_ISA::Token;
using rotary::POSEMBED_ISA::Turns;

constexpr int64_t max_columns = max_head_dim + core::run;

/// A row with room for whole runs from any column on.
template <typename C>
using Row = C[max_columns];

/// Pads with a run of zeros.
template <typename T>
void load_row(const T* POSEMBED_RESTRICT in, int64_t dim, Compute<T>* POSEMBED_RESTRICT row) {
  for (int64_t i = 0; i < dim; ++i) row[i] = core::load(in[i]);
  std::fill_n(row + dim, core::run, Compute<T>(0));
}

/// The factors of columns: weights and what is added to all of them.
template <typename T>
void load_weights(const Arguments& arguments, int64_t r, Row<Compute<T>>& row) {
  const int64_t dim = arguments.rotation.head_dim;
  load_row(static_cast<const T*>(arguments.weight[r]), dim, row);
  for (int64_t i = 0; i < dim; ++i) row[i] += static_cast<Compute<T>>(arguments.weight_offset);
}

int64_t place_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

// ---- forward: heads are read twice while they are in the first-level cache, once for their
// statistics and once to be normed and rotated in registers ----

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

  explicit Forward(const Arguments& arguments)
      : arguments_(arguments), rotation_(arguments.rotation) {
    rotary::POSEMBED_ISA::order_turns<T, interleaved>(rotation_, &turns_);
    rotary::POSEMBED_ISA::order_axes<T, interleaved>(rotation_, &turns_);
    for (int64_t r = 0; r < 2; ++r) {
      set_weights(r);
      streaming_[r] = rotary::POSEMBED_ISA::can_stream<T>(rotation_, rotation_.rows[r]);
      norm_rotated_[r] = streaming_[r] ? choose<true>() : choose<false>();
    }
  }

  void run(int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      Token token{number / rotation_.seq, number % rotation_.seq, false};
      token.rotated = rotary::POSEMBED_ISA::begin_token<T>(rotation_, turns_, token, &angles_);
      for (int64_t r = 0; r < 2; ++r) norm_token(token, number, r);
    }
    if (streaming_[0] || streaming_[1]) core::stream_fence();
  }

 private:
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

  void norm_token(const Token& token, int64_t number, int64_t r) {
    const Rows& rows = rotation_.rows[r];
    const T* in = static_cast<const T*>(rows.in) + place_of(token, 0, rows.in_stride);
    T* out = static_cast<T*>(rows.out) + place_of(token, 0, rows.out_stride);
    if (token.rotated) set_coefficients(weights_[r]);
    const NormHeads norm = token.rotated ? norm_rotated_[r] : &Forward::norm_unrotated;
    C rstd[heads_at_once];
    for (int64_t head = 0; head < rows.heads; head += heads_at_once) {
      const Heads<T> heads{in + head * rows.in_stride[2], out + head * rows.out_stride[2],
                           std::min(rows.heads - head, heads_at_once), rows.in_stride[2],
                           rows.out_stride[2]};
      set_rstd(heads, rstd);
      if (arguments_.rstd[r] != nullptr) {
        std::copy(rstd, rstd + heads.count,
                  static_cast<C*>(arguments_.rstd[r]) + number * rows.heads + head);
      }
      (this->*norm)(heads, r, rstd);
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
      norm_columns(in, out, start, rstd[k], weights_[r].from_start);
      const Heads<T> window{in + start, out + start, 1, 0, 0};
      rotary::POSEMBED_ISA::rotate_each<interleaved, streaming>(
          window, NormingAngles<C>{coefficients_, rstd[k]}, pairs);
      norm_columns(in + end, out + end, dim - end, rstd[k], weights_[r].behind_window);
    }
  }

  void norm_unrotated(const Heads<T>& heads, int64_t r, const C* rstd) const {
    for (int64_t k = 0; k < heads.count; ++k) {
      norm_columns(heads.in + k * heads.in_step, heads.out + k * heads.out_step, rotation_.head_dim,
                   rstd[k], weights_[r].from_start);
    }
  }

  static void norm_columns(const T* in, T* out, int64_t count, C rstd, const C* weights) {
    core::for_runs(count, [&](int64_t i, auto columns) {
      const core::Run<T> weight = core::load_values<T>(weights + i);
      core::store_run(core::load_run(in + i, columns) * rstd * weight, out + i, columns);
    });
  }

  const Arguments& arguments_;
  const rotary::Arguments& rotation_;
  Turns<T> turns_;
  Angles<T> angles_;
  Coefficients<C> coefficients_;
  Weights<C> weights_[2];
  bool streaming_[2];
  NormHeads norm_rotated_[2];
};

// ---- backward: gradients are rotated back in a buffer that stays in the first-level cache, in
// float32 or float64; query and key are read twice ----

/// Heads that take each step together, so that none waits for the sums of the one before it.
constexpr int64_t heads_at_once_backward = 2;

/// Whether rows of T in the order of runs, which for bfloat16 is not that of memory, can be rotated
/// where they are.
template <typename T>
bool rotates_in_runs(const rotary::Arguments& rotation) {
  return std::is_same_v<T, core::BFloat16> && rotation.start % core::run == 0 &&
         rotation.pairs % core::run == 0;
}

/// Rotates a window of bfloat16 in the order of runs.
template <bool interleaved>
void rotate_in_runs(const Angles<core::BFloat16>& angles, int64_t pairs, float* window) {
  using rotary::POSEMBED_ISA::lanes;
  const rotary::POSEMBED_ISA::AnglesInMemory source(angles);
  for (int64_t slot = 0; slot < pairs; slot += lanes) {
    float* first = window + (interleaved ? 2 * slot : slot);
    float* second = first + (interleaved ? lanes : pairs);
    auto x = core::load_vector<core::Floats>(first), y = core::load_vector<core::Floats>(second);
    source.rotate(&x, &y, slot);
    core::store_vector<false>(x, first);
    core::store_vector<false>(y, second);
  }
}

/// `in_runs`: see rotates_in_runs().
template <typename T, bool interleaved, bool in_runs>
class Backward {
 public:
  using C = Compute<T>;

  explicit Backward(const BackwardArguments& arguments)
      : arguments_(arguments),
        rotation_(arguments.forward.rotation),
        dim_(rotation_.head_dim),
        columns_(core::round_up_to_runs(dim_)) {
    rotary::POSEMBED_ISA::order_turns<Order, interleaved>(rotation_, &turns_);
    rotary::POSEMBED_ISA::order_axes<Order, interleaved>(rotation_, &turns_);
    rotate_ = rotary::POSEMBED_ISA::choose_rotation<C, interleaved, false>(rotation_.pairs);
    for (int64_t r = 0; r < 2; ++r) {
      Row<C> row;
      load_weights<T>(arguments.forward, r, row);
      core::order_values<T>(row, columns_, weights_[r]);
      streaming_[r] = rotary::POSEMBED_ISA::can_stream<T>(rotation_, rotation_.rows[r]);
    }
  }

  /// Writes the gradients of a part of the tokens and the part's sums for those of the weights.
  void run(int64_t part) {
    const int64_t tokens = rotation_.batch * rotation_.seq, parts = arguments_.parts;
    for (C* row : sums_) std::fill_n(row, columns_, C(0));
    for (int64_t n = part * tokens / parts; n < (part + 1) * tokens / parts; ++n) {
      Token token{n / rotation_.seq, n % rotation_.seq, false};
      token.rotated = rotary::POSEMBED_ISA::begin_token<Order>(rotation_, turns_, token, &angles_);
      for (int64_t r = 0; r < 2; ++r) {
        const int64_t heads = rotation_.rows[r].heads;
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
  using Order = std::conditional_t<in_runs, T, C>;  // of the angles

  void write_sums(C* out) const {
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < columns_; ++i) {
        const int64_t column = i / core::run * core::run + core::element_of_value<T>(i % core::run);
        if (column < dim_) out[r * dim_ + column] = sums_[r][i];
      }
    }
  }

  /// From the gradients of `count` results to those of query or key.
  /// `place`: of the first head's rstd.
  void through_heads(const Token& token, int64_t r, int64_t head, int64_t count, int64_t place) {
    const Rows &rows = rotation_.rows[r], &inputs = arguments_.normed[r];
    const T* input = static_cast<const T*>(inputs.in) + place_of(token, head, inputs.in_stride);
    const T* result = static_cast<const T*>(rows.in) + place_of(token, head, rows.in_stride);
    T* out = static_cast<T*>(rows.out) + place_of(token, head, rows.out_stride);
    const C* rstd = static_cast<const C*>(arguments_.forward.rstd[r]) + place;
    for (int64_t k = 0; k < count; ++k) {
      rotate_back(token, result + k * rows.in_stride[2], gradient_ + k * columns_);
    }
    C along[heads_at_once_backward];
    for (int64_t k = 0; k < count; ++k) {
      along[k] = add_to_sums(input + k * inputs.in_stride[2], rstd[k], r, gradient_ + k * columns_);
    }
    for (int64_t k = 0; k < count; ++k) {
      const auto through_norm =
          streaming_[r] ? &Backward::through_norm<true> : &Backward::through_norm<false>;
      (this->*through_norm)(input + k * inputs.in_stride[2], rstd[k], along[k], r,
                            gradient_ + k * columns_, out + k * rows.out_stride[2]);
    }
  }

  /// Reads the gradient of a result into the order of runs.
  void rotate_back(const Token& token, const T* result, C* gradient) {
    constexpr bool reorders = std::is_same_v<T, core::BFloat16> && !in_runs;
    Row<C> row;
    C* target = reorders ? row : gradient;
    core::for_runs(dim_, [&](int64_t i, auto count) {
      core::prefetch_ahead<core::run * sizeof(T)>(result + i);
      if constexpr (reorders) {
        core::load_elements(result + i, count, target + i);
      } else {
        core::store_values(core::load_run(result + i, count), target + i);
      }
    });
    if (token.rotated) rotate(target + rotation_.start);
    if (reorders) core::order_values<T>(target, columns_, gradient);
  }

  void rotate(C* window) const {
    if constexpr (in_runs) {
      rotate_in_runs<interleaved>(angles_, rotation_.pairs, window);
    } else {
      rotate_(window, window, 1, 0, 0, angles_, rotation_.pairs);
    }
  }

  /// Adds a head's share to the sums for the weights' gradients. Returns how much of the gradient,
  /// times the weights, lies along the normed row: their mean product.
  C add_to_sums(const T* input, C rstd, int64_t r, const C* gradient) {
    core::Run<T> products{};
    core::for_runs(dim_, [&](int64_t i, auto count) {
      core::prefetch_ahead<core::run * sizeof(T)>(input + i);
      const core::Run<T> product =
          core::load_run(input + i, count) * core::load_values<T>(gradient + i);
      core::store_values(core::load_values<T>(sums_[r] + i) + product * rstd, sums_[r] + i);
      products = products + product * core::load_values<T>(weights_[r] + i);
    });
    return core::sum(products) * rstd / static_cast<C>(dim_);
  }

  /// From the gradient of a normed row to that of the row itself.
  template <bool streaming>
  void through_norm(const T* input, C rstd, C along, int64_t r, const C* gradient, T* out) const {
    constexpr auto size = static_cast<int64_t>(sizeof(T));
    if (streaming) core::expect_stream(out + core::page / size, dim_ * size);
    core::for_runs(dim_, [&](int64_t i, auto count) {
      const core::Run<T> of_normed =
          core::load_values<T>(gradient + i) * core::load_values<T>(weights_[r] + i);
      const core::Run<T> x = core::load_run(input + i, count);
      core::store_run<streaming>((of_normed - x * (along * rstd)) * rstd, out + i, count);
    });
  }

  const BackwardArguments& arguments_;
  const rotary::Arguments& rotation_;
  const int64_t dim_, columns_;
  RotateGroup<C> rotate_;
  bool streaming_[2];
  Turns<Order> turns_;
  Angles<Order> angles_;
  Row<C> weights_[2], sums_[2];                                   // in the order of runs
  alignas(64) C gradient_[heads_at_once_backward * max_columns];  // rows of `columns_`, likewise
};

template <typename T, bool interleaved>
void backward_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  const auto run = [&](auto gradients) {
    for (int64_t part = begin; part < end; ++part) gradients.run(part);
  };
  if constexpr (std::is_same_v<T, core::BFloat16>) {
    if (rotates_in_runs<T>(arguments.forward.rotation)) {
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
    core::store(sum, static_cast<T*>(b.weight_gradient[column / dim]) + column % dim);
  }
}

}  // namespace

void norm_and_rotate(const Arguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.rotation.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (arguments.rotation.interleaved) {
      Forward<T, true>(arguments).run(begin, end);
    } else {
      Forward<T, false>(arguments).run(begin, end);
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
