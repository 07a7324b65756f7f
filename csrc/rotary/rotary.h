// The rotary kernel: rotates pairs of components of query and key by position times frequency. Su
// et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. The backward pass
// is the same kernel with the opposite angles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/cuda_launch.h"
#include "core/double_double.h"
#include "core/fma.h"
#include "core/index.h"
#include "core/instruction_set.h"
#include "core/macros.h"
#include "core/position.h"
#include "core/scalar.h"
#include "core/turn.h"

namespace posembed::rotary {

/// Pairs that one launch can carry: head_dim up to 1024.
inline constexpr int64_t max_pairs = 512;

/// Axes that positions can have: time, height, width and one more.
inline constexpr int64_t max_axes = 4;

/// Documents packed one after another; positions restart at 0 in each.
struct Documents {
  core::IndexView starts;  // [count]: the first token of each; data == nullptr: there is one
  int64_t count = 0;
};

/// The first token of the document that contains `token`. Reads only starts[0, count), whatever
/// values they have.
POSEMBED_INLINE int64_t document_start(const Documents& documents, int64_t token) {
  int64_t first = 0, last = documents.count - 1;
  while (first < last) {
    const int64_t middle = last - (last - first) / 2;
    if (core::read(documents.starts, middle) <= token) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return core::read(documents.starts, first);
}

/// Learned frequencies, in memory of the kernel's device.
struct Frequencies {
  const void* data = nullptr;  // [pairs], radians per position; nullptr: there are none
  core::Scalar scalar = core::Scalar::float32;  // or float64
  int64_t head_stride = 0;  // [heads, pairs]: each head has its own; 0: heads share them
  int64_t axis_stride = 0;  // [axes, heads, pairs]: angles of a pair are summed over all axes
};

/// The stored frequency of a pair; `pair` may include the offsets of a head and of an axis.
POSEMBED_INLINE double read(const Frequencies& frequencies, int64_t pair) {
  return core::read_floating<double>(frequencies.data, frequencies.scalar, pair);
}

/// The sum of two angles, whole turns dropped.
POSEMBED_INLINE core::Turn64 sum(core::Turn64 a, core::Turn64 b) { return a + b; }

POSEMBED_INLINE core::Turn128 sum(core::Turn128 a, core::Turn128 b) {
  const uint64_t low = a.low + b.low;
  return {a.high + b.high + (low < a.low ? 1 : 0), low};
}

/// Turns per position of a pair; 0 if the frequency is NaN or too large, in which case kernels
/// write NaN.
POSEMBED_INLINE core::Turn128 turn_of(const Frequencies& frequencies, int64_t pair) {
  const double frequency = read(frequencies, pair);
  return core::has_turn(frequency) ? core::turn_from_radians(frequency) : core::Turn128{};
}

/// One tensor to rotate, viewed as [batch, seq, heads, head_dim] with a contiguous last dimension.
/// `in == out` rotates in place; otherwise components outside the window are copied.
struct HeadView {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t heads = 0;
  int64_t in_stride[3] = {0, 0, 0};  // batch, seq, head; in elements
  int64_t out_stride[3] = {0, 0, 0};
  bool window_only = false;  // rows are only the rotated window, as for MLA's shared key
};

/// How x * cos and y * sin are rounded before they are added, in rotations by tables: see
/// rotate_in_steps().
enum class ProductRounding : int8_t { none, to_data_type, fused };

struct Arguments {
  HeadView views[2];  // query, and key if there is one
  int64_t count = 1;  // 1: query only
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0;
  int64_t head_dim = 0;
  int64_t pairs = 0;                       // rotary_dim / 2
  int64_t start = 0;                       // first component of the rotated window
  bool interleaved = false;                // pairs (2i, 2i + 1) instead of (i, i + pairs)
  bool reverse = false;                    // rotate by minus the angle
  bool tangent = false;                    // see below
  double amplitude = 1.0;                  // the rotated pair is multiplied by it
  core::PositionView positions;            // data == nullptr: offset, offset + 1, …
  int64_t position_stride[3] = {0, 0, 0};  // batch, seq, axis; in elements
  int64_t offset = 0;
  Documents documents;                    // if positions are not given
  int64_t axes = 1;                       // rows of positions, at most max_axes
  const uint8_t* axis_of_pair = nullptr;  // [pairs], host memory, if there are several axes
  const int64_t* windows = nullptr;       // see below; nullptr: one, or the call is for one
  int64_t window_count = 1;
  const core::Turn64* turns = nullptr;          // [pairs], host memory: turns per position
  const core::Turn128* wide_turns = nullptr;    // the same to 128 bits, for float64 data
  const core::DoubleDouble* radians = nullptr;  // the same with whole turns, for fractions
  const double* decay = nullptr;                // xPos: [pairs], host memory, log2 per position
  double decay_center = 0.0;                    // the position where amplitudes are 1
  double decay_sign = 1.0;                      // of the query; the key's is the opposite
  const void* cosines = nullptr;                // tables [batch, seq, pairs] to turn by instead, as
  const void* sines = nullptr;                  // PyTorch does it: see rotate_in_steps()
  core::Scalar table_scalar = core::Scalar::float32;
  int64_t table_stride[3] = {0, 0, 1};  // batch, seq, pair; in elements
  int64_t table_head_stride = 0;        // 0: heads share tables
  int64_t table_second = 0;  // from the value of a pair's first component to the second's; 0: one
  ProductRounding product_rounding = ProductRounding::none;  // with tables; fused: only on CUDA
  Frequencies frequencies;                                   // instead of turns
  core::DeviceError* error = nullptr;  // CUDA: where a position below -1 is recorded
};

/// Components of each row of `rows`.
POSEMBED_INLINE int64_t row_dim(const Arguments& arguments, const HeadView& view) {
  return view.window_only ? 2 * arguments.pairs : arguments.head_dim;
}

/// The first component of a row that is rotated.
POSEMBED_INLINE int64_t window_start(const Arguments& arguments, const HeadView& view) {
  return view.window_only ? 0 : arguments.start;
}

/// The position of a token if no positions are given.
template <typename Call>
POSEMBED_INLINE int64_t counted_position(const Call& call, int64_t seq) {
  const bool one_document = call.documents.starts.data == nullptr;
  return call.offset + seq - (one_document ? 0 : document_start(call.documents, seq));
}

/// Whether each head has frequencies or tables of its own.
POSEMBED_INLINE bool is_by_head(const Arguments& arguments) {
  return arguments.frequencies.head_stride != 0 || arguments.table_head_stride != 0;
}

/// The number of axes over which the angles of a pair are summed.
POSEMBED_INLINE int64_t mixed_axes(const Arguments& arguments) {
  return arguments.frequencies.axis_stride != 0 ? arguments.axes : 1;
}

/// The index of a token's position on an axis. `call` is Arguments, or has the same members.
template <typename Call>
POSEMBED_INLINE int64_t position_index(const Call& call, int64_t batch, int64_t seq, int64_t axis) {
  return batch * call.position_stride[0] + seq * call.position_stride[1] +
         axis * call.position_stride[2];
}

/// The position of a token on an axis.
template <typename Call>
POSEMBED_INLINE core::Position position_of(const Call& call, int64_t batch, int64_t seq,
                                           int64_t axis) {
  if (call.positions.data == nullptr) return {counted_position(call, seq), 0, 1.0};
  return core::read(call.positions, position_index(call, batch, seq, axis));
}

/// The same for positions that are not floating.
template <typename Call>
POSEMBED_INLINE int64_t whole_position_of(const Call& call, int64_t batch, int64_t seq,
                                          int64_t axis) {
  if (call.positions.data == nullptr) return counted_position(call, seq);
  return core::read({call.positions.data, call.positions.index},
                    position_index(call, batch, seq, axis));
}

/// Whether a position leaves its token unrotated: the integer -1. Floating positions never do.
template <typename Call>
POSEMBED_INLINE bool leaves_token(const Call& call, const core::Position& position) {
  return !call.positions.floating && position.whole == -1;
}

/// Rotates tokens [begin, end) of every tensor, in the order of TokenOrder. A token at the integer
/// position -1 (on all axes) is not rotated.
///
/// `windows` [window_count + 1], in host memory, are the first pairs of windows, then the number of
/// pairs: a pair of window w is (i, i + windows[w + 1] - windows[w]), where the components of a
/// window follow those of the window before. See pairs_of_window().
///
/// With `tangent`, `frequencies` are the frequencies' tangents and `in` holds rotated pairs (x,
/// y): `out` becomes their tangents, position * frequency * (-y, x). Components that do not turn
/// are not written, so `out` must hold zeros.
POSEMBED_CPU_KERNEL(rotate, void(const Arguments& arguments, int64_t begin, int64_t end));

/// The way in which these tokens are rotated, as parts of a text: "in order", ", streamed", "".
POSEMBED_CPU_KERNEL(name_walk, void(const Arguments& arguments, int64_t begin, int64_t end,
                                    const char** parts));

/// Rotates all tokens on `stream`. Returns nullptr, or the text of a CUDA error.
const char* rotate_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::rotary

// ---------------------------------------------------------------------------------------- rounding
// Rotates a pair (x, y) with the roundings of a PyTorch program, for numerics that reproduce its
// bits (docs/guide/rotary_bits.md). `ProductRounding` says how x * cos and y * sin are rounded
// before they are added. to_data_type: each to the type of the data, as elementwise operators do.
// none: only the result is rounded. fused: the addition is fused with one of them, as nvcc compiles
// a product of complex numbers.

/// For functions that rotate pairs of doubles step by step in a loop, where GCC 12 fuses
/// multiplications and additions despite -ffp-contract=off.
#if defined(__GNUC__) && !defined(__clang__)
#define POSEMBED_IN_STEPS __attribute__((optimize("no-tree-slp-vectorize")))
#else
#define POSEMBED_IN_STEPS
#endif

namespace posembed::rotary {

/// `value` rounded to T.
template <typename T>
POSEMBED_INLINE core::Compute<T> rounded(core::Compute<T> value) {
  T kept;
  core::store(value, &kept);
  return core::load(kept);
}

/// What turns a pair: cosine and sine for each of its two components. They differ only in tables
/// that have a value for each component.
template <typename C>
struct PairAngle {
  C cosine[2], sine[2];
};

template <ProductRounding rounding, typename T>
POSEMBED_INLINE void rotate_in_steps(T x_in, T y_in, const PairAngle<core::Compute<T>>& angle,
                                     T* first, T* second) {
  const core::Compute<T> x = core::load(x_in), y = core::load(y_in);
  const auto& [cosine, sine] = angle;
  if constexpr (rounding == ProductRounding::fused) {
    core::store(core::fma(x, cosine[0], -(y * sine[0])), first);
    core::store(core::fma(x, sine[1], y * cosine[1]), second);
  } else if constexpr (rounding == ProductRounding::to_data_type) {
    core::store(rounded<T>(x * cosine[0]) - rounded<T>(y * sine[0]), first);
    core::store(rounded<T>(y * cosine[1]) + rounded<T>(x * sine[1]), second);
  } else {
    core::store(x * cosine[0] - y * sine[0], first);
    core::store(y * cosine[1] + x * sine[1], second);
  }
}

// ------------------------------------------------------------------------------------------- decay
// xPos multiplies a query's pairs by 2^(decay * distance from the centre) and a key's pairs by the
// inverse: Sun et al., "A Length-Extrapolatable Transformer", arXiv:2212.10554. Computed in double
// on every device, which costs little: once per token and pair.

/// 2^(high + low) for |high| <= 1000 and a |low| far below 1: relative error below 4e-16.
POSEMBED_INLINE double exp2(double high, double low) {
  const auto nearest = static_cast<int64_t>(high < 0 ? high - 0.5 : high + 0.5);
  const double exponent = (high - static_cast<double>(nearest)) + low;
  const double x = exponent * 0x1.62e42fefa39efp-1;  // times log(2): 2^exponent = e^x, |x| < 0.35
  double result = 1.0;
  for (int k = 14; k > 0; --k) result = core::fma(result, x * (1.0 / k), 1.0);
  const uint64_t bits = static_cast<uint64_t>(nearest + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return result * power;
}

/// An amplitude as inner * outer, because it may overflow a float although its product with a tiny
/// number does not.
struct Amplitude {
  double inner, outer;
};

/// 2^(decay * distance) for results of type C. Saturates so that ordinary numbers become infinity
/// or zero, but 0 stays 0.
template <typename C>
POSEMBED_INLINE Amplitude amplitude_at(double decay, double distance) {
  constexpr double limit = std::is_same_v<C, double> ? 1000.0 : 220.0;
  const double exponent = decay * distance;
  const double value = exponent > limit    ? exp2(limit, 0.0)
                       : exponent < -limit ? exp2(-limit, 0.0)
                                           : exp2(exponent, core::fma(decay, distance, -exponent));
  if (std::is_same_v<C, double> || (value > 0x1p-100 && value < 0x1p100)) return {value, 1.0};
  const double outer = value < 1.0 ? 0x1p-100 : 0x1p100;
  return {value / outer, outer};
}

// ------------------------------------------------------------------------------ frequency gradient
// The gradient of rotary frequencies. A rotated pair y = (y0, y1) has the derivative position *
// (-y1, y0) by its frequency, so a frequency's gradient is the sum over tokens of position times
// the moment g1 y0 - g0 y1. Tokens are summed in chunks whose size depends only on the number of
// tokens, so any number of threads gives the same bits.

/// The number of tokens in a chunk: small enough that every multiprocessor has a chunk, large
/// enough that few sums remain to be added.
POSEMBED_INLINE int64_t tokens_of_chunk(int64_t tokens) {
  constexpr int64_t min_size = 16, max_chunks = 384;
  const int64_t size = (tokens + max_chunks - 1) / max_chunks;
  return size < min_size ? min_size : size;
}

POSEMBED_INLINE int64_t chunks_of(int64_t tokens) {
  return (tokens + tokens_of_chunk(tokens) - 1) / tokens_of_chunk(tokens);
}

/// The number of frequencies: [pairs], [heads, pairs] or [axes, heads, pairs].
POSEMBED_INLINE int64_t frequency_count(const Arguments& arguments) {
  const int64_t heads = is_by_head(arguments) ? arguments.views[0].heads : 1;
  return mixed_axes(arguments) * heads * arguments.pairs;
}

/// A frequency's total over all chunks of sums [chunks, pairs].
POSEMBED_INLINE double total_of(const double* sums, int64_t chunks, int64_t pairs, int64_t pair) {
  double total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * pairs + pair];
  return total;
}

/// sums[chunk, frequency] for chunks [begin, end): over tokens and heads, position * (g1 x0 - g0
/// x1). `arguments.views[0]` is x, the rotated tensor, and views[1] is g, the gradient of x;
/// neither is written.
POSEMBED_CPU_KERNEL(sum_moments,
                    void(const Arguments& arguments, double* sums, int64_t begin, int64_t end));

/// The same for all chunks; writes their total to float32 or float64 `out`,
/// which has an element for each frequency.
const char* sum_moments_cuda(const Arguments& arguments, double* sums, void* out,
                             core::Scalar scalar, core::CudaStream stream);

// ------------------------------------------------------------------------------------- frequencies
// Rotary frequencies in more than double precision, because positions multiply their error.

/// Radians per position, one for each pair.
using Series = std::vector<core::DoubleDouble>;

/// The plain series base^(-2i / rotary_dim) for i in [0, rotary_dim / 2), in radians per position,
/// relative error below 2^-98. Su et al., "RoFormer", 2021.
///
/// Requires base > 0 and an even rotary_dim >= 0.
inline Series geometric_frequencies(core::DoubleDouble base, int64_t rotary_dim) {
  const core::DoubleDouble log_base = core::log(base);
  Series frequencies;
  frequencies.reserve(static_cast<size_t>(rotary_dim / 2));
  for (int64_t i = 0; i < rotary_dim; i += 2) {
    const core::DoubleDouble exponent =
        core::DoubleDouble(static_cast<double>(-i)) / static_cast<double>(rotary_dim);
    frequencies.push_back(core::exp(exponent * log_base));
  }
  return frequencies;
}

/// The same, with a whole series for the pairs of each axis.
inline Series restarted_frequencies(core::DoubleDouble base,
                                    const std::vector<int64_t>& axis_of_pair) {
  Series frequencies(axis_of_pair.size());
  const int64_t axes = 1 + *std::max_element(axis_of_pair.begin(), axis_of_pair.end());
  for (int64_t axis = 0; axis < axes; ++axis) {
    const auto count = std::count(axis_of_pair.begin(), axis_of_pair.end(), axis);
    const Series series = geometric_frequencies(base, 2 * count);
    auto next = series.begin();
    for (size_t pair = 0; pair < axis_of_pair.size(); ++pair) {
      if (axis_of_pair[pair] == axis) frequencies[pair] = *next++;
    }
  }
  return frequencies;
}

/// The base that makes the longest wavelength `factor` times as long: base * factor^(d / (d - 2)).
///
/// Requires rotary_dim > 2.
inline core::DoubleDouble ntk_base(double base, double factor, int64_t rotary_dim) {
  const double dim = static_cast<double>(rotary_dim);
  return base * core::pow(factor, core::DoubleDouble(dim) / (dim - 2.0));
}

/// The range of pairs that YaRN blends: from the pair that makes `fast` turns within
/// `original_max_positions` to the pair that makes `slow`, rounded outwards to whole pairs if
/// `truncate`.
struct YarnBlend {
  int64_t original_max_positions;
  double fast, slow;
  bool truncate;
};

/// The ends of that range; in double they are those of the paper's code.
template <typename Number>
struct YarnRange {
  Number begin, end;
};

/// The fractional pair index that turns by `radians` within `length` positions.
template <typename Number>
Number pair_with_radians(Number radians, Number base, int64_t length, double rotary_dim) {
  using std::log;
  // Keep the order of the paper's code, because rounding decides between neighbouring whole pairs.
  return rotary_dim * log(static_cast<double>(length) / radians) / (2.0 * log(base));
}

/// The range in the precision of Number; `turn` is 2 pi.
template <typename Number>
YarnRange<Number> yarn_range(Number turn, Number base, const YarnBlend& blend, int64_t rotary_dim) {
  const double dim = static_cast<double>(rotary_dim);
  Number begin = pair_with_radians(blend.fast * turn, base, blend.original_max_positions, dim);
  Number end = pair_with_radians(blend.slow * turn, base, blend.original_max_positions, dim);
  if constexpr (std::is_same_v<Number, double>) {
    if (blend.truncate) {
      begin = std::floor(begin);
      end = std::ceil(end);
    }
  }
  begin = std::max<Number>(begin, 0.0);
  end = std::min<Number>(end, dim - 1.0);
  if (begin == end) end = end + 0.001;  // as in the paper's code, so that the ramp has a slope
  return {begin, end};
}

inline YarnRange<double> yarn_range(double base, const YarnBlend& blend, int64_t rotary_dim) {
  return yarn_range<double>(core::constants::two_pi.high, base, blend, rotary_dim);
}

/// Whole pairs as in the paper's code; fractional ones are exact.
inline YarnRange<core::DoubleDouble> exact_yarn_range(double base, const YarnBlend& blend,
                                                      int64_t rotary_dim) {
  if (!blend.truncate) {
    return yarn_range<core::DoubleDouble>(core::constants::two_pi, base, blend, rotary_dim);
  }
  const YarnRange<double> whole = yarn_range(base, blend, rotary_dim);
  return {whole.begin, whole.end};
}

/// A blend of frequencies: `part` of `kept`, the rest of `stretched`.
inline core::DoubleDouble blend(core::DoubleDouble kept, core::DoubleDouble part,
                                core::DoubleDouble stretched) {
  return kept * part + stretched * (1.0 - part);
}

/// Divides the frequencies that YaRN interpolates and blends those in the range `blended`. Peng et
/// al., "YaRN", 2023.
inline void scale_yarn(Series& series, double base, double factor, const YarnBlend& blended) {
  const auto [begin, end] =
      exact_yarn_range(base, blended, 2 * static_cast<int64_t>(series.size()));
  for (size_t pair = 0; pair < series.size(); ++pair) {
    const core::DoubleDouble clamped = std::clamp<core::DoubleDouble>(
        static_cast<double>(pair), std::min(begin, end), std::max(begin, end));
    const core::DoubleDouble kept = (end - clamped) / (end - begin);
    series[pair] = blend(series[pair], kept, series[pair] / factor);
  }
}

/// Llama 3.1: stretches wavelengths over original_max_positions / low by `factor`, keeps those
/// under original_max_positions / high, and blends in between.
inline void scale_llama3(Series& series, double factor, double low, double high,
                         int64_t original_max_positions) {
  const double length = static_cast<double>(original_max_positions);
  for (core::DoubleDouble& frequency : series) {
    const core::DoubleDouble turns = length * frequency / core::constants::two_pi;
    if (!(turns < high)) continue;  // also if the factors are equal and nothing is blended
    const core::DoubleDouble kept =
        turns < low ? 0.0 : (turns - low) / (core::DoubleDouble(high) - low);
    frequency = blend(frequency, kept, frequency / factor);
  }
}

namespace {

// ------------------------------------------------------------------------------------------- parts
// Parts of a rotation, which are rotations too: the window of one axis, or one head. Kernels that
// rotate one window, or all heads alike, so rotate several windows, or each head in its own way.
// Internal to each file that includes it, because files are compiled for several instruction sets.

/// Moves the address of an array by a number of elements.
template <typename Address>
void advance(Address*& address, core::Scalar scalar, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<Address>, const char, char>;
  if (address != nullptr) address = static_cast<Byte*>(address) + elements * core::size_of(scalar);
}

/// The first pair of window `w`.
[[maybe_unused]] inline int64_t first_pair(const Arguments& arguments, int64_t w) {
  return arguments.windows == nullptr ? 0 : arguments.windows[w];
}

/// A call for the pairs of window `w` alone, with the rows of the whole call.
[[maybe_unused]] inline Arguments pairs_of_window(const Arguments& arguments, int64_t w) {
  Arguments part = arguments;
  const int64_t first = arguments.windows[w];
  part.windows = nullptr;
  part.window_count = 1;
  part.pairs = arguments.windows[w + 1] - first;
  part.start += 2 * first;
  const auto skip = [first](auto&... arrays) { ((arrays += arrays == nullptr ? 0 : first), ...); };
  skip(part.axis_of_pair, part.turns, part.wide_turns, part.radians, part.decay);
  advance(part.cosines, part.table_scalar, first * part.table_stride[2]);
  advance(part.sines, part.table_scalar, first * part.table_stride[2]);
  advance(part.frequencies.data, part.frequencies.scalar, first);
  return part;
}

/// The rotation of window `w` of tensor `r`. The first copies what is beside it; the others rotate
/// the result in place. A tangent's windows are all read from the input.
[[maybe_unused]] inline Arguments window_of(const Arguments& arguments, int64_t r, int64_t w) {
  Arguments part = pairs_of_window(arguments, w);
  HeadView& view = part.views[0] = arguments.views[r];
  if (w > 0 && !arguments.tangent && view.out != nullptr) {
    view.in = view.out;
    std::copy_n(view.out_stride, 3, view.in_stride);
  }
  part.count = 1;
  part.start = window_start(arguments, view) + 2 * arguments.windows[w];
  part.head_dim = row_dim(arguments, view);
  view.window_only = false;
  if (r > 0) part.decay_sign = -part.decay_sign;
  return part;
}

/// Calls rotate(part) for the window of each axis, of each tensor.
template <typename Rotate>
void for_each_window(const Arguments& arguments, const Rotate& rotate) {
  for (int64_t r = 0; r < arguments.count; ++r) {
    for (int64_t w = 0; w < arguments.window_count; ++w) rotate(window_of(arguments, r, w));
  }
}

/// A call with the tables, or the frequencies on `axis`, of one head for all rows.
[[maybe_unused]] inline Arguments angles_of_head(const Arguments& arguments, int64_t head,
                                                 int64_t axis = 0) {
  Arguments part = arguments;
  Frequencies& frequencies = part.frequencies;
  advance(frequencies.data, frequencies.scalar,
          head * frequencies.head_stride + axis * frequencies.axis_stride);
  frequencies.head_stride = 0;
  advance(part.cosines, part.table_scalar, head * part.table_head_stride);
  advance(part.sines, part.table_scalar, head * part.table_head_stride);
  part.table_head_stride = 0;
  return part;
}

/// The rotation of one head of every tensor, by its own frequencies.
[[maybe_unused]] inline Arguments head_of(const Arguments& arguments, int64_t head) {
  Arguments part = angles_of_head(arguments, head);
  for (int64_t r = 0; r < arguments.count; ++r) {
    HeadView& view = part.views[r];
    advance(view.in, arguments.scalar, head * view.in_stride[2]);
    advance(view.out, arguments.scalar, head * view.out_stride[2]);
    view.heads = 1;
  }
  return part;
}

/// Calls sum(part, first) for each window in a gradient of frequencies: `views` are x and its
/// gradient, and `first` is the index of the window's first pair.
template <typename Sum>
void for_each_window_sum(const Arguments& arguments, const Sum& sum) {
  if (arguments.windows == nullptr) return sum(arguments, 0);
  for (int64_t w = 0; w < arguments.window_count; ++w) {
    Arguments part = window_of(arguments, 0, w);
    part.views[1] = window_of(arguments, 1, w).views[0];
    part.count = 2;
    sum(part, arguments.windows[w]);
  }
}

}  // namespace
}  // namespace posembed::rotary
