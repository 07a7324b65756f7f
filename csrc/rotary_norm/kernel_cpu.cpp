// A head is normed and rotated in a buffer that stays in the first-level cache, in float32 or
// float64; memory sees it once each way. Sums give the same bits on every instruction set.
#include "rotary/kernel_cpu.h"

#include <cmath>

#include "core/lane_sum.h"
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

/// Everything that stays the same from token to token, and the angles of one. The rotation works
/// on buffers in the compute type, whatever the data.
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
    rotation_({window, window, 1, 0, 0}, angles_, arguments_.rotation.pairs);
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

template <typename T>
void norm_range(const Arguments& arguments, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t dim = arguments.rotation.head_dim;
  Walk<T> walk(arguments);
  Row<C> row;
  walk.for_heads(begin, end, [&](const Token& token, int64_t r, int64_t head, int64_t place) {
    const Rows& rows = arguments.rotation.rows[r];
    load_row(static_cast<const T*>(rows.in) + place_of(token, head, rows.in_stride), dim, row);
    const C squares = core::lane_sum<C>(dim, [&](int64_t i) { return row[i] * row[i]; });
    const C rstd = C(1) / std::sqrt(squares / static_cast<C>(dim) + static_cast<C>(arguments.eps));
    if (arguments.rstd[r] != nullptr) static_cast<C*>(arguments.rstd[r])[place] = rstd;
    multiply(rstd, dim, row);
    multiply(walk.weight(r), dim, row);
    walk.rotate(token, row);
    store_row(row, dim, static_cast<T*>(rows.out) + place_of(token, head, rows.out_stride));
  });
}

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
    norm_range<typename decltype(tag)::type>(arguments, begin, end);
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
