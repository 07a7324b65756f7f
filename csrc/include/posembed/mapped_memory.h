/// Tables in the host's memory that a device reads directly, because they do not fit into its own.
#pragma once

#include <torch/types.h>

#include "posembed/export.h"

namespace posembed {

/// A tensor on `device` whose memory is that of `table`, a tensor on the CPU: the memory is pinned,
/// and kernels read it through the bus, so a look-up moves the rows that it needs and no others.
/// The result keeps `table` alive. Do not write to either while kernels read it.
///
///     auto rows = posembed::functional::embedding(ids, posembed::mapped(table, ids.device()));
///
/// @param table  contiguous, of any shape and dtype
/// @param device  a CUDA device; for the CPU, the result is `table`
/// @throws c10::ValueError `table` is elsewhere, not contiguous, or cannot be pinned
POSEMBED_API torch::Tensor mapped(const torch::Tensor& table, torch::Device device);

}  // namespace posembed
