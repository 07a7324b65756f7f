#include "configuration/limits.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "alibi/slopes.h"

namespace posembed::configuration {
namespace {

/// How keys end whose value is a count, or a list of counts, and the largest.
struct Limit {
  std::string_view end;
  int64_t most;
};
using alibi::max_heads;
constexpr Limit limits[] = {
    {"layers", most_layers}, {"layer", most_layers},       {"depth", most_layers},
    {"depths", most_layers}, {"block_count", most_layers}, {"dense_replace", most_layers},
    {"heads", max_heads},    {"head", max_heads},          {"head_count", max_heads},
    {"head_dim", max_heads}, {"sections", max_heads},      {"section", max_heads},
    {"num_labels", 131072},
};

const Limit* limit_of(std::string_view key) {
  const auto* found = std::find_if(std::begin(limits), std::end(limits), [&](const Limit& limit) {
    return key.size() >= limit.end.size() && key.substr(key.size() - limit.end.size()) == limit.end;
  });
  return found == std::end(limits) ? nullptr : found;
}

/// Checks a value and all values in it. The values of a list have the key of the list.
void check(const std::string& key, const json& value) {
  if (value.is_structured()) {
    for (const auto& each : value.items()) {
      check(value.is_object() ? each.key() : key, each.value());
    }
  } else if (value.is_number()) {
    const Limit* limit = limit_of(key);
    TORCH_CHECK_VALUE(limit == nullptr || value.get<double>() <= static_cast<double>(limit->most),
                      key, ": expected at most ", limit->most, ", got ", repr(value));
  }
}

}  // namespace

void check_counts(const Fields& fields) { check("", fields); }

void check_copies(const Fields& fields, size_t layers) {
  constexpr size_t most_bytes = size_t{1} << 28;
  TORCH_CHECK_VALUE(layers <= most_layers, "config: expected at most ", most_layers,
                    " layers, got ", layers);
  const size_t size = fields.dump().size();
  TORCH_CHECK_VALUE(layers * size <= most_bytes, "config: expected at most ", most_bytes,
                    " bytes in the views of all layers, got ", layers, " of ", size);
}

}  // namespace posembed::configuration
