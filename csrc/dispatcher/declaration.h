// What an operator's schema says, looked up once: its handle, the names of its arguments and which
// of them it writes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

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

// ------------------------------------------------------------------------------------ registration
// Families register schemas with TORCH_LIBRARY_FRAGMENT(posembed, m) in x_operator.cpp. `spec` is
// the JSON text of a specification: numbers that no dtype cast can change. Lengths and offsets are
// SymInt, so that a compiled graph serves every length. Operators without tensor arguments take a
// device, as FakeTensorMode requires. "(a!)" marks a tensor that the operator writes to; such
// operators return nothing, which functionalization expects.

// torch's conjugate and negative bits: views such as x.conj() and x.conj().imag, whose memory
// differs from their values. torch's own rule expects that operators return what they write, which
// posembed's do not.

/// Registers one rule for the operator of a schema: arguments that it reads are resolved; one that
/// it writes raises c10::ValueError, because a copy would be written instead.
void define_math_bits(torch::Library& library, const std::string& schema);

/// Defines an operator: its name and its arguments, then its result.
inline void define(torch::Library& library, const std::string& schema) {
  library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  define_math_bits(library, schema);
}

}  // namespace posembed::dispatcher
