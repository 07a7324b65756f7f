// Memory for results on the CPU. malloc returns large freed blocks to the system, and the page
// fault of a fresh page costs more than filling it. Freed blocks are therefore kept and reused, up
// to a limit (posembed/memory.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace posembed::dispatcher {

/// at::empty, which reuses kept memory for large CPU tensors if a block fits.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The same for results that kernels and Meta kernels share.
at::Tensor empty_symint(c10::SymIntArrayRef sizes, const at::TensorOptions& options);

/// The shape of a result without memory, which a Meta kernel returns as a tensor.
struct Unallocated {
  c10::SymDimVector sizes;
  at::TensorOptions options;

  /* implicit */ operator at::Tensor() const { return empty_symint(sizes, options); }
};

/// Throws c10::ValueError, which names `argument`, if a result would have more bytes than int64_t
/// can count. Checks that eager and Meta kernels share call it where arguments state sizes.
void check_result(c10::SymIntArrayRef sizes, at::ScalarType type, const char* argument);

/// at::empty_strided; see empty().
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         const at::TensorOptions& options);

/// A contiguous CPU tensor, and whether it is all zeros.
struct ZeroTable {
  at::Tensor tensor;
  bool is_zero;  // if false, its values are undefined
};

/// Memory for a table whose rows mostly stay zero. Fresh pages are already zero, so only the other
/// rows need to be written.
ZeroTable empty_table(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace posembed::dispatcher
