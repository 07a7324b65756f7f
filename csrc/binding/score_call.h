// Arguments of calls with positions of queries and keys, which Python passes as keywords.
#pragma once

#include <optional>
#include <variant>

#include "posembed/alibi.h"

namespace posembed::binding {

using MaybeTensor = std::optional<torch::Tensor>;

/// A number, or one for each sample.
using QueryOffset = std::optional<std::variant<int64_t, torch::Tensor>>;

/// The options of a call.
inline ALiBiCall call_of(std::optional<double> scale, const QueryOffset& query_offset,
                         const MaybeTensor& query_positions, const MaybeTensor& key_positions,
                         const MaybeTensor& cu_seqlens, const MaybeTensor& attention_mask,
                         bool apply_mask, const MaybeTensor& sample_slopes) {
  ALiBiCall call;
  if (query_offset.has_value()) {
    const auto* number = std::get_if<int64_t>(&*query_offset);
    if (number != nullptr) call.query_offset(*number);
    if (number == nullptr) call.query_offsets(std::get<torch::Tensor>(*query_offset));
  }
  return call.scale(scale)
      .sample_slopes(sample_slopes)
      .query_positions(query_positions)
      .key_positions(key_positions)
      .cu_seqlens(cu_seqlens)
      .attention_mask(attention_mask)
      .apply_mask(apply_mask);
}

}  // namespace posembed::binding
