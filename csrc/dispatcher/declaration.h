// What an operator's schema says, looked up once: its handle, the names of its arguments and which
// of them it writes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace posembed::dispatcher {

/// The operator posembed::<name>, and a bit for each argument that its schema marks as written.
class Declaration {
 public:
  explicit Declaration(const char* name);

  template <typename Signature>
  c10::TypedOperatorHandle<Signature> typed() const {
    return operator_.typed<Signature>();
  }

  const char* name_of(size_t argument) const {
    return operator_.schema().arguments()[argument].name().c_str();
  }

  bool writes(size_t argument) const { return (written_ >> argument & 1) != 0; }

  /// Fails unless the arguments from `first` on have these names: "self.ids, self.offset()".
  void check_names(std::string_view expressions, size_t first) const;

  /// Throws c10::TypeError for a required tensor that is undefined.
  [[noreturn]] void raise_missing(size_t argument) const;

  /// Throws c10::ValueError for tensors on two devices: `other` is not on that of `first`.
  [[noreturn]] void raise_devices(const at::Tensor& first, size_t first_argument,
                                  const at::Tensor& other, size_t other_argument) const;

  /// Throws c10::ValueError for a tensor whose gradient or tangent would be lost. Refers from
  /// posembed::f_ and posembed::f_out to posembed::f.
  [[noreturn]] void raise_history(const at::Tensor& tensor, size_t argument) const;

 private:
  c10::OperatorHandle operator_;
  uint64_t written_ = 0;
};

}  // namespace posembed::dispatcher
