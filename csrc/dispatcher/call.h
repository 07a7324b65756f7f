// C++ code calls operators as Python does, through the dispatcher: autograd, Meta kernels, autocast
// and functionalization see both alike.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace posembed::dispatcher {

/// The handle of an operator. Keep it in a function-local static: the look-up takes a lock.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

}  // namespace posembed::dispatcher
