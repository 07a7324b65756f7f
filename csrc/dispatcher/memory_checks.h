// Checks of memory that operators write: results provided by the caller, and tensors changed in
// place.
#pragma once

#include <ATen/core/Tensor.h>

namespace posembed::dispatcher {

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
