// The rotary kernel: rotates pairs of components of query and key by position times frequency. Su
// et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. The backward pass
// is the same kernel with the opposite angles.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/double_double.h"
#include "core/index.h"
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
/// rounding.h.
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
  const void* sines = nullptr;                  // PyTorch does it: see rounding.h
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
/// window follow those of the window before. See parts.h.
///
/// With `tangent`, `frequencies` are the frequencies' tangents and `in` holds rotated pairs (x,
/// y): `out` becomes their tangents, position * frequency * (-y, x). Components that do not turn
/// are not written, so `out` must hold zeros.
POSEMBED_CPU_KERNEL(rotate, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Rotates all tokens on `stream`. Returns nullptr, or the text of a CUDA error.
const char* rotate_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::rotary
