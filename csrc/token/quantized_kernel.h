// Rows of codes: gathered, widened and scaled in one pass, in float32 (float64 for float64), and
// rounded once. A code is a number of 8 or 4 bits, and a block of a row shares a scale.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/cpu_kernel.h"
#include "core/cuda_launch.h"
#include "core/device_error.h"
#include "core/fma.h"
#include "core/index.h"
#include "core/scalar.h"

namespace posembed::token {

enum class Code : int8_t {
  float8,  // e4m3fn
  int8,
  uint4,  // two in a byte, the first in its lower half
};

/// out[index] = factor * (code * scale + bias) of row ids[index].
struct QuantizedArguments {
  const uint8_t* codes = nullptr;  // [rows, embedding_dim], rows row_bytes apart
  Code code = Code::float8;
  // [rows / block_rows, embedding_dim / block_columns], rounded up: float32, or bytes that are
  // powers of two (ue8m0)
  const void* scales = nullptr;
  const float* biases = nullptr;  // as scales; nullptr: 0
  bool has_exponents = false;     // scales are bytes
  void* out = nullptr;            // [count, embedding_dim], contiguous
  core::Scalar scalar = core::Scalar::float32;
  int64_t rows = 0, embedding_dim = 0, row_bytes = 0;
  int64_t block_rows = 1, block_columns = 1;
  core::IndexView ids;  // [count]
  int64_t count = 0;
  double factor = 1.0;
  core::DeviceError* error = nullptr;  // CUDA: where an id outside is recorded
};

/// Gathers rows of ids [begin, end), which must have been checked.
POSEMBED_CPU_KERNEL(gather_codes,
                    void(const QuantizedArguments& arguments, int64_t begin, int64_t end));

/// Gathers all rows on `stream`; zeros for an id outside.
const char* gather_codes_cuda(const QuantizedArguments& arguments, core::CudaStream stream);

/// The number of one code. Float8: see core/float8.h.
template <Code code>
POSEMBED_INLINE float number_of(uint32_t bits) {
  if constexpr (code == Code::int8) return static_cast<float>(static_cast<int8_t>(bits));
  if constexpr (code == Code::uint4) return static_cast<float>(bits);
  const uint32_t magnitude = bits & 0x7fu;
  const float normal = core::float_from_bits((magnitude << 20) + (120u << 23));
  const float small = static_cast<float>(magnitude) * 0x1p-9f;  // no denormal, which may be flushed
  const float value = magnitude < 8 ? small : magnitude == 0x7fu ? NAN : normal;
  return core::float_from_bits(core::float_bits(value) | (bits & 0x80u) << 24);
}

template <Code code>
POSEMBED_INLINE uint32_t code_at(const uint8_t* row, int64_t column) {
  if constexpr (code != Code::uint4) return row[column];
  return row[column / 2] >> 4 * (column & 1) & 15u;
}

/// Scale and bias of a block of columns.
struct BlockScale {
  float scale, bias;
};

/// The blocks of a row.
POSEMBED_INLINE int64_t blocks_of(const QuantizedArguments& a) {
  return (a.embedding_dim + a.block_columns - 1) / a.block_columns;
}

/// Those of block `at` of the table.
POSEMBED_INLINE BlockScale block_scale(const QuantizedArguments& a, int64_t at) {
  const float bias = a.biases == nullptr ? 0.0f : a.biases[at];
  if (!a.has_exponents) return {static_cast<const float*>(a.scales)[at], bias};
  const uint32_t exponent = static_cast<const uint8_t*>(a.scales)[at];
  if (exponent == 0xffu) return {NAN, bias};
  return {core::float_from_bits(exponent == 0 ? 0x00400000u : exponent << 23), bias};
}

/// The element of T for a code, before its rounding.
template <typename C, bool has_bias>
POSEMBED_INLINE C dequantized(float number, BlockScale block, C factor) {
  const C value =
      has_bias ? core::fma(C{number}, C{block.scale}, C{block.bias}) : C{number} * C{block.scale};
  return value * factor;
}

}  // namespace posembed::token
