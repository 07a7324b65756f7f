// The gradient of rotary frequencies on the CPU, compiled once per instruction set: moments of all
// heads of a token in its compute type, tokens in double.
#include "core/fma.h"
#include "rotary/frequency_gradient.h"

namespace posembed::rotary::POSEMBED_ISA {
namespace {

using core::Compute;

/// moments[i] += g1 x0 - g0 x1 for pair i of one head.
template <typename T, bool interleaved>
void add_moments(const T* x, const T* g, int64_t pairs, Compute<T>* POSEMBED_RESTRICT moments) {
  constexpr int64_t step = interleaved ? 2 : 1;
  const int64_t second = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const Compute<T> x0 = core::load(x[step * i]), x1 = core::load(x[step * i + second]);
    const Compute<T> g0 = core::load(g[step * i]), g1 = core::load(g[step * i + second]);
    moments[i] = core::fma(g1, x0, core::fma(-g0, x1, moments[i]));
  }
}

/// The moments of a token, over its heads.
template <typename T, bool interleaved>
void token_moments(const Arguments& arguments, int64_t batch, int64_t seq, Compute<T>* moments) {
  const auto row = [&](const Rows& rows, int64_t head) {
    return static_cast<const T*>(rows.in) + batch * rows.in_stride[0] + seq * rows.in_stride[1] +
           head * rows.in_stride[2] + window_start(arguments, rows);
  };
  for (int64_t i = 0; i < arguments.pairs; ++i) moments[i] = 0;
  for (int64_t head = 0; head < arguments.rows[0].heads; ++head) {
    add_moments<T, interleaved>(row(arguments.rows[0], head), row(arguments.rows[1], head),
                                arguments.pairs, moments);
  }
}

template <typename T, bool interleaved>
void sum_chunk(const Arguments& arguments, int64_t begin, int64_t end, double* sums) {
  Compute<T> moments[max_pairs];
  for (int64_t i = 0; i < arguments.pairs; ++i) sums[i] = 0;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t batch = token / arguments.seq, seq = token % arguments.seq;
    double positions[max_axes];
    bool rotated = true;
    for (int64_t axis = 0; axis < arguments.axes; ++axis) {
      positions[axis] = static_cast<double>(position_of(arguments, batch, seq, axis));
      rotated = rotated && positions[axis] != -1;
    }
    if (!rotated) continue;
    token_moments<T, interleaved>(arguments, batch, seq, moments);
    for (int64_t i = 0; i < arguments.pairs; ++i) {
      const double position = positions[arguments.axes == 1 ? 0 : arguments.axis_of_pair[i]];
      sums[i] += (arguments.reverse ? -position : position) * static_cast<double>(moments[i]);
    }
  }
}

}  // namespace

void sum_moments(const Arguments& arguments, double* sums, int64_t begin, int64_t end) {
  const int64_t tokens = arguments.batch * arguments.seq, size = tokens_of_chunk(tokens);
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto sum = arguments.interleaved ? sum_chunk<T, true> : sum_chunk<T, false>;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * size, last = tokens - first < size ? tokens : first + size;
      sum(arguments, first, last, sums + chunk * arguments.pairs);
    }
  });
}

}  // namespace posembed::rotary::POSEMBED_ISA
