// Derives the C++ signatures of a family's operators from a struct of arguments, which names its
// fields once, in the order of the schemas: POSEMBED_FIELDS(self.ids, self.offset())
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "dispatcher/declaration.h"
#include "dispatcher/schema_type.h"

/// Members of a struct of arguments: a tuple of references to its fields, and their names, which
/// are compared with the schema's.
#define POSEMBED_FIELDS(...)                               \
  static constexpr const char* field_names = #__VA_ARGS__; \
  template <typename Self>                                 \
  static auto fields(Self& self) {                         \
    return std::tie(__VA_ARGS__);                          \
  }

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

  static void check(const Declaration& declaration) {
    declaration.check_names(Call::field_names, sizeof...(Leading));
  }

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

  static void check(const Declaration&) {}

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
