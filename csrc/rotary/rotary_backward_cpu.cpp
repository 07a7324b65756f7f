// The gradient of rotary frequencies on the CPU, compiled once per instruction set. Sums the heads
// of a token in its compute type, and tokens in double.
#include <algorithm>

#include "core/fma.h"
#include "rotary/rotary.h"
#include "rotary/rotary_angles_cpu.h"
#include "rotary/rotary_walks_cpu.h"

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

/// Moments of the tokens of a tile.
template <typename T>
using Moments = Compute<T>[std::max<int64_t>(max_pairs, 2048)];

/// Tiles keep the number of memory streams low in head-major tensors.
template <typename T>
Tile tile_of_moments(const Arguments& arguments) {
  constexpr int64_t moments = sizeof(Moments<T>) / sizeof(Compute<T>);
  const int64_t pairs = std::max<int64_t>(arguments.pairs, 1);
  return choose_tile<T>(arguments, {std::min<int64_t>(moments / pairs, 16), 4});
}

/// The window of head `head` of a token in tensor `r`.
template <typename T>
const T* window_of(const Arguments& arguments, int64_t r, const Token& token, int64_t head) {
  const HeadView& view = arguments.views[r];
  return row_of<T>(view, token, head) + window_start(arguments, view);
}

/// Adds the moments of heads [begin, end) of a token.
template <typename T, bool interleaved>
void add_heads(const Arguments& arguments, const Tile& tile, const Token& token, int64_t begin,
               int64_t end, Compute<T>* moments) {
  for (int64_t r = 0; r < 2; ++r) fetch_next_tile<T>(arguments, r, tile, token, begin, end);
  for (int64_t head = begin; head < end; ++head) {
    add_moments<T, interleaved>(window_of<T>(arguments, 0, token, head),
                                window_of<T>(arguments, 1, token, head), arguments.pairs, moments);
  }
}

/// The moments of tokens [begin, end), over their heads.
template <typename T, bool interleaved>
void tile_moments(const Arguments& arguments, const Tile& tile, int64_t begin, int64_t end,
                  Compute<T>* moments) {
  const int64_t heads = arguments.views[0].heads, pairs = arguments.pairs;
  std::fill_n(moments, (end - begin) * pairs, Compute<T>(0));
  for (int64_t head = 0; head < heads; head += tile.heads) {
    const int64_t last = std::min(head + tile.heads, heads);
    for (int64_t t = begin; t < end; ++t) {
      const Token token{t / arguments.seq, t % arguments.seq, false};
      add_heads<T, interleaved>(arguments, tile, token, head, last, moments + (t - begin) * pairs);
    }
  }
}

/// Adds position times the moments of a token; adds nothing for a token that is not rotated. `sums`
/// are [axes, ...] where angles are summed over axes.
template <typename C>
void add_token(const Arguments& arguments, int64_t number, const C* moments, double* sums) {
  double positions[max_axes];
  for (int64_t axis = 0; axis < arguments.axes; ++axis) {
    const int64_t batch = number / arguments.seq, seq = number % arguments.seq;
    const core::Position position = position_of(arguments, batch, seq, axis);
    if (leaves_token(arguments, position)) return;
    positions[axis] = core::to_double(position);
  }
  for (int64_t mixed = 0; mixed < mixed_axes(arguments); ++mixed) {
    for (int64_t i = 0; i < arguments.pairs; ++i) {
      const double position =
          positions[arguments.axis_of_pair == nullptr ? mixed : arguments.axis_of_pair[i]];
      sums[mixed * arguments.frequencies.axis_stride + i] +=
          (arguments.reverse ? -position : position) * static_cast<double>(moments[i]);
    }
  }
}

template <typename T, bool interleaved>
void sum_chunk(const Arguments& arguments, int64_t begin, int64_t end, double* sums) {
  alignas(64) Moments<T> moments;
  const int64_t pairs = arguments.pairs;
  const Tile tile = tile_of_moments<T>(arguments);
  for (int64_t first = begin; first < end; first += tile.tokens) {
    const int64_t last = std::min(first + tile.tokens, end);
    tile_moments<T, interleaved>(arguments, tile, first, last, moments);
    for (int64_t t = first; t < last; ++t) {
      add_token(arguments, t, moments + (t - first) * pairs, sums);
    }
  }
}

/// The same for each window and each head that has frequencies of its own.
template <typename T, bool interleaved>
void sum_parts(const Arguments& arguments, int64_t begin, int64_t end, double* sums) {
  for_each_window_sum(arguments, [&](const Arguments& part, int64_t first) {
    if (!is_by_head(part)) return sum_chunk<T, interleaved>(part, begin, end, sums + first);
    for (int64_t head = 0; head < part.views[0].heads; ++head) {
      sum_chunk<T, interleaved>(head_of(part, head), begin, end,
                                sums + first + head * part.frequencies.head_stride);
    }
  });
}

}  // namespace

void sum_moments(const Arguments& arguments, double* sums, int64_t begin, int64_t end) {
  const int64_t tokens = arguments.batch * arguments.seq, size = tokens_of_chunk(tokens);
  core::visit_scalar(arguments.scalar, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto sum = arguments.interleaved ? sum_parts<T, true> : sum_parts<T, false>;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * size, last = tokens - first < size ? tokens : first + size;
      double* const own = sums + chunk * frequency_count(arguments);
      std::fill_n(own, frequency_count(arguments), 0.0);
      sum(arguments, first, last, own);
    }
  });
}

}  // namespace posembed::rotary::POSEMBED_ISA
