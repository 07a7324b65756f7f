// Autocast for operators whose data and parameters share a dtype: the float32 parameters are cast
// to the dtype that autocast gave the data.
#pragma once

#include <ATen/autocast_mode.h>

namespace posembed::dispatcher {

/// A parameter, or an optional one, in the dtype of `data`; cast once per autocast region.
template <typename Parameter>
Parameter follow(const Parameter& parameter, const at::Tensor& data) {
  return at::autocast::cached_cast(data.scalar_type(), parameter, data.device().type());
}

}  // namespace posembed::dispatcher
