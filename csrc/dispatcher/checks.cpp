#include "dispatcher/checks.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "core/brief.h"
#include "core/memory.h"
#include "dispatcher/launch.h"
#include "dispatcher/tensors.h"
#include "posembed/export.h"

namespace posembed::dispatcher {

void check_boundaries(const at::Tensor& cu_seqlens) {
  check_integers(cu_seqlens, "cu_seqlens");
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.sym_size(0) >= 1,
                    "cu_seqlens: expected [documents + 1], got ", cu_seqlens.sym_sizes());
}

void check_cu_seqlens(const at::Tensor& cu_seqlens, int64_t total, const char* total_name) {
  const int64_t last = cu_seqlens.numel() - 1;
  if (on_cuda(cu_seqlens)) return;
  const core::IndexView view = index_view(cu_seqlens);
  TORCH_CHECK_VALUE(core::read(view, 0) == 0, "cu_seqlens: expected 0 first, got ",
                    core::read(view, 0));
  for (int64_t index = 1; index <= last; ++index) {
    const int64_t before = core::read(view, index - 1), here = core::read(view, index);
    TORCH_CHECK_VALUE(before <= here, "cu_seqlens: expected numbers that do not decrease, got ",
                      before, " and ", here, " at index ", index);
  }
  TORCH_CHECK_VALUE(core::read(view, last) == total, "cu_seqlens: expected ", total_name, ", ",
                    total, ", last, got ", core::read(view, last));
}

// Shown, because the bindings read names too.
POSEMBED_API void refuse_text(std::string_view text, const char* argument,
                              c10::ArrayRef<const char*> names) {
  std::string known;
  for (const char* name : names) {
    if (!known.empty()) known += name == names.back() ? " or " : ", ";
    known += std::string("'") + name + "'";
  }
  C10_THROW_ERROR(ValueError,
                  c10::str(argument, ": expected ", known, ", got '", core::brief(text), "'"));
}

// ---------------------------------------------------------------------------------- inference only

void check_inference_only(const at::Tensor& tensor, const char* argument, const char* alternative) {
  if (!has_history(tensor)) return;
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()), argument,
                    ": requires grad, and an in-place operator keeps no history; use ", alternative,
                    " or torch.no_grad()");
  TORCH_CHECK_VALUE(false, argument,
                    ": has a forward-mode tangent, which an in-place operator would not change; ",
                    "use ", alternative);
}

void check_versioned(const at::Tensor& tensor, const char* argument) {
  TORCH_CHECK_VALUE(!tensor.is_inference() || c10::InferenceMode::is_enabled(), argument,
                    ": is a tensor of inference mode, which only inference mode may write");
}

// ---------------------------------------------------------------------------------- written memory

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
