// The arguments of a call, saved for its backward pass in a member of an autograd node.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "dispatcher/autograd.h"
#include "dispatcher/spread.h"

namespace posembed::dispatcher {

template <typename Call, typename Fields>
class SavedFields;

template <typename Call, typename... Fields>
class SavedFields<Call, std::tuple<Fields...>> {
 public:
  void save(const Call& call) {
    kept_ =
        std::apply([](const auto&... fields) { return Kept(keep(fields)...); }, Call::fields(call));
  }

  /// The arguments, after save().
  Call unpack() const {
    return std::apply(
        [](const auto&... kept) { return Call{field<std::decay_t<Fields>>(kept)...}; }, kept_);
  }

  /// Lists the members for OperatorNode.
  template <typename Visitor>
  void members(Visitor& visit) {
    std::apply([&visit](auto&... kept) { (visit(kept), ...); }, kept_);
  }

 private:
  static SavedVariable keep(const at::Tensor& tensor) { return dispatcher::save(tensor); }
  static SavedVariable keep(const std::optional<at::Tensor>& tensor) {
    return dispatcher::save(tensor);
  }
  template <typename Field>
  static Field keep(const Field& field) {
    return field;
  }

  template <typename Field, typename Member>
  static Field field(const Member& kept) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      return kept.unpack();
    } else if constexpr (std::is_same_v<Field, std::optional<at::Tensor>>) {
      return dispatcher::unpack(kept);
    } else {
      return kept;
    }
  }

  using Kept = std::tuple<decltype(keep(std::declval<const std::decay_t<Fields>&>()))...>;
  Kept kept_;
};

/// `Call` is a struct with fields(), which owns its fields: see spread.h.
template <typename Call>
using SavedCall = SavedFields<Call, FieldsOf<Call>>;

}  // namespace posembed::dispatcher
