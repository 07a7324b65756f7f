// RMSNorm or LayerNorm of query and key, then rotary, in one pass over memory; the backward pass of
// RMSNorm by head. Henry et al., "Query-Key Normalization for Transformers", 2020; Zhang and
// Sennrich, "Root Mean Square Layer Normalization", 2019. Forward saves only 1 / RMS (rstd);
// backward normalises query and key again.
#pragma once

#include <cstdint>

#include "core/cuda_launch.h"
#include "core/instruction_set.h"
#include "rotary/rotary.h"

namespace posembed::rotary_norm {

/// The largest head_dim of a launch.
inline constexpr int64_t max_head_dim = 2 * rotary::max_pairs;

/// How a normalised row is rounded before the rotation. once: not at all. before_weight: to the
/// type of the data, and again after it is multiplied by the weights. after_weight: only then.
enum class RowRounding : int8_t { once, before_weight, after_weight };

/// How the rotation of a row rounds its products: before results are stored, to the type of the
/// data, or as one without tables, whose second component is fma(y, cos, x * sin), where
/// ProductRounding::fused means fma(x, sin, y * cos).
enum class RowProducts : int8_t { none, to_data_type, without_tables };

POSEMBED_INLINE RowProducts products_of(RowRounding rows, rotary::ProductRounding products) {
  if (rows == RowRounding::once) return RowProducts::without_tables;
  const bool rounds = products == rotary::ProductRounding::to_data_type;
  return rounds ? RowProducts::to_data_type : RowProducts::none;
}

/// Index 0 is query, 1 is key.
struct Arguments {
  rotary::Arguments rotation;
  const void* weight[2] = {nullptr, nullptr};  // [head_dim], or [heads, head_dim] if all_heads
  const void* bias[2] = {nullptr, nullptr};    // the same; nullptr: none
  core::Scalar parameter_scalar = core::Scalar::float32;  // of weights and biases
  bool centred = false;                                   // LayerNorm: subtracts the mean
  bool all_heads = false;  // the statistics are those of all heads of a token
  /// With tables; products are then rounded as rotation.product_rounding says.
  RowRounding row_rounding = RowRounding::once;
  double weight_offset = 0.0;  // added to every weight: 1 for Gemma
  double eps = 1e-6;
  /// [batch, seq, heads] in the compute type, contiguous; nullptr: not needed by a backward pass.
  void* rstd[2] = {nullptr, nullptr};
};

/// Whether a call is more than RMSNorm of each head and a rotation by exact angles, and needs the
/// kernel for that, which has no backward pass.
inline bool is_general(const Arguments& arguments) {
  return arguments.centred || arguments.all_heads || arguments.rotation.cosines != nullptr;
}

/// Processes tokens [begin, end) in the order of rotary's TokenOrder. A token at position -1 is
/// normalised but not rotated.
POSEMBED_CPU_KERNEL(norm_and_rotate, void(const Arguments& arguments, int64_t begin, int64_t end));

/// Processes all tokens on `stream`.
const char* norm_and_rotate_cuda(const Arguments& arguments, core::CudaStream stream);

/// The weights' gradients are reduced from a fixed number of partial sums, so that they have the
/// same bits for any number of threads.
inline constexpr int64_t parts_cpu = 32;
inline constexpr int64_t parts_cuda = 384;

struct BackwardArguments {
  /// As in forward, but with the transposed rotation. Input rows are the results' gradients, output
  /// rows those of query and key.
  Arguments forward;
  rotary::HeadView normed[2];  // query and key; `out` is not used
  int64_t parts = 1;
  void* partial = nullptr;                        // [parts, 2, head_dim] in the compute type
  void* weight_gradient[2] = {nullptr, nullptr};  // [head_dim]
};

/// Processes parts [begin, end) of the tokens.
POSEMBED_CPU_KERNEL(backward, void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Adds up the parts of columns [begin, end) of [2, head_dim].
POSEMBED_CPU_KERNEL(add_parts,
                    void(const BackwardArguments& arguments, int64_t begin, int64_t end));

/// Both steps on `stream`.
const char* backward_cuda(const BackwardArguments& arguments, core::CudaStream stream);

}  // namespace posembed::rotary_norm
