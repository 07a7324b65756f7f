#include "configuration/gguf_layers.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "configuration/limits.h"

namespace posembed::configuration::gguf {
namespace {

using Places = std::vector<bool>;

const char* const pattern_key = "attention.sliding_window_pattern";

/// As many layers as every period of the table fits into.
constexpr size_t every_kind = 120;

/// All layers, and those before the last ones, which predict further tokens.
struct Counts {
  size_t all;
  size_t trunk;
};

int64_t count_at(Keys& keys, const char* key, int64_t otherwise) {
  const int64_t count = whole(key, keys.take(key, otherwise));
  TORCH_CHECK_VALUE(count >= 0 && count <= most_layers, key, ": expected 0 to ", most_layers,
                    ", got ", count);
  return count;
}

Counts counts_of(Metadata& file) {
  const int64_t all = count_at(file.model, "block_count", every_kind);
  const char* key = "nextn_predict_layers";
  const int64_t next = count_at(file.model, key, 0);
  TORCH_CHECK_VALUE(next <= all, key, ": expected at most block_count, got ", next);
  return {static_cast<size_t>(all), static_cast<size_t>(all - next)};
}

/// The values of a list with an entry for each layer; layers beyond its end have `otherwise`.
Places listed(const std::string& key, const json& list, size_t length, bool otherwise) {
  TORCH_CHECK_VALUE(list.is_array() && !list.empty(), key, ": expected a list of layers, got ",
                    repr(list, 60));
  Places places(length, otherwise);
  for (size_t place = 0; place < std::min(length, list.size()); ++place) {
    places[place] = flag(key, list[place]);
  }
  return places;
}

/// Sliding windows in all layers but one of each period: the last, or the first.
Places periodic(int64_t period, bool full_first, const Counts& counts) {
  TORCH_CHECK_VALUE(period >= 0, pattern_key, ": expected 0 or more, got ", period);
  Places places(counts.all, false);
  for (size_t place = 0; place < counts.trunk; ++place) {
    const int64_t full = full_first ? 0 : period - 1;
    places[place] = period == 0 || static_cast<int64_t>(place) % period != full;
  }
  return places;
}

/// Whether each layer has a sliding window.
Places windows_of(Metadata& file, const Counts& counts) {
  if (!has_windows(file)) return Places(counts.all, false);
  const json& rule = get(file.rules, "windows");
  const json& known = get(rule, "period");
  const json pattern = file.model.take(pattern_key, known);
  TORCH_CHECK_VALUE(!pattern.is_null(), pattern_key, ": missing in the metadata");
  if (pattern.is_array() || known.is_null()) return listed(pattern_key, pattern, counts.all, false);
  return periodic(whole(pattern_key, pattern), truthy(get(rule, "full_first")), counts);
}

/// Recurrent layers, which do not rotate: those without heads of keys, or all but the last of each
/// period.
Places recurrent_of(Metadata& file, const Counts& counts) {
  Places places(counts.all, false);
  const json& rule = get(file.rules, "recurrent");
  if (rule.is_null()) return places;
  if (rule.is_string()) {
    const json heads = file.model.take(text_of(rule));
    for (size_t place = 0; heads.is_array() && place < counts.all; ++place) {
      places[place] = place >= heads.size() || equal(heads[place], 0);
    }
    return places;
  }
  const json list = file.model.take("attention.recurrent_layers");
  const char* key = "full_attention_interval";
  const int64_t period = whole(key, file.model.take(key, rule));
  TORCH_CHECK_VALUE(period > 0, key, ": expected a positive number, got ", period);
  if (!list.is_null()) return listed("attention.recurrent_layers", list, counts.all, false);
  for (size_t place = 0; place < counts.trunk; ++place) {
    places[place] = (static_cast<int64_t>(place) + 1) % period != 0;
  }
  return places;
}

/// One of every few layers does not rotate.
bool is_left_out(const json& rule, bool windowed, size_t place) {
  if (rule.is_null() || (truthy(get(rule, "windowed")) && !windowed)) return false;
  const auto every = get(rule, "every").get<size_t>();
  return place % every == get(rule, "place").get<size_t>();
}

/// Whether layers rotate by what the architecture rotates: all, those with a sliding window, or
/// those that a key lists.
Places rotated_by_kind(Metadata& file, const Places& windows) {
  const json& rule = get(file.rules, "rotated");
  if (rule == "sliding" && has_windows(file)) {
    Places places = windows;
    const json& key = get(file.rules, "rotated_first");
    const int64_t first = key.is_null() ? 0 : count_at(file.model, text_of(key).c_str(), 0);
    for (size_t place = 0; place < places.size(); ++place) {
      if (place < static_cast<size_t>(first)) places[place] = true;
    }
    return places;
  }
  const json list = rule.is_null() || rule == "sliding" ? json() : file.model.take(text_of(rule));
  if (list.is_null()) return Places(windows.size(), true);
  return listed(text_of(rule), list, windows.size(), true);
}

/// Layers that predict further tokens rotate as the others; where those differ, the table knows
/// whether llama.cpp runs them at all.
void check_next_tokens(const Metadata& file, const Counts& counts, const std::vector<Layer>& all) {
  const bool alike = std::all_of(all.begin(), all.end(), [&](const Layer& layer) {
    return layer.slides == all.front().slides && layer.rotates == all.front().rotates;
  });
  TORCH_CHECK_VALUE(counts.all == counts.trunk || alike || truthy(get(file.rules, "next_tokens")),
                    "nextn_predict_layers: not understood for '", file.architecture,
                    "': llama.cpp does not run these layers");
}

}  // namespace

bool has_windows(Metadata& file) {
  const json& when = get(get(file.rules, "windows"), "when");
  if (when.is_null()) return false;
  const json window = file.model.take("attention.sliding_window");
  if (when == "stated") return truthy(window);
  if (when == "always") return true;
  const json& count = get(get(file.rules, "windows"), "block_count");
  return equal(file.model.need("block_count"), count);
}

std::vector<Layer> layers_of(Metadata& file) {
  const Counts counts = counts_of(file);
  const Places windows = windows_of(file, counts), recurrent = recurrent_of(file, counts);
  const Places rotated = rotated_by_kind(file, windows);
  const json& left_out = get(file.rules, "unrotated");
  const json& off = get(file.rules, "switch");
  const bool any = off.is_null() || flag(text_of(off), file.rope.take(text_of(off), true));
  std::vector<Layer> layers;
  for (size_t place = 0; place < counts.all; ++place) {
    const bool trunk = place < counts.trunk;
    const bool rotates =
        rotated[place] && !recurrent[place] && !is_left_out(left_out, has_windows(file), place);
    const bool next = !trunk && truthy(get(file.rules, "next_tokens"));
    layers.push_back({windows[place], any && (rotates || next)});
  }
  check_next_tokens(file, counts, layers);
  return layers;
}

}  // namespace posembed::configuration::gguf
