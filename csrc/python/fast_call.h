// Calls of C++ functions from Python without pybind11's dispatch, which takes as long as the
// rotation of a token: arguments come by place, their number and types are those of the function.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "bindings.h"

namespace posembed::python {

inline const torch::Tensor& tensor_from(PyObject* object, size_t place, const char* expected) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "argument ", place + 1, ": expected ", expected,
                   ", got ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

inline std::string_view text_from(PyObject* object, size_t place) {
  TORCH_CHECK_TYPE(PyUnicode_Check(object), "argument ", place + 1, ": expected str, got ",
                   Py_TYPE(object)->tp_name);
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

inline int64_t integer_from(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

inline bool truth_of(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw py::error_already_set();
  return value != 0;
}

/// A Python object as an argument of type T, the one at `place`.
template <typename T>
decltype(auto) from_python(PyObject* object, size_t place) {
  if constexpr (std::is_same_v<T, const torch::Tensor&>) {
    return tensor_from(object, place, "a tensor");
  } else if constexpr (std::is_same_v<T, const std::optional<torch::Tensor>&>) {
    using Maybe = std::optional<torch::Tensor>;
    return object == Py_None ? Maybe() : Maybe(tensor_from(object, place, "a tensor or None"));
  } else if constexpr (std::is_same_v<T, std::string_view>) {
    return text_from(object, place);
  } else if constexpr (std::is_same_v<T, bool>) {
    return truth_of(object);
  } else {
    static_assert(std::is_same_v<T, int64_t>);
    return integer_from(object);
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
PyObject* call(Result (*function)(Arguments...), PyObject* const* given,
               std::index_sequence<places...>) {
  if constexpr (std::is_void_v<Result>) {
    function(from_python<Arguments>(given[places], places)...);
    return py::none().release().ptr();
  } else {
    return to_python(function(from_python<Arguments>(given[places], places)...));
  }
}

template <typename Result, typename... Arguments>
PyObject* checked_call(Result (*function)(Arguments...), PyObject* const* given, Py_ssize_t count) {
  TORCH_CHECK_TYPE(count == sizeof...(Arguments), "expected ", sizeof...(Arguments),
                   " arguments by place, got ", count);
  return call(function, given, std::index_sequence_for<Arguments...>());
}

/// `function` in the form in which Python calls it.
template <auto function>
PyObject* fast_call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return checked_call(function, given, count);
  END_HANDLE_TH_ERRORS
}

/// An entry of a table of functions.
template <auto function>
PyMethodDef fast_method(const char* name, const char* signature) {
  const auto erased = reinterpret_cast<void (*)()>(&fast_call<function>);
  return {name, reinterpret_cast<PyCFunction>(erased), METH_FASTCALL, signature};
}

}  // namespace posembed::python
