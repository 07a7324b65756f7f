// C++ code calls operators through the dispatcher, as Python does, so that autograd, Meta kernels,
// autocast and functionalization apply to both.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "dispatcher/first_use.h"

namespace posembed::dispatcher {

/// Each file that calls operators has a table of torch's, which is made at its first use under a
/// lock: this makes it while the library is loaded.
[[maybe_unused]] static const int made_while_loading =
    c10::DispatchKeySet(c10::DispatchKey::CPU).getDispatchTableIndexForDispatchKeySet();

/// An operator that is looked up at its first call.
template <typename Signature>
class Handle {
 public:
  explicit constexpr Handle(const char* name) : name_(name) {}

  template <typename... Arguments>
  decltype(auto) call(Arguments&&... arguments) const {
    return typed().call(std::forward<Arguments>(arguments)...);
  }

  /* implicit */ operator const c10::TypedOperatorHandle<Signature>&() const { return typed(); }

 private:
  using Typed = c10::TypedOperatorHandle<Signature>;

  const Typed& typed() const {
    return found_.get([this] {
      return c10::Dispatcher::singleton().findSchemaOrThrow(name_, "").template typed<Signature>();
    });
  }

  const char* name_;
  FirstUse<Typed> found_;
};

/// The handle of an operator. Keep it in a function-local static: it is a constant until its first
/// call, and therefore takes no lock.
template <typename Signature>
constexpr Handle<Signature> find(const char* name) {
  return Handle<Signature>(name);
}

}  // namespace posembed::dispatcher
