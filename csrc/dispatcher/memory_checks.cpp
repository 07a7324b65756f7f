#include "dispatcher/memory_checks.h"

#include "core/memory_overlap.h"
#include "dispatcher/checks.h"

namespace posembed::dispatcher {
namespace {

core::StridedMemory memory_at(uintptr_t address, const at::Tensor& tensor) {
  return {address, static_cast<int64_t>(tensor.element_size()), tensor.sizes().data(),
          tensor.strides().data(), tensor.dim()};
}

core::StridedMemory memory_of(const at::Tensor& tensor) {
  return memory_at(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), tensor);
}

/// Whether two tensors of one shape address the same elements.
bool same_elements(const at::Tensor& tensor, const at::Tensor& other) {
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != other.stride(i)) return false;
  }
  return true;
}

}  // namespace

void check_writable(const at::Tensor& tensor, const char* argument) {
  check_last_dim_contiguous(tensor, argument);
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  const bool separate = tensor.is_non_overlapping_and_dense() ||
                        !core::overlaps_itself(memory_at(/*address=*/0, tensor));
  TORCH_CHECK_VALUE(separate, argument,
                    ": expected elements that do not share memory, got strides ", tensor.strides());
}

void check_holds_numbers(const at::Tensor& tensor, const char* argument) {
  const char* resolved = tensor.is_neg() ? "resolve_neg()" : "resolve_conj()";
  TORCH_CHECK_VALUE(!tensor.is_neg() && !tensor.is_conj(), argument,
                    ": expected memory that holds its numbers, which are written in place, got a ",
                    "view that negates or conjugates them; use ", argument, ".", resolved);
}

void check_no_overlap(const at::Tensor& tensor, const char* argument, const at::Tensor& other,
                      const char* other_argument) {
  TORCH_CHECK_VALUE(!core::overlap(memory_of(tensor), memory_of(other)), argument,
                    ": expected memory apart from ", other_argument,
                    "'s, got tensors that overlap");
}

void check_no_overlap_or_same(const at::Tensor& out, const char* argument, const at::Tensor& in,
                              const char* in_argument) {
  if (out.const_data_ptr() == in.const_data_ptr() && same_elements(out, in)) return;
  TORCH_CHECK_VALUE(!core::overlap(memory_of(out), memory_of(in)), argument, ": expected ",
                    in_argument, " itself or memory apart from it, got tensors that overlap");
}

}  // namespace posembed::dispatcher
