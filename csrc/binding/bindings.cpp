// The Python module posembed._C: the C++ modules (posembed.cpp) and readers of files. Operators are
// only in torch.ops.posembed.
#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  for (const auto bind : posembed::binding::Binding::all()) bind(module);
}
