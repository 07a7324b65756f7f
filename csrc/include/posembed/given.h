// An option of a call that knows whether the caller set it, so that a module with a value of its
// own can refuse another one instead of ignoring it.
#pragma once

namespace posembed {

/// A value that converts to and from T.
///
///     TORCH_ARG(Given<bool>, causal) = Given<bool>::default_to(true);
template <typename T>
class Given {
 public:
  /// A value that the caller set.
  /* implicit */ Given(T value) : value_(value), by_caller_(true) {}

  /// What is used unless the caller sets a value.
  static Given default_to(T value) {
    Given result(value);
    result.by_caller_ = false;
    return result;
  }

  operator T() const { return value_; }

  /// Whether the caller set it.
  bool by_caller() const { return by_caller_; }

  /// Whether the caller set another value than `own`.
  bool contradicts(T own) const { return by_caller_ && value_ != own; }

 private:
  T value_;
  bool by_caller_;
};

}  // namespace posembed
