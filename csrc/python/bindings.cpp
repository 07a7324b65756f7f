// The Python module posembed._C: the C++ modules (posembed.cpp), readers of files, memory, build
// information. Python calls operators through torch.ops, except that eager calls of some have a
// shorter way here.
#include "bindings.h"

#include "posembed/build_info.h"
#include "posembed/memory.h"

namespace posembed::python {
namespace {

py::dict build_info() {
  const posembed::BuildInfo info = posembed::build_info();
  py::dict result;
  result["version"] = info.version;
  result["torch_version"] = info.torch_version;
  result["cuda_version"] = info.cuda_version;
  result["cuda_architectures"] = info.cuda_architectures;
  result["compiler"] = info.compiler;
  result["instruction_sets"] = info.instruction_sets;
  result["instruction_set"] = info.instruction_set;
  return result;
}

}  // namespace
}  // namespace posembed::python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("build_info", &posembed::python::build_info);
  module.def("empty_cache", &posembed::empty_cache, posembed::python::without_gil());
  module.def("prefer_huge_pages", &posembed::prefer_huge_pages, py::arg("table"));
  module.def("set_cache_limit", &posembed::set_cache_limit, py::arg("bytes"));
  posembed::python::bind_alibi(module);
  posembed::python::bind_bag(module);
  posembed::python::bind_input(module);
  posembed::python::bind_learned(module);
  posembed::python::bind_pretrained(module);
  posembed::python::bind_rotary(module);
  posembed::python::bind_rotary_cache(module);
  posembed::python::bind_rotary_norm(module);
  posembed::python::bind_sinusoidal(module);
  posembed::python::bind_token(module);
}
