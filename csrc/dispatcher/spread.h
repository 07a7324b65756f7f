// Derives the C++ signatures of a family's operators from a struct of arguments, which names its
// fields once, in the order of the schemas: POSEMBED_FIELDS(self.ids, self.offset())
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/brief.h"
#include "dispatcher/declaration.h"
#include "posembed/given.h"
#include "posembed/offset.h"

namespace posembed::dispatcher {

// ------------------------------------------------------------------------------------- schema type
// How schemas pass the fields of a struct of arguments: an enum as its name, an Offset as a SymInt,
// a Given<T> as T, everything else unchanged.

/// An enum's argument name and values. Specialise it beside the operators that take the enum:
///   static constexpr const char* argument = "layout";
///   static constexpr Layout values[] = {Layout::bshd, …};
/// name(value) gives each value's text.
template <typename Enum>
struct EnumArgument;

/// The value of an enum by its name. Throws c10::ValueError for an unknown one.
template <typename Enum>
Enum enum_from(std::string_view text) {
  using Argument = EnumArgument<Enum>;
  for (const Enum value : Argument::values) {
    if (text == name(value)) return value;
  }
  std::ostringstream known;
  for (const Enum value : Argument::values) {
    const bool last = value == *(std::end(Argument::values) - 1);
    if (value != Argument::values[0]) known << (last ? " or " : ", ");
    known << "'" << name(value) << "'";
  }
  TORCH_CHECK_VALUE(false, Argument::argument, ": expected ", known.str(), ", got '",
                    core::brief(text), "'");
}

/// The type in which a schema passes a field, and the conversions.
template <typename Field, typename = void>
struct SchemaType {
  using Type = Field;
  static const Field& to(const Field& field) { return field; }
  static Field from(Type value) { return value; }
};

template <typename Field>
struct SchemaType<Field, std::enable_if_t<std::is_same_v<Field, at::Tensor> ||
                                          std::is_same_v<Field, std::optional<at::Tensor>>>> {
  using Type = const Field&;
  static Type to(Type field) { return field; }
  static Type from(Type value) { return value; }
};

template <>
struct SchemaType<std::string> {
  using Type = std::string_view;
  static Type to(const std::string& field) { return field; }
  static std::string from(Type value) { return std::string(value); }
};

template <typename Enum>
struct SchemaType<Enum, std::enable_if_t<std::is_enum_v<Enum>>> {
  using Type = std::string_view;
  static Type to(Enum field) { return name(field); }
  static Enum from(Type value) { return enum_from<Enum>(value); }
};

template <typename T>
struct SchemaType<Given<T>> : SchemaType<T> {};

template <>
struct SchemaType<Offset> {
  using Type = c10::SymInt;
  static const c10::SymInt& to(const Offset& field) { return field.number(); }
  static Offset from(Type value) { return Offset(std::move(value)); }
};

}  // namespace posembed::dispatcher

// ------------------------------------------------------------------------------------------ spread

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
