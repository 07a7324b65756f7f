// Visits an operator's arguments in the order of its schema, for rules that hold for all operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace posembed::dispatcher {

template <typename Argument, typename = void>
struct has_fields : std::false_type {};

template <typename Argument>
struct has_fields<Argument, std::void_t<decltype(Argument::fields(std::declval<Argument&>()))>>
    : std::true_type {};

/// Calls visit(argument, index), or does so for the fields of a struct; index counts arguments.
template <typename Visit, typename Argument>
void visit_argument(const Visit& visit, size_t* index, const Argument& argument) {
  if constexpr (has_fields<Argument>::value) {
    std::apply([&](const auto&... fields) { (visit_argument(visit, index, fields), ...); },
               Argument::fields(argument));
  } else {
    visit(argument, (*index)++);
  }
}

template <typename Visit, typename... Arguments>
void for_each_argument(const Visit& visit, const Arguments&... arguments) {
  size_t index = 0;
  (visit_argument(visit, &index, arguments), ...);
}

/// Calls visit(tensor, index) for the tensors among the arguments that are given.
template <typename Visit, typename... Arguments>
void for_each_tensor(const Visit& visit, const Arguments&... arguments) {
  for_each_argument(
      [&](const auto& argument, size_t index) {
        using Argument = std::decay_t<decltype(argument)>;
        if constexpr (std::is_same_v<Argument, at::Tensor>) {
          if (argument.defined()) visit(argument, index);
        } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
          if (argument.has_value() && argument->defined()) visit(*argument, index);
        }
      },
      arguments...);
}

/// Calls visit(index) for tensors that are required but not given: None in Python, which a schema
/// accepts as an undefined tensor.
template <typename Visit, typename... Arguments>
void for_each_missing(const Visit& visit, const Arguments&... arguments) {
  for_each_argument(
      [&](const auto& argument, size_t index) {
        if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, at::Tensor>) {
          if (!argument.defined()) visit(index);
        }
      },
      arguments...);
}

}  // namespace posembed::dispatcher
