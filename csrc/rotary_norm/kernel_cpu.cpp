// Norms and rotates a head while it is in cache: memory is read once and written once. Sums have
// the same bits on every instruction set.
#include <algorithm>
#include <cmath>

#include "core/lane_sum.h"
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

template <typename C>
using Row = C[max_head_dim];

template <typename T>
void load_row(const T* POSEMBED_RESTRICT in, int64_t dim, Compute<T>* POSEMBED_RESTRICT row) {
  for (int64_t i = 0; i < dim; ++i) row[i] = core::load(in[i]);
}

template <typename T>
void store_row(const Compute<T>* POSEMBED_RESTRICT row, int64_t dim, T* POSEMBED_RESTRICT out) {
  for (int64_t i = 0; i < dim; ++i) core::store(row[i], out + i);
}

template <typename C>
void multiply(const C* POSEMBED_RESTRICT factor, int64_t dim, C* POSEMBED_RESTRICT row) {
  for (int64_t i = 0; i < dim; ++i) row[i] *= factor[i];
}

template <typename C>
void multiply(C factor, int64_t dim, C* row) {
  for (int64_t i = 0; i < dim; ++i) row[i] *= factor;
}

int64_t place_of(const Token& token, int64_t head, const int64_t* stride) {
  return token.batch * stride[0] + token.seq * stride[1] + head * stride[2];
}

/// What all tokens share, and the angles of the current one. The rotation works on buffers in the
/// compute type.
template <typename T>
class Walk {
 public:
  using C = Compute<T>;

  explicit Walk(const Arguments& arguments) : arguments_(arguments) {
    const rotary::Arguments& rotation = arguments.rotation;
    rotation.interleaved ? plan<true>() : plan<false>();
    for (int64_t r = 0; r < 2; ++r) {
      load_row(static_cast<const T*>(arguments.weight[r]), rotation.head_dim, weights_[r]);
      for (int64_t i = 0; i < rotation.head_dim; ++i) {
        weights_[r][i] += static_cast<C>(arguments.weight_offset);
      }
    }
  }

  /// Calls function(token, r, head, place of its rstd) for every head of tokens [begin, end).
  template <typename Function>
  void for_heads(int64_t begin, int64_t end, const Function& function) {
    const rotary::Arguments& rotation = arguments_.rotation;
    for (int64_t number = begin; number < end; ++number) {
      Token token{number / rotation.seq, number % rotation.seq, false};
      token.rotated = rotary::POSEMBED_ISA::begin_token<C>(rotation, turns_, token, &angles_);
      for (int64_t r = 0; r < 2; ++r) {
        const int64_t heads = rotation.rows[r].heads;
        for (int64_t head = 0; head < heads; ++head) {
          function(token, r, head, number * heads + head);
        }
      }
    }
  }

  void rotate(const Token& token, C* row) const {
    if (!token.rotated) return;
    C* window = row + arguments_.rotation.start;
    rotation_(window, window, 1, 0, 0, angles_, arguments_.rotation.pairs);
  }

  const C* weight(int64_t r) const { return weights_[r]; }

 private:
  template <bool interleaved>
  void plan() {
    namespace kernel = rotary::POSEMBED_ISA;
    kernel::order_turns<C, interleaved>(arguments_.rotation, &turns_);
    kernel::order_axes<C, interleaved>(arguments_.rotation, &turns_);
    rotation_ = kernel::choose_rotation<C, interleaved, false>(arguments_.rotation.pairs);
  }

  const Arguments& arguments_;
  RotateGroup<C> rotation_;
  Turns<C> turns_;
  Angles<C> angles_;
  Row<C> weights_[2];
};

// ---- forward: heads are read twice while they are in the first-level cache, once for their
// statistics and once to be normed and rotated in registers ----

/// Heads whose statistics are taken together, so that their square roots and divisions overlap.
constexpr int64_t heads_at_once = 16;

/// The sum of a run in the order of core::lane_sum: by halves, in the order of memory.
template <typename T>
Compute<T> sum_in_order(core::Run<T> values) {
  if constexpr (std::is_same_v<T, core::BFloat16>) {  // registers hold even and odd elements
    constexpr size_t half = core::Run<T>::count / 2;
    core::Floats even[half], odd[half];
    for (size_t k = 0; k < half; ++k) {
      even[k] = values.part[2 * k];
      odd[k] = values.part[2 * k + 1];
    }
    return core::add_parts<half>(even) + core::add_parts<half>(odd);
  } else {
    return core::add_parts<core::Run<T>::count>(values.part);
  }
}

