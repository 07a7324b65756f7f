// How schemas pass the fields of a struct of arguments: an enum as its name, an Offset as a SymInt,
// a Given<T> as T, everything else unchanged.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/brief.h"
#include "posembed/given.h"
#include "posembed/offset.h"

namespace posembed::dispatcher {

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
