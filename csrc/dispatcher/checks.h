// Argument checks of all operators, run by eager and Meta kernels alike. A message names the
// argument, what was expected and what was given: ValueError for shapes, options and layouts,
// TypeError for dtypes, IndexError for ids and positions.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "dispatcher/tensors.h"

namespace posembed::dispatcher {

/// Accepts float32, float64, bfloat16 and float16.
inline void check_floating(at::ScalarType type, const char* argument) {
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
      argument, ": expected float32, float64, bfloat16 or float16, got ", dtype_name(type));
}

inline void check_floating(const at::Tensor& tensor, const char* argument) {
  check_floating(tensor.scalar_type(), argument);
}

/// Accepts int32 and int64.
inline void check_integers(const at::Tensor& tensor, const char* argument) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, argument,
                   ": expected int32 or int64, got ", dtype_name(type));
}

/// The remedy for positions that were cast to 16 bits along with a model.
inline const char* narrow_hint(at::ScalarType type) {
  if (type == at::kBFloat16) return ", which cannot represent 257: keep positions out of the cast";
  if (type == at::kHalf) return ", which cannot represent 2049: keep positions out of the cast";
  return "";
}

/// Accepts positions that are int32 or int64.
inline void check_position_integers(const at::Tensor& positions, const char* argument) {
  const at::ScalarType type = positions.scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, argument,
                   ": expected int32 or int64, got ", dtype_name(type), narrow_hint(type));
}

/// Accepts positions that are integers or floating numbers, but not of 16 bits.
inline void check_position_type(const at::Tensor& positions, const char* argument) {
  const at::ScalarType type = positions.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kInt || type == at::kLong || type == at::kFloat || type == at::kDouble, argument,
      ": expected int32, int64, float32 or float64, got ", dtype_name(type), narrow_hint(type));
}

inline void check_same_dtype(const at::Tensor& tensor, const char* argument,
                             const at::Tensor& other, const char* other_argument) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), argument,
                   ": expected the dtype of ", other_argument, ", ",
                   dtype_name(other.scalar_type()), ", got ", dtype_name(tensor.scalar_type()));
}

inline void check_same_shape(const at::Tensor& tensor, const char* argument,
                             const at::Tensor& other, const char* other_argument) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == other.sym_sizes(), argument, ": expected the shape of ",
                    other_argument, ", ", other.sym_sizes(), ", got ", tensor.sym_sizes());
}

/// Checks that the dtype and shape are those of `other`.
inline void check_like(const at::Tensor& tensor, const char* argument, const at::Tensor& other,
                       const char* other_argument) {
  check_same_dtype(tensor, argument, other, other_argument);
  check_same_shape(tensor, argument, other, other_argument);
}

/// Raises ValueError for a text that is not among the names.
[[noreturn]] void refuse_text(std::string_view text, const char* argument,
                              c10::ArrayRef<const char*> names);

/// The place of a text among the names that an argument may have.
inline size_t index_of(std::string_view text, const char* argument,
                       c10::ArrayRef<const char*> names) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (text == names[i]) return i;
  }
  refuse_text(text, argument, names);
}

/// Accepts numbers from `least` on.
template <typename Number>
void check_at_least(const Number& number, int64_t least, const char* argument) {
  TORCH_CHECK_VALUE(number >= least, argument, ": expected ", least, " or more, got ", number);
}

/// What a message ends with: nothing.
struct NoHint {
  const char* operator()() const { return ""; }
};

/// @param hint  called for the end of the message
template <typename Hint = NoHint>
void check_rank(const at::Tensor& tensor, const char* argument, int64_t rank, const char* shape,
                const Hint& hint = {}) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, argument, ": expected ", shape, ", got ",
                    tensor.sym_sizes(), hint());
}

template <typename Hint = NoHint>
void check_size(const c10::SymInt& size, const c10::SymInt& expected, const char* argument,
                const char* dimension, const Hint& hint = {}) {
  TORCH_CHECK_VALUE(size == expected, argument, ": expected ", dimension, " ", expected, ", got ",
                    size, hint());
}

/// Accepts lengths of which distances fit in 31 bits. The bound of a symbolic length would become a
/// guard of compiled graphs, so only its sign is checked.
inline void check_length(const c10::SymInt& length, const char* argument) {
  constexpr int64_t longest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(length >= 0 && (length.is_symbolic() || length <= longest), argument,
                    ": expected 0 to ", longest, ", got ", length);
}

/// Accepts a batch of 1, which serves all samples, and the batch itself.
inline void check_batch(const c10::SymInt& size, const c10::SymInt& batch, const char* argument) {
  if (size == 1 || size == batch) return;
  TORCH_CHECK_VALUE(batch != 1, argument, ": expected batch 1, got ", size);
  TORCH_CHECK_VALUE(false, argument, ": expected batch 1 or ", batch, ", got ", size);
}

/// Accepts positions [seq] and, with a batch, [batch, seq] or [1, seq]. Rejects an offset given
/// with them.
template <typename Hint = NoHint>
void check_positions_shape(const at::Tensor& positions, const char* argument,
                           const std::optional<c10::SymInt>& batch, const c10::SymInt& seq,
                           const c10::SymInt& offset, const Hint& hint = {}) {
  const bool one_row = positions.dim() == 1;
  TORCH_CHECK_VALUE(one_row || (batch.has_value() && positions.dim() == 2), argument,
                    ": expected [seq]", batch.has_value() ? " or [batch, seq]" : "", ", got ",
                    positions.sym_sizes());
  check_size(positions.sym_size(-1), seq, argument, "seq", hint);
  if (!one_row) check_batch(positions.sym_size(0), *batch, argument);
  TORCH_CHECK_VALUE(offset == 0, "offset: expected 0 where positions are given, got ", offset);
}

