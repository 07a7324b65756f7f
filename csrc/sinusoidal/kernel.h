// The sinusoidal kernel: adds position encodings to rows, or writes them, without a table. Vaswani
// et al., "Attention Is All You Need", 2017, section 3.5.
#pragma once

#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/scalar.h"
#include "sinusoidal/sinusoid.h"

namespace posembed::sinusoidal {

/// Rows [batch, seq, columns] with a contiguous last dimension: out = in + encoding, or out =
/// encoding if `in` is null.
struct Arguments {
  Sinusoid sinusoid;
  const void* in = nullptr;
  void* out = nullptr;
  core::Scalar scalar = core::Scalar::float32;
  int64_t batch = 0;
  int64_t seq = 0;
  int64_t in_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t out_stride[2] = {0, 0};
  PositionView positions;               // data == nullptr: offset, offset + 1, …
  int64_t position_stride[2] = {0, 0};  // batch, seq; in elements
  int64_t offset = 0;
  int64_t groups = 1;  // of sequences that share positions; each group computes its encodings
};

/// The number of groups. A group's sequences are consecutive and share every encoding.
inline int64_t groups_of(const Arguments& arguments) {
  return arguments.position_stride[0] == 0 ? arguments.groups : arguments.batch;
}

/// The number of encodings to compute.
inline int64_t encodings(const Arguments& arguments) {
  return groups_of(arguments) * arguments.seq;
}

/// Encodings are numbered by group * seq + seq index; applies encodings [begin, end) to their rows.
POSEMBED_CPU_KERNEL(encode, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Processes all rows on `stream`. Returns nullptr, or the text of a CUDA error.
const char* encode_cuda(const Arguments& arguments, core::CudaStream stream);

}  // namespace posembed::sinusoidal
