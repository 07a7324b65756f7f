// One rule for devices: all tensors of a call are on the device of the first.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>
#include <type_traits>

namespace posembed::dispatcher {

/// Compares the devices of an operator's arguments, which are added in the order of its schema. A
/// struct with fields() counts as its fields.
class OneDevice {
 public:
  template <typename Argument>
  void add(const Argument& argument) {
    if constexpr (has_fields<Argument>::value) {
      std::apply([this](const auto&... fields) { (add(fields), ...); }, Argument::fields(argument));
    } else {
      if constexpr (std::is_same_v<Argument, at::Tensor>) {
        compare(argument);
      } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
        if (argument.has_value()) compare(*argument);
      }
      ++index_;
    }
  }

  /// Whether a tensor is on another device than the first one.
  bool other() const { return other_ != nullptr; }

  /// Throws c10::ValueError, which names that tensor.
  [[noreturn]] void raise(const c10::FunctionSchema& schema) const {
    const auto& arguments = schema.arguments();
    TORCH_CHECK_VALUE(false, arguments[other_index_].name(), ": expected the device of ",
                      arguments[first_index_].name(), ", ", first_->device(), ", got ",
                      other_->device());
  }

 private:
  template <typename Argument, typename = void>
  struct has_fields : std::false_type {};

  template <typename Argument>
  struct has_fields<Argument, std::void_t<decltype(Argument::fields(std::declval<Argument&>()))>>
      : std::true_type {};

  void compare(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (first_ == nullptr) {
      first_ = &tensor;
      first_index_ = index_;
    } else if (other_ == nullptr && tensor.device() != first_->device()) {
      other_ = &tensor;
      other_index_ = index_;
    }
  }

  const at::Tensor* first_ = nullptr;
  const at::Tensor* other_ = nullptr;
  size_t index_ = 0, first_index_ = 0, other_index_ = 0;
};

}  // namespace posembed::dispatcher