/// Checks memory that a kernel will write: the last dimension must be contiguous.
inline void check_last_dim_contiguous(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(last_dim_contiguous(tensor), argument,
                    ": expected a contiguous last dimension, got strides ", tensor.sym_strides());
}

/// Checks the eps that a norm adds to a variance or a mean square.
inline void check_eps(double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0,
                    "eps: expected a finite number of at least 0, got ", eps);
}

// ----------------------------------------------------------------------------------------- checked
// Sums and products of numbers that callers give, in checks too: one that wraps may look right.

inline int64_t product(int64_t a, int64_t b, const char* argument) {
  int64_t result = 0;
  TORCH_CHECK_VALUE(!c10::mul_overflows(a, b, &result), argument,
                    ": expected a product below 2^63, got ", a, " x ", b);
  return result;
}

inline int64_t sum(int64_t a, int64_t b, const char* argument) {
  int64_t result = 0;
  TORCH_CHECK_VALUE(!c10::add_overflows(a, b, &result), argument,
                    ": expected a sum below 2^63, got ", a, " + ", b);
  return result;
}

/// The least multiple that is not below `size`, which is not negative.
inline int64_t rounded_up(int64_t size, int64_t multiple, const char* argument) {
  return product(size / multiple + (size % multiple != 0), multiple, argument);
}

/// Symbolic sizes are not checked.
inline c10::SymInt product(const c10::SymInt& a, const c10::SymInt& b, const char* argument) {
  const auto left = a.maybe_as_int(), right = b.maybe_as_int();
  return left && right ? c10::SymInt(product(*left, *right, argument)) : a * b;
}

inline c10::SymInt sum(const c10::SymInt& a, const c10::SymInt& b, const char* argument) {
  const auto left = a.maybe_as_int(), right = b.maybe_as_int();
  return left && right ? c10::SymInt(sum(*left, *right, argument)) : a + b;
}

// ------------------------------------------------------------------------------------------ finite
// The check of floating positions on the CPU; a CUDA kernel writes NaN for them.

/// Raises IndexError for the first of floating positions on the CPU that is NaN or infinite.
inline void check_finite(const at::Tensor& positions, const char* argument) {
  const auto check = [&](const at::Tensor& dense, const auto* values) {
    for (int64_t i = 0; i < dense.numel(); ++i) {
      TORCH_CHECK_INDEX(std::isfinite(values[i]), argument, ": expected finite positions, got ",
                        values[i], " at index ", i);
    }
  };
  if (!positions.is_cpu()) return;
  const at::Tensor dense = positions.contiguous();
  if (dense.scalar_type() == at::kDouble) check(dense, dense.const_data_ptr<double>());
  if (dense.scalar_type() == at::kFloat) check(dense, dense.const_data_ptr<float>());
}

// -------------------------------------------------------------------------------------- cu seqlens
// The boundaries of documents packed one after another.

/// Checks what needs no values: integers [documents + 1].
void check_boundaries(const at::Tensor& cu_seqlens);

/// Checks that `cu_seqlens`, [documents + 1] integers, are prefix sums of document lengths that add
/// up to `total`, named `total_name` in the message. Does not check on CUDA, where it would wait
/// for the device: kernels stay in bounds for any values.
void check_cu_seqlens(const at::Tensor& cu_seqlens, int64_t total, const char* total_name);

// ---------------------------------------------------------------------------------- inference only
// Operators that write to their arguments, in place or as `out`, keep no history of gradients.

/// Whether an operator without history would lose a gradient or a tangent of `tensor`.
inline bool has_history(const at::Tensor& tensor) {
  return (at::GradMode::is_enabled() && tensor.requires_grad()) ||
         tensor._fw_grad(/*level=*/0).defined();
}

/// Throws c10::ValueError if it would. `alternative`: the operator that keeps it.
void check_inference_only(const at::Tensor& tensor, const char* argument, const char* alternative);

/// Throws c10::ValueError for a tensor of inference mode that is written outside of it, which torch
/// refuses only after the write.
void check_versioned(const at::Tensor& tensor, const char* argument);

// ---------------------------------------------------------------------------------- written memory

/// Checks that `tensor` can be written in place: its last dimension is contiguous and no two
/// indices share an element. Needs no memory, so Meta kernels run it too; symbolic strides are not
/// compared.
void check_writable(const at::Tensor& tensor, const char* argument);

/// Checks that `tensor` is no view that negates or conjugates its memory.
void check_holds_numbers(const at::Tensor& tensor, const char* argument);

/// Throws c10::ValueError if the tensors share a byte; exact even for interleaved views.
void check_no_overlap(const at::Tensor& tensor, const char* argument, const at::Tensor& other,
                      const char* other_argument);

/// The same, but `out` may be `in`, which is then changed in place.
void check_no_overlap_or_same(const at::Tensor& out, const char* argument, const at::Tensor& in,
                              const char* in_argument);

}  // namespace posembed::dispatcher
