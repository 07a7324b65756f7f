// Derives the C++ signature of an operator, which has a parameter for each argument, from a
// function that takes the arguments as one struct. The struct names its fields once, in the order
// of the schema:
//   template <typename Self>
//   static auto fields(Self& self) { return std::tie(self.ids, self.offset); }
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "dispatcher/schema_type.h"

namespace posembed::dispatcher {

/// std::tuple of references to the fields of `Call`.
template <typename Call>
using FieldsOf = decltype(Call::fields(std::declval<Call&>()));

template <typename Field>
using Schema = SchemaType<std::decay_t<Field>>;

template <typename Call, typename Fields, typename Function, typename... Trailing>
struct SpreadFields;

template <typename Call, typename... Fields, typename Result, typename... Leading,
          typename... Trailing>
struct SpreadFields<Call, std::tuple<Fields...>, Result(Leading...), Trailing...> {
  /// What kernels and callers see, and what the dispatcher sees.
  using Function = Result(Leading..., const Call&, Trailing...);
  using Signature = Result(Leading..., typename Schema<Fields>::Type..., Trailing...);

  /// The kernel to register: `function` with a parameter for each field.
  template <typename Kernel>
  static auto kernel(const Kernel& function) {
    return [function](Leading... leading, typename Schema<Fields>::Type... fields,
                      Trailing... trailing) -> Result {
      Call call;
      Call::fields(call) = std::forward_as_tuple(
          Schema<Fields>::from(std::forward<typename Schema<Fields>::Type>(fields))...);
      return function(leading..., call, trailing...);
    };
  }

  /// Calls the operator.
  static Result call(const c10::TypedOperatorHandle<Signature>& handle, Leading... leading,
                     const Call& call, Trailing... trailing) {
    return std::apply(
        [&](const auto&... fields) -> Result {
          return handle.call(leading..., Schema<Fields>::to(fields)..., trailing...);
        },
        Call::fields(call));
  }
};

/// The signature of operators that take the arguments of `Function`, then the fields of `Call`,
/// then `Trailing`, and return the result of `Function`.
template <typename Function, typename Call, typename... Trailing>
struct Spread : SpreadFields<Call, FieldsOf<Call>, Function, Trailing...> {};

/// The same without a struct.
template <typename Result, typename... Arguments>
struct Spread<Result(Arguments...), void> {
  using Function = Result(Arguments...);
  using Signature = Result(Arguments...);

  template <typename Kernel>
  static auto kernel(const Kernel& function) {
    return [function](Arguments... arguments) -> Result {
      return function(std::forward<Arguments>(arguments)...);
    };
  }

  static Result call(const c10::TypedOperatorHandle<Signature>& handle, Arguments... arguments) {
    return handle.call(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace posembed::dispatcher