template <typename T>
Compute<T> rstd_of(const T* row, int64_t dim, double eps) {
  using C = Compute<T>;
  core::Run<T> squares{};
  core::for_runs(dim, [&](int64_t i, auto count) {
    const core::Run<T> x = core::load_run(row + i, count);
    squares = squares + x * x;
  });
  return C(1) / std::sqrt(sum_in_order(squares) / static_cast<C>(dim) + static_cast<C>(eps));
}

/// The weights of a tensor: of columns, and of the members of pairs in the order of angles.
template <typename C>
struct Weights {
  Row<C> of_column;
  alignas(64) C first[rotary::POSEMBED_ISA::max_padded_pairs];
  alignas(64) C second[rotary::POSEMBED_ISA::max_padded_pairs];
};

/// Norms rows while it rotates them.
template <typename C>
struct NormingAngles {
  rotary::POSEMBED_ISA::AnglesInMemory<C> angles;
  const Weights<C>& weights;
  C rstd;

  template <typename Values>
  void rotate(Values* first, Values* second, int64_t slot) const {
    using rotary::POSEMBED_ISA::load_values;
    *first = *first * rstd * load_values<Values>(weights.first + slot);
    *second = *second * rstd * load_values<Values>(weights.second + slot);
    angles.rotate(first, second, slot);
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
      set_weights(static_cast<const T*>(arguments.weight[r]), &weights_[r]);
      streaming_[r] = rotary::POSEMBED_ISA::can_stream<T>(rotation_, rotation_.rows[r]);
    }
  }

  void run(int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      Token token{number / rotation_.seq, number % rotation_.seq, false};
      token.rotated = rotary::POSEMBED_ISA::begin_token<T>(rotation_, turns_, token, &angles_);
      for (int64_t r = 0; r < 2; ++r) norm_heads(token, number, r);
    }
    if (streaming_[0] || streaming_[1]) core::stream_fence();
  }

 private:
  void set_weights(const T* in, Weights<C>* weights) const {
    load_row(in, rotation_.head_dim, weights->of_column);
    for (int64_t i = 0; i < rotation_.head_dim; ++i) {
      weights->of_column[i] += static_cast<C>(arguments_.weight_offset);
    }
    const C* window = weights->of_column + rotation_.start;
    for (int64_t slot = 0; slot < rotary::POSEMBED_ISA::padded(rotation_.pairs); ++slot) {
      const int64_t pair = rotary::POSEMBED_ISA::pair_of_slot<T, interleaved>(slot);
      const bool inside = pair < rotation_.pairs;
      const int64_t first = interleaved ? 2 * pair : pair;
      const int64_t second = interleaved ? first + 1 : first + rotation_.pairs;
      weights->first[slot] = inside ? window[first] : 0;
      weights->second[slot] = inside ? window[second] : 0;
    }
  }

  void norm_heads(const Token& token, int64_t number, int64_t r) {
    const Rows& rows = rotation_.rows[r];
    const T* in = static_cast<const T*>(rows.in) + place_of(token, 0, rows.in_stride);
    T* out = static_cast<T*>(rows.out) + place_of(token, 0, rows.out_stride);
    const auto norm = streaming_[r] ? &Forward::norm_row<true> : &Forward::norm_row<false>;
    C rstd[heads_at_once];
    for (int64_t head = 0; head < rows.heads; head += heads_at_once) {
      const int64_t count = std::min(rows.heads - head, heads_at_once);
      for (int64_t k = 0; k < count; ++k) {
        rstd[k] = rstd_of(in + (head + k) * rows.in_stride[2], rotation_.head_dim, arguments_.eps);
      }
      if (arguments_.rstd[r] != nullptr) {
        std::copy(rstd, rstd + count,
                  static_cast<C*>(arguments_.rstd[r]) + number * rows.heads + head);
      }
      for (int64_t k = 0; k < count; ++k) {
        (this->*norm)(token, in + (head + k) * rows.in_stride[2],
                      out + (head + k) * rows.out_stride[2], weights_[r], rstd[k]);
      }
    }
  }

  template <bool streaming>
  void norm_row(const Token& token, const T* in, T* out, const Weights<C>& weights, C rstd) const {
    const int64_t start = rotation_.start, window = 2 * rotation_.pairs;
    const int64_t before = token.rotated ? start : rotation_.head_dim;
    norm_columns(in, out, weights, rstd, 0, before);
    if (!token.rotated) return;
    const NormingAngles<C> angles{rotary::POSEMBED_ISA::AnglesInMemory<C>(angles_), weights, rstd};
    constexpr auto size = static_cast<int64_t>(sizeof(T));
    if (streaming) core::expect_stream(out + core::page / size, rotation_.head_dim * size);
    const rotary::POSEMBED_ISA::RowGroup<T> row{in + start, out + start, 1, 0, 0};
    rotary::POSEMBED_ISA::rotate_each<interleaved, streaming>(row, angles, rotation_.pairs);
    norm_columns(in, out, weights, rstd, start + window, rotation_.head_dim);
  }

  /// Columns that are not rotated.
  static void norm_columns(const T* in, T* out, const Weights<C>& weights, C rstd, int64_t begin,
                           int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      core::store(core::load(in[i]) * rstd * weights.of_column[i], out + i);
    }
  }

  const Arguments& arguments_;
  const rotary::Arguments& rotation_;
  Turns<T> turns_;
  Angles<T> angles_;
  Weights<C> weights_[2];
  bool streaming_[2];
};

