// Converts paths to bytes and back like Python's os module, because paths need not be UTF-8.
#pragma once

#include <torch/python.h>

#include <string>

namespace posembed::binding {

inline std::string path_of(const pybind11::object& path) {
  return pybind11::module_::import("os").attr("fsencode")(path).cast<std::string>();
}

inline pybind11::object python_path(const std::string& path) {
  return pybind11::module_::import("os").attr("fsdecode")(pybind11::bytes(path));
}

}  // namespace posembed::binding
