// Calls of C++ functions from Python without the overhead of pybind11's dispatch: arguments are
// positional, and their number and types are those of the function.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "bindings.h"

namespace posembed::python {

/// Releases Python's lock while it exists, except for small work on the CPU, where releasing and
/// taking it again would be a noticeable part of the call.
class ReleasedForLongWork {
 public:
  /// `each`: elements of the result per element of `tensor`.
  explicit ReleasedForLongWork(const torch::Tensor& tensor, int64_t each = 1) {
    if (is_long(tensor, each)) released_.emplace();
  }

 private:
  static bool is_long(const torch::Tensor& tensor, int64_t each) {
    constexpr int64_t little = 1 << 16;  // elements
    return !tensor.is_cpu() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
           tensor.numel() > little / each;
  }

  std::optional<py::gil_scoped_release> released_;
};

/// The elements of a typical table row, for ReleasedForLongWork.
inline constexpr int64_t usual_row = 1024;

inline const torch::Tensor& tensor_from(PyObject* object, const char* name, const char* expected) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), name, ": expected ", expected, ", got ",
                   Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

inline std::string_view text_from(PyObject* object, const char* name) {
  TORCH_CHECK_TYPE(PyUnicode_Check(object), name, ": expected str, got ", Py_TYPE(object)->tp_name);
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

inline int64_t integer_from(PyObject* object, const char* name) {
  TORCH_CHECK_TYPE(PyIndex_Check(object), name, ": expected int, got ", Py_TYPE(object)->tp_name);
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

inline double number_from(PyObject* object, const char* name, const char* expected) {
  const double value = PyFloat_AsDouble(object);
  if (value != -1 || PyErr_Occurred() == nullptr) return value;
  PyErr_Clear();
  TORCH_CHECK_TYPE(false, name, ": expected ", expected, ", got ", Py_TYPE(object)->tp_name);
}

inline bool truth_of(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw py::error_already_set();
  return value != 0;
}

/// A Python object as an argument of type T; `name` is for messages.
template <typename T>
decltype(auto) from_python(PyObject* object, const char* name) {
  if constexpr (std::is_same_v<T, const torch::Tensor&>) {
    return tensor_from(object, name, "a tensor");
  } else if constexpr (std::is_same_v<T, const std::optional<torch::Tensor>&>) {
    using Maybe = std::optional<torch::Tensor>;
    return object == Py_None ? Maybe() : Maybe(tensor_from(object, name, "a tensor or None"));
  } else if constexpr (std::is_same_v<T, std::string_view>) {
    return text_from(object, name);
  } else if constexpr (std::is_same_v<T, const std::variant<double, torch::Tensor>&>) {
    using Number = std::variant<double, torch::Tensor>;
    return THPVariable_Check(object) ? Number(THPVariable_Unpack(object))
                                     : Number(number_from(object, name, "a number or a tensor"));
  } else if constexpr (std::is_same_v<T, double>) {
    return number_from(object, name, "a number");
  } else if constexpr (std::is_same_v<T, bool>) {
    return truth_of(object);
  } else if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
    return object == Py_None ? T() : T(integer_from(object, name));
  } else {
    static_assert(std::is_same_v<T, int64_t>);
    return integer_from(object, name);
  }
}

inline PyObject* to_python(torch::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

inline PyObject* to_python(std::tuple<torch::Tensor, torch::Tensor> tensors) {
  py::object first = py::reinterpret_steal<py::object>(to_python(std::get<0>(std::move(tensors))));
  py::object second = py::reinterpret_steal<py::object>(to_python(std::get<1>(std::move(tensors))));
  return py::make_tuple(std::move(first), std::move(second)).release().ptr();
}

template <typename... Results>
PyObject* to_python(std::variant<Results...> result) {
  return std::visit([](auto& held) { return to_python(std::move(held)); }, result);
}

template <typename Result, typename... Arguments, size_t... places>
PyObject* call(Result (*function)(Arguments...), const char* const* names, PyObject* const* given,
               std::index_sequence<places...>) {
  if constexpr (std::is_void_v<Result>) {
    function(from_python<Arguments>(given[places], names[places])...);
    return py::none().release().ptr();
  } else {
    return to_python(function(from_python<Arguments>(given[places], names[places])...));
  }
}

template <typename Result, typename... Arguments, size_t count>
PyObject* checked_call(Result (*function)(Arguments...), const char* const (&names)[count],
                       PyObject* const* given, Py_ssize_t number) {
  static_assert(count == sizeof...(Arguments), "each argument has a name");
  TORCH_CHECK_TYPE(number == count, "expected ", count, " arguments by place, got ", number);
  return call(function, names, given, std::index_sequence_for<Arguments...>());
}

/// `function` in the form in which Python calls it; `names` are its arguments' names.
template <auto function, const auto& names>
PyObject* fast_call(PyObject*, PyObject* const* given, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  return checked_call(function, names, given, number);
  END_HANDLE_TH_ERRORS
}

/// An entry of a table of functions.
template <auto function, const auto& names>
PyMethodDef fast_method(const char* name, const char* signature) {
  const auto erased = reinterpret_cast<void (*)()>(&fast_call<function, names>);
  return {name, reinterpret_cast<PyCFunction>(erased), METH_FASTCALL, signature};
}

}  // namespace posembed::python