// ---- backward: a head is normed and rotated back in a buffer that stays in the first-level cache,
// in float32 or float64 ----

/// sum += a * b
template <typename C>
void add_products(const C* POSEMBED_RESTRICT a, const C* POSEMBED_RESTRICT b, int64_t dim,
                  C* POSEMBED_RESTRICT sum) {
  for (int64_t i = 0; i < dim; ++i) sum[i] += a[i] * b[i];
}

/// From the gradient of the normed row to that of the row itself.
template <typename C>
void through_norm(C rstd, const C* POSEMBED_RESTRICT normed, int64_t dim,
                  C* POSEMBED_RESTRICT gradient) {
  const C along = core::lane_sum<C>(dim, [=](int64_t i) { return gradient[i] * normed[i]; }) /
                  static_cast<C>(dim);
  for (int64_t i = 0; i < dim; ++i) gradient[i] = rstd * (gradient[i] - normed[i] * along);
}

template <typename T>
void backward_part(const BackwardArguments& b, int64_t part) {
  using C = Compute<T>;
  const Arguments& arguments = b.forward;
  const rotary::Arguments& rotation = arguments.rotation;
  const int64_t dim = rotation.head_dim, tokens = rotation.batch * rotation.seq;
  Walk<T> walk(arguments);
  Row<C> gradient, normed;
  C* sums = static_cast<C*>(b.partial) + 2 * part * dim;
  for (int64_t i = 0; i < 2 * dim; ++i) sums[i] = 0;
  const auto one = [&](const Token& token, int64_t r, int64_t head, int64_t place) {
    const Rows &rows = rotation.rows[r], &inputs = b.normed[r];
    const C rstd = static_cast<const C*>(arguments.rstd[r])[place];
    load_row(static_cast<const T*>(inputs.in) + place_of(token, head, inputs.in_stride), dim,
             normed);
    multiply(rstd, dim, normed);
    load_row(static_cast<const T*>(rows.in) + place_of(token, head, rows.in_stride), dim, gradient);
    walk.rotate(token, gradient);
    add_products(gradient, normed, dim, sums + r * dim);
    multiply(walk.weight(r), dim, gradient);
    through_norm(rstd, normed, dim, gradient);
    store_row(gradient, dim, static_cast<T*>(rows.out) + place_of(token, head, rows.out_stride));
  };
  walk.for_heads(part * tokens / b.parts, (part + 1) * tokens / b.parts, one);
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
    for (int64_t part = begin; part < end; ++part) {
      backward_part<typename decltype(tag)::type>(arguments, part);
    }
  });
}

void add_parts(const BackwardArguments& arguments, int64_t begin, int64_t end) {
  core::visit_scalar(arguments.forward.rotation.scalar, [&](auto tag) {
    add_part_columns<typename decltype(tag)::type>(arguments, begin, end);
  });
}

}  // namespace posembed::rotary_norm::POSEMBED_ISA
