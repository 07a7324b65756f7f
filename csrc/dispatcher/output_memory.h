// Memory for results on the CPU. Fresh pages cost a fault each, more than kernels take to fill
// them, and malloc gives large blocks back to the system at once: blocks that came from there are
// kept for the next result, up to a limit (posembed/memory.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <optional>

namespace posembed::dispatcher {

/// at::empty; large CPU tensors get kept memory where some fits.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The same for results of kernels and Meta kernels alike.
at::Tensor empty_symint(c10::SymIntArrayRef sizes, const at::TensorOptions& options);

/// at::empty_strided; see empty().
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         const at::TensorOptions& options);

/// A contiguous CPU tensor.
struct ZeroTable {
  at::Tensor tensor;
  bool is_zero;  // if not, it holds anything
};

/// Memory for a table of which most rows stay zero. Fresh pages hold zeros already: there, only
/// rows that are not zero are worth writing.
ZeroTable empty_table(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace posembed::dispatcher
