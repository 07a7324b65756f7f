// C++ code calls operators through the dispatcher, as Python does, so that autograd, Meta kernels,
// autocast and functionalization apply to both.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace posembed::dispatcher {

/// The handle of an operator. Keep it in a function-local static, because the look-up takes a lock.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

}  // namespace posembed::dispatcher
