// The boundaries of documents packed one after another.
#pragma once

#include <ATen/core/Tensor.h>

namespace posembed::dispatcher {

/// Checks what needs no values: integers [documents + 1].
void check_boundaries(const at::Tensor& cu_seqlens);

/// Checks that `cu_seqlens`, [documents + 1] integers, are prefix sums of document lengths that add
/// up to `total`, named `total_name` in the message. Does not check on CUDA, where it would wait
/// for the device: kernels stay in bounds for any values.
void check_cu_seqlens(const at::Tensor& cu_seqlens, int64_t total, const char* total_name);

}  // namespace posembed::dispatcher
