// The rotary kernel: rotates pairs of components of query and key by position times frequency.
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
// The backward pass is the same kernel with the rotation turned round.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/index.h"
#include "core/scalar.h"
#include "core/turn.h"

namespace posembed::rotary {

/// Pairs that one launch can carry: head_dim up to 1024.
inline constexpr int64_t max_pairs = 512;

/// Axes that positions can have: time, height, width and one more.
inline constexpr int64_t max_axes = 4;

/// One tensor to rotate, seen as [batch, seq, heads, head_dim] with a contiguous last dimension.
/// `in == out` rotates in place; otherwise components outside the window are copied.
struct Rows {
  const void* in = nullptr;
  void* out = nullptr;
  int64_t heads = 0;
  int64_t in_stride[3] = {0, 0, 0};  // batch, seq, head; in elements
  int64_t out_stride[3] = {0, 0, 0};
  bool window_only = false;  // rows are the rotated window alone, as MLA's key that heads share
};

struct Arguments {
  Rows rows[2];       // query, and key where there is one
  int64_t count = 1;  // 1: query only
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0, seq = 0;
  int64_t head_dim = 0;
  int64_t pairs = 0;                       // rotary_dim / 2
  int64_t start = 0;                       // first component of the rotated window
  bool interleaved = false;                // pairs (2i, 2i + 1) instead of (i, i + pairs)
  bool reverse = false;                    // rotate by minus the angle
  double amplitude = 1.0;                  // the rotated pair is multiplied by it
  core::IndexView positions;               // data == nullptr: offset, offset + 1, …
  int64_t position_stride[3] = {0, 0, 0};  // batch, seq, axis; in elements
  int64_t offset = 0;
  int64_t axes = 1;                       // rows of positions, at most max_axes
  const uint8_t* axis_of_pair = nullptr;  // [pairs], host memory, where there are several axes
  const core::Turn128* turns = nullptr;   // [pairs], host memory: turns per position
  core::DeviceError* error = nullptr;     // CUDA: where a position below -1 is recorded
};

/// Components of each row of `rows`.
inline int64_t row_dim(const Arguments& arguments, const Rows& rows) {
  return rows.window_only ? 2 * arguments.pairs : arguments.head_dim;
}

/// The first of them that is rotated.
inline int64_t window_start(const Arguments& arguments, const Rows& rows) {
  return rows.window_only ? 0 : arguments.start;
}

/// Tokens are numbered batch * seq + place; the kernel rotates tokens [begin, end) of every tensor.
/// A token at position -1 (on any axis) stays as it is.
POSEMBED_CPU_KERNEL(rotate, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Rotates all tokens on `stream`. Returns nullptr, or the text of a CUDA error.
const char* rotate_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::rotary
