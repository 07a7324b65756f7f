#include "core/huge_pages.h"

#include <ATen/core/Tensor.h>

#include "posembed/memory.h"

namespace posembed {

void prefer_huge_pages(const torch::Tensor& table) {
  // Subclasses (FakeTensor, DTensor) have no memory of their own.
  if (!table.is_cpu() || table.unsafeGetTensorImpl()->is_python_dispatch()) return;
  const at::Storage& memory = table.storage();
  core::prefer_huge_pages(memory.data(), static_cast<int64_t>(memory.nbytes()));
}

}  // namespace posembed
