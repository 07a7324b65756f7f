// Binds each family's C++ modules. Each family's bindings are in the file of its name.
#pragma once

#include <torch/python.h>

#include <optional>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "posembed/alibi.h"
#include "posembed/offset.h"

namespace posembed::binding {

namespace py = pybind11;

/// Releases the GIL during a bound call.
using without_gil = py::call_guard<py::gil_scoped_release>;

/// Registers a file's function that binds its classes: each file has one Binding.
class Binding {
 public:
  using Function = void (*)(py::module_& module);

  explicit Binding(Function bind) { all().push_back(bind); }

  static std::vector<Function>& all() {
    static std::vector<Function> functions;
    return functions;
  }
};

/// A number, or "sqrt_dim"; raises ValueError for any other text.
double table_scale(const py::object& scale, int64_t embedding_dim);

/// "bsd" or "sbd"; raises ValueError for any other text.
inline AdditiveLayout additive_layout(const std::string& text) {
  if (text == "sbd") return AdditiveLayout::sbd;
  if (text != "bsd") throw py::value_error("layout: expected 'bsd' or 'sbd', got '" + text + "'");
  return AdditiveLayout::bsd;
}

/// Binds a C++ module that prints itself in Python as it does in C++.
template <typename Implementation>
auto bind(py::module_& module, const char* name) {
  auto bound = torch::python::bind_module<Implementation>(module, name);
  const auto print = [](const Implementation& self) {
    std::ostringstream text;
    text << static_cast<const torch::nn::Module&>(self);
    return text.str();
  };
  return bound.def("__repr__", print, py::prepend());  // before torch's own, without options
}

/// The same for a module with a table that can become codes.
template <typename Implementation>
auto bind_table(py::module_& module, const char* name) {
  return bind<Implementation>(module, name)
      .def("quantize", &Implementation::quantize, py::arg("format") = "float8",
           py::arg("block") = 0, without_gil())
      .def("memory", &Implementation::memory);
}

/// Adds a static method that makes a module: torch's binding of modules supports only methods of
/// instances.
template <typename Function, typename... Extra>
void def_maker(const py::module_& module, const char* type, const char* name, Function&& make,
               const Extra&... extra) {
  const py::object wrapper = module.attr(type);
  const py::cpp_function made(std::forward<Function>(make), py::name(name), extra...);
  const auto wrapped = [wrapper, made](const py::args& arguments, const py::kwargs& options) {
    py::object self = wrapper.attr("__new__")(wrapper);
    py::module_::import("torch.nn.cpp")
        .attr("ModuleWrapper")
        .attr("__init__")(self, made(*arguments, **options));
    return self;
  };
  wrapper.attr(name) = py::staticmethod(py::cpp_function(wrapped, py::name(name)));
}

}  // namespace posembed::binding

/// In Python an Offset is a number or a tensor.
template <>
struct pybind11::detail::type_caster<posembed::Offset> {
  PYBIND11_TYPE_CASTER(posembed::Offset, const_name("int | torch.Tensor"));

  bool load(handle source, bool convert) {
    if (make_caster<torch::Tensor> tensor; tensor.load(source, convert)) {
      value = posembed::Offset(cast_op<torch::Tensor>(std::move(tensor)));
      return true;
    }
    make_caster<int64_t> number;
    if (!number.load(source, convert)) return false;
    value = posembed::Offset(cast_op<int64_t>(number));
    return true;
  }
};

namespace posembed::binding {

// -------------------------------------------------------------------------------------------- path
// Converts paths to bytes like Python's os module, because paths need not be UTF-8.

inline std::string path_of(const pybind11::object& path) {
  return pybind11::module_::import("os").attr("fsencode")(path).cast<std::string>();
}

// -------------------------------------------------------------------------------------- score call
// Arguments of calls with positions of queries and keys, which Python passes as keywords.

using MaybeTensor = std::optional<torch::Tensor>;

/// A number, or one for each sample.
using QueryOffset = std::optional<std::variant<int64_t, torch::Tensor>>;

/// Binds `function`, which takes an ALiBiCall before its other arguments, with the call's options
/// as Python's keywords.
template <typename Bound, typename Implementation, typename... Leading, typename... Arguments>
void def_call(Bound& bound, const char* name,
              torch::Tensor (*function)(Implementation&, ALiBiCall, Leading...),
              const Arguments&... arguments) {
  const auto call = [function](Implementation& self, Leading... leading,
                               const QueryOffset& query_offset, const MaybeTensor& query_positions,
                               const MaybeTensor& key_positions, const MaybeTensor& cu_seqlens,
                               const MaybeTensor& attention_mask, bool apply_mask) {
    ALiBiCall options;
    options.query_positions(query_positions).key_positions(key_positions).cu_seqlens(cu_seqlens);
    options.attention_mask(attention_mask).apply_mask(apply_mask);
    if (query_offset.has_value()) {
      const auto* number = std::get_if<int64_t>(&*query_offset);
      if (number != nullptr) options.query_offset(*number);
      if (number == nullptr) options.query_offsets(std::get<torch::Tensor>(*query_offset));
    }
    return function(self, options, leading...);
  };
  const py::none none;
  bound.def(name, call, arguments..., py::arg("query_offset") = none,
            py::arg("query_positions") = none, py::arg("key_positions") = none,
            py::arg("cu_seqlens") = none, py::arg("attention_mask") = none,
            py::arg("apply_mask") = true, without_gil());
}

}  // namespace posembed::binding
