// One function for each family's C++ modules; each lives in a file of the family's name.
#pragma once

#include <torch/python.h>

#include <sstream>
#include <string>

#include "posembed/pretrained.h"
#include "posembed/token.h"

namespace posembed::python {

namespace py = pybind11;

void bind_alibi(py::module_& module);
void bind_bag(py::module_& module);
void bind_input(py::module_& module);
void bind_learned(py::module_& module);
void bind_pretrained(py::module_& module);
void bind_rotary(py::module_& module);
void bind_sinusoidal(py::module_& module);
void bind_token(py::module_& module);

/// A number, or "sqrt_dim"; raises ValueError for any other text.
double table_scale(const py::object& scale, int64_t embedding_dim);

/// From the name that Python gives; raises ValueError for any other.
TableGradient table_gradient(const std::string& text);

/// How to read a table, in Python's words; control-C ends the reading.
pretrained::ReadOptions read_options(const std::string& tensor, std::optional<torch::Dtype> dtype,
                                     const std::string& missing, const py::object& progress);

/// Binds a C++ module that prints itself in Python as it does in C++.
template <typename Implementation>
auto bind(py::module_& module, const char* name) {
  auto bound = torch::python::bind_module<Implementation>(module, name);
  const auto print = [](const Implementation& self) {
    std::ostringstream text;
    text << static_cast<const torch::nn::Module&>(self);
    return text.str();
  };
  return bound.def("__repr__", print, py::prepend());  // before torch's own, which says no options
}

}  // namespace posembed::python
