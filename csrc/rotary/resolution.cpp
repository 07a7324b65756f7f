// Resolves specifications whose frequencies depend on the sequence's length to those of one length.
#include <c10/util/Exception.h>

#include "rotary/scaling.h"

namespace posembed {

bool RotarySpec::is_dynamic() const {
  if (const auto* scaling = std::get_if<LongRopeScaling>(&this->scaling)) {
    return scaling->short_factor != scaling->long_factor ||
           scaling->long_attention_factor.has_value();
  }
  return std::holds_alternative<DynamicNtkScaling>(scaling);
}

RotarySpec RotarySpec::resolve(int64_t seq_len) const {
  TORCH_CHECK_VALUE(seq_len >= 0, "seq_len: expected 0 or more, got ", seq_len);
  check_fields();
  RotarySpec result = *this;
  if (const auto* dynamic = std::get_if<DynamicNtkScaling>(&scaling)) {
    result.scaling = std::monostate();
    if (seq_len > dynamic->original_max_positions) {
      const double stretch =
          static_cast<double>(seq_len) / static_cast<double>(dynamic->original_max_positions);
      // Keep the base, because a double cannot hold the new one exactly.
      result.scaling = NtkScaling{dynamic->factor * stretch - (dynamic->factor - 1.0)};
    }
  }
  if (auto* longrope = std::get_if<LongRopeScaling>(&result.scaling)) {
    if (seq_len > longrope->original_max_positions) {
      longrope->short_factor = longrope->long_factor;
      if (longrope->long_attention_factor.has_value()) {
        longrope->attention_factor = longrope->long_attention_factor;
      }
    } else {
      longrope->long_factor = longrope->short_factor;
    }
    longrope->long_attention_factor = std::nullopt;
  }
  return result;
}

double RotarySpec::attention_factor(std::optional<int64_t> seq_len) const {
  if (seq_len.has_value()) return resolve(*seq_len).attention_factor();
  check();
  return rotary::scaled(*this).attention_factor;
}

}  // namespace posembed
