// The Python module posembed._C: the C++ modules (posembed.cpp) and readers of files. Operators are
// torch.ops.posembed alone.
#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  posembed::python::bind_alibi(module);
  posembed::python::bind_bag(module);
  posembed::python::bind_input(module);
  posembed::python::bind_learned(module);
  posembed::python::bind_pretrained(module);
  posembed::python::bind_rotary(module);
  posembed::python::bind_sinusoidal(module);
  posembed::python::bind_token(module);
}
