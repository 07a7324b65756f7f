#include "configuration/keys.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "configuration/words.h"

namespace posembed::configuration {
namespace {

/// Keys whose value is a single number wherever they occur.
constexpr Words number_keys = R"(
alpha attention_factor attention_head_dim base beta beta_fast beta_slow compress_rope_theta dim
embed_dim factor global_head_dim global_rope_theta head_dim hidden_size high_freq_factor
kv_channels layer_rope_theta local_rope_theta long_mscale low_freq_factor max_position_embeddings
mscale mscale_all_dim n_embd n_head n_heads num_attention_heads num_heads
original_max_position_embeddings partial_rotary_factor projection_dim qk_nope_head_dim
qk_rope_head_dim rope_high_freq_factor rope_local_base_freq rope_ratio rope_scaling_factor
rope_theta rotary_dim rotary_emb_base rotary_embedding_base rotary_pct seq_length short_mscale
swa_rope_theta
attention.key_length context_length embedding_length freq_base freq_base_swa scale_linear
scaling.attn_factor scaling.factor scaling.original_context_length
)";

Fields without_nulls(const Fields& fields) {
  Fields kept = Fields::object();
  for (const auto& each : fields.items()) {
    if (!each.value().is_null()) kept[each.key()] = each.value();
  }
  return kept;
}

bool contains(const std::string& key, const std::string& word) {
  return key.find(word) != std::string::npos;
}

/// Whether a double is in the range of int64_t, so that a cast is defined.
bool fits(double value) { return value >= -0x1p63 && value < 0x1p63; }

}  // namespace

Keys::Keys(const Fields& fields, std::string where) : where_(std::move(where)) {
  check_mapping(fields, where_);
  for (const auto& each : fields.items()) names_.insert(each.key());
  fields_ = without_nulls(fields);
}

json Keys::take(const std::string& key, json otherwise) {
  accepted_.insert(key);
  const json& value = get(fields_, key);
  if (value.is_null()) return otherwise;
  if (number_keys.has(key)) check_number(key, value);
  return value;
}

json Keys::need(const std::string& key) {
  json value = take(key);
  TORCH_CHECK_VALUE(!value.is_null(), key, ": missing in ", where_, ", which has ",
                    repr(keys_of(fields_)));
  return value;
}

json Keys::first(const std::vector<std::string>& keys) {
  json found;
  for (const std::string& key : keys) {
    json value = take(key);
    if (!truthy(found)) found = std::move(value);
  }
  return truthy(found) ? found : json();
}

json Keys::same(const std::vector<std::string>& keys) {
  std::vector<json> values;
  for (const std::string& key : keys) values.push_back(take(key));
  return configuration::same(keys.front(), values);
}

std::vector<std::string> Keys::left(const std::string& containing) const {
  std::vector<std::string> keys;
  for (const std::string& key : keys_of(fields_)) {
    if (accepted_.count(key) == 0 && contains(key, containing)) keys.push_back(key);
  }
  return keys;
}

void Keys::done(const std::string& containing) const {
  const std::vector<std::string> unknown = left(containing);
  std::vector<std::string> accepted;
  for (const std::string& key : accepted_) {
    if (contains(key, containing)) accepted.push_back(key);
  }
  TORCH_CHECK_VALUE(unknown.empty(), where_, ": unknown keys ", repr(unknown), "; accepted are ",
                    repr(accepted));
}

void check_mapping(const json& value, const std::string& where) {
  TORCH_CHECK_VALUE(value.is_object(), where, ": expected a dictionary, got ", repr(value));
}

json same(const std::string& key, const std::vector<json>& values) {
  json given = json::array();
  for (const json& value : values) {
    if (!value.is_null()) given.push_back(value);
  }
  const bool alike = std::all_of(given.begin(), given.end(),
                                 [&](const json& value) { return equal(value, given.front()); });
  TORCH_CHECK_VALUE(alike, key, ": the configuration contradicts itself: ", repr(given));
  return given.empty() ? json() : given.front();
}

void check_effect(const std::string& name, const json& value, const std::string& why) {
  TORCH_CHECK_VALUE(value.is_null(), name, ": expected none: ", why, ", got ", repr(value));
}

void check_number(const std::string& key, const json& value) {
  TORCH_CHECK_VALUE(value.is_number(), key, ": expected a number, got ", repr(value, 60));
}

double real(const std::string& key, const json& value) {
  check_number(key, value);
  return value.get<double>();
}

double base_number(const std::string& key, const json& value) {
  const double base = real(key, value);
  TORCH_CHECK_VALUE(std::isfinite(base) && base >= 1.0, key,
                    ": expected a finite number of at least 1, got ", repr(value));
  return base;
}

std::optional<double> optional_real(const std::string& key, const json& value) {
  return value.is_null() ? std::nullopt : std::optional<double>(real(key, value));
}

std::vector<double> reals(const std::string& key, const json& values) {
  TORCH_CHECK_VALUE(values.is_array(), key, ": expected numbers, got ", repr(values, 60));
  std::vector<double> numbers;
  for (const json& value : values) numbers.push_back(real(key, value));
  return numbers;
}

int64_t whole(const std::string& key, const json& value) {
  const double number = real(key, value);
  TORCH_CHECK_VALUE(std::trunc(number) == number && fits(number), key,
                    ": expected a whole number, got ", repr(value));
  return value.is_number_integer() ? value.get<int64_t>() : static_cast<int64_t>(number);
}

std::vector<int64_t> wholes(const std::string& key, const json& values) {
  TORCH_CHECK_VALUE(values.is_array(), key, ": expected whole numbers, got ", repr(values, 60));
  std::vector<int64_t> numbers;
  for (const json& value : values) numbers.push_back(whole(key, value));
  return numbers;
}

bool flag(const std::string& key, const json& value) {
  for (const bool known : {false, true}) {
    if (equal(value, known)) return known;
  }
  TORCH_CHECK_VALUE(false, key, ": expected True or False, got ", repr(value));
}

}  // namespace posembed::configuration
