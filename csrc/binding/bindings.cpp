// The Python module posembed._C: the C++ modules of posembed.cpp, for one version of Python. The
// rest of the package needs libposembed.so alone.
#include "bindings.h"

// Bound classes are constant, or belong to one thread: a free-threaded Python stays so.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module, pybind11::mod_gil_not_used()) {
  for (const auto bind : posembed::binding::Binding::all()) bind(module);
}
