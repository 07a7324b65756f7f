// Autocast where data and parameters share a dtype: data come from layers that autocast has
// lowered, and the parameters, which it leaves in float32, follow them.
#pragma once

#include <ATen/autocast_mode.h>

namespace posembed::dispatcher {

/// While this lives, calls go past autocast.
using PastAutocast = c10::impl::ExcludeDispatchKeyGuard;

/// A parameter, or an optional one, in the dtype of `data`; cast once while autocast lasts.
template <typename Parameter>
Parameter follow(const Parameter& parameter, const at::Tensor& data) {
  return at::autocast::cached_cast(data.scalar_type(), parameter, data.device().type());
}

}  // namespace posembed::dispatcher
