// Schemas of a family's operators from a struct of arguments. The struct names its fields once, in
// the order of the schemas and of its members:
//   template <typename Self>
//   static auto fields(Self& self) { return std::tie(self.ids, self.offset); }
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace posembed::dispatcher {

/// std::tuple of references to the fields of `Call`.
template <typename Call>
using FieldsOf = decltype(Call::fields(std::declval<Call&>()));

/// The type in which a schema passes a field.
template <typename Field>
struct ParameterFor {
  using Type = Field;
};
template <>
struct ParameterFor<at::Tensor> {
  using Type = const at::Tensor&;
};
template <>
struct ParameterFor<std::optional<at::Tensor>> {
  using Type = const std::optional<at::Tensor>&;
};
template <>
struct ParameterFor<std::string> {
  using Type = std::string_view;
};
template <typename Field>
using Parameter = typename ParameterFor<std::decay_t<Field>>::Type;

template <typename Field, typename Given>
decltype(auto) field_from(Given&& given) {
  if constexpr (std::is_same_v<std::decay_t<Field>, std::string>) {
    return std::string(given);
  } else {
    return std::forward<Given>(given);
  }
}

template <typename Call, typename Fields, typename Function, typename... Trailing>
struct SpreadFields;

template <typename Call, typename... Fields, typename Result, typename... Leading,
          typename... Trailing>
struct SpreadFields<Call, std::tuple<Fields...>, Result(Leading...), Trailing...> {
  /// The C++ type of the schema.
  using Signature = Result(Leading..., Parameter<Fields>..., Trailing...);

  /// The function to register: `function` with a parameter for each field.
  template <Result (*function)(Leading..., const Call&, Trailing...)>
  static Result kernel(Leading... leading, Parameter<Fields>... fields, Trailing... trailing) {
    return function(leading...,
                    Call{field_from<Fields>(std::forward<Parameter<Fields>>(fields))...},
                    trailing...);
  }

  /// Calls the operator.
  static Result call(const c10::TypedOperatorHandle<Signature>& handle, Leading... leading,
                     const Call& call, Trailing... trailing) {
    return std::apply(
        [&](const auto&... fields) -> Result {
          return handle.call(leading..., fields..., trailing...);
        },
        Call::fields(call));
  }
};

/// Operators that take the arguments of `Function`, then the fields of `Call`, then `Trailing`, and
/// return the result of `Function`.
template <typename Call, typename Function, typename... Trailing>
using Spread = SpreadFields<Call, FieldsOf<Call>, Function, Trailing...>;

}  // namespace posembed::dispatcher
