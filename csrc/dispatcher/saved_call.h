// The arguments of a call, saved for its backward pass in a member of an autograd node.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "dispatcher/autograd.h"
#include "dispatcher/spread.h"

namespace posembed::dispatcher {

/// How a node keeps a field: a tensor as a SavedVariable, text as a string, a dtype as its number,
/// everything else in the type that schemas use.
template <typename Field>
struct SavedField {
  using Passed = std::decay_t<typename SchemaType<Field>::Type>;
  using Type = std::conditional_t<std::is_same_v<Passed, std::string_view>, std::string, Passed>;
  static Type save(const Field& field) { return Type(SchemaType<Field>::to(field)); }
  static Field unpack(const Type& saved) { return SchemaType<Field>::from(saved); }
};

template <>
struct SavedField<at::ScalarType> {
  using Type = int64_t;
  static Type save(at::ScalarType field) { return static_cast<Type>(field); }
  static at::ScalarType unpack(Type saved) { return static_cast<at::ScalarType>(saved); }
};

template <>
struct SavedField<at::Tensor> {
  using Type = SavedVariable;
  static Type save(const at::Tensor& field) { return dispatcher::save(field); }
  static at::Tensor unpack(const Type& saved) { return saved.unpack(); }
};

template <>
struct SavedField<std::optional<at::Tensor>> {
  using Type = SavedVariable;
  static Type save(const std::optional<at::Tensor>& field) { return dispatcher::save(field); }
  static std::optional<at::Tensor> unpack(const Type& saved) { return dispatcher::unpack(saved); }
};

template <typename Call, typename Fields>
class SavedFields;

template <typename Call, typename... Fields>
class SavedFields<Call, std::tuple<Fields...>> {
 public:
  void save(const Call& call) {
    saved_ = std::apply(
        [](const auto&... fields) {
          return Saved(SavedField<std::decay_t<Fields>>::save(fields)...);
        },
        Call::fields(call));
  }

  /// The arguments, after save(). Text in them refers to this object.
  Call unpack() const {
    Call call;
    std::apply(
        [&call](const auto&... saved) {
          Call::fields(call) = std::make_tuple(SavedField<std::decay_t<Fields>>::unpack(saved)...);
        },
        saved_);
    return call;
  }

  /// Lists the members for OperatorNode.
  template <typename Visitor>
  void members(Visitor& visit) {
    std::apply([&visit](auto&... saved) { (visit(saved), ...); }, saved_);
  }

 private:
  using Saved = std::tuple<typename SavedField<std::decay_t<Fields>>::Type...>;
  Saved saved_;
};

/// `Call` is a struct with fields(): see spread.h.
template <typename Call>
using SavedCall = SavedFields<Call, FieldsOf<Call>>;

}  // namespace posembed::dispatcher
