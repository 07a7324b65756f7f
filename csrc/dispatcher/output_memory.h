// Memory for results on the CPU. malloc returns large blocks to the system when they are freed, and
// touching a fresh page costs a page fault, more than a kernel takes to fill it. So freed blocks
// are kept for the next result, up to a limit (posembed/memory.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace posembed::dispatcher {

/// at::empty, with kept memory for large CPU tensors if some fits.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The same for results of kernels and Meta kernels alike.
at::Tensor empty_symint(c10::SymIntArrayRef sizes, const at::TensorOptions& options);

/// at::empty_strided; see empty().
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         const at::TensorOptions& options);

/// A contiguous CPU tensor, and whether it is all zeros.
struct ZeroTable {
  at::Tensor tensor;
  bool is_zero;  // if not, it holds anything
};

/// Memory for a table of which most rows stay zero. Fresh pages are zero already, so only the other
/// rows need writing.
ZeroTable empty_table(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace posembed::dispatcher
