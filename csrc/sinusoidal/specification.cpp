#include "sinusoidal/specification.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/brief.h"
#include "dispatcher/json.h"
#include "dispatcher/text_cache.h"
#include "sinusoidal/frequencies.h"

namespace posembed {
namespace {

/// More than any model has: each frequency is computed.
constexpr int64_t max_columns = 65536;

/// The largest index of a table's row in any program.
constexpr int64_t max_padding_idx = std::numeric_limits<int32_t>::max();

/// Reads a field; if it is absent or null, the value does not change.
template <typename T>
void read(const nlohmann::json& object, const char* key, T& value) {
  if (object.contains(key) && !object.at(key).is_null()) value = object.at(key).get<T>();
}

template <typename T>
void read(const nlohmann::json& object, const char* key, std::optional<T>& value) {
  if (object.contains(key) && !object.at(key).is_null()) value = object.at(key).get<T>();
}

/// get() alone would truncate fractions.
void read_whole(const nlohmann::json& object, const char* key, std::optional<int64_t>& value) {
  if (!object.contains(key) || object.at(key).is_null()) return;
  const nlohmann::json& number = object.at(key);
  TORCH_CHECK_VALUE(number.is_number_integer(), key, ": expected a whole number, got ",
                    number.dump());
  value = number.get<int64_t>();
}

template <typename T>
nlohmann::json or_null(const std::optional<T>& value) {
  return value.has_value() ? nlohmann::json(*value) : nlohmann::json();
}

SinusoidalSpec parse(const std::string& text) {
  const nlohmann::json object = dispatcher::parse_json("SinusoidalSpec", text);
  const nlohmann::json& dim = object.at("embedding_dim");
  TORCH_CHECK_VALUE(dim.is_number_integer(), "embedding_dim: expected a whole number, got ",
                    dim.dump());
  SinusoidalSpec spec(dim.get<int64_t>());
  read(object, "base", spec.base);
  read(object, "preset", spec.preset);
  read(object, "cos_first", spec.cos_first);
  read(object, "shift", spec.shift);
  read(object, "scale", spec.scale);
  read_whole(object, "padding_idx", spec.padding_idx);
  const nlohmann::json known = nlohmann::json::parse(spec.to_json());
  for (const auto& entry : object.items()) {
    TORCH_CHECK_VALUE(known.contains(entry.key()), "SinusoidalSpec: unknown key '", entry.key(),
                      "' in ", text);
  }
  return spec;
}

sinusoidal::Preset preset_of(const std::string& name) {
  if (name == "vaswani") return sinusoidal::Preset::vaswani;
  if (name == "marian") return sinusoidal::Preset::marian;
  if (name == "tensor2tensor" || name == "ddpm" || name == "fairseq") {
    return sinusoidal::Preset::tensor2tensor;
  }
  TORCH_CHECK_VALUE(false, "preset: expected 'vaswani', 'marian', 'tensor2tensor', 'ddpm' or ",
                    "'fairseq', got '", core::brief(name), "'");
}

double divisor_of(const SinusoidalSpec& spec) {
  const sinusoidal::Preset preset = preset_of(spec.preset);
  const double usual = preset == sinusoidal::Preset::tensor2tensor ? 1.0 : 0.0;
  return sinusoidal::divisor_of(preset, spec.embedding_dim, spec.shift.value_or(usual));
}

/// The index of position 0 in the series; 0 without padding.
int64_t first_of(const SinusoidalSpec& spec) {
  if (spec.padding_idx.has_value()) return *spec.padding_idx + 1;
  return spec.preset == "fairseq" ? 2 : 0;
}

}  // namespace

SinusoidalSpec::SinusoidalSpec(int64_t embedding_dim) : embedding_dim(embedding_dim) {}

void SinusoidalSpec::check() const {
  TORCH_CHECK_VALUE(embedding_dim > 0 && embedding_dim <= max_columns,
                    "embedding_dim: expected 1 to ", max_columns, ", got ", embedding_dim);
  TORCH_CHECK_VALUE(std::isfinite(base) && base >= 1.0,
                    "base: expected a finite number of at least 1, got ", base);
  TORCH_CHECK_VALUE(std::isfinite(scale), "scale: expected a finite number, got ", scale);
  TORCH_CHECK_VALUE(std::isfinite(shift.value_or(0.0)), "shift: expected a finite number, got ",
                    shift.value_or(0.0));
  TORCH_CHECK_VALUE(padding_idx.value_or(0) >= 0 && padding_idx.value_or(0) <= max_padding_idx,
                    "padding_idx: expected 0 to ", max_padding_idx, ", got ",
                    padding_idx.value_or(0));
  // A single frequency is 1 and needs no divisor.
  TORCH_CHECK_VALUE(embedding_dim <= 3 || divisor_of(*this) > 0,
                    "shift: expected less than half of embedding_dim, ", embedding_dim, ", got ",
                    shift.value_or(1.0));
}

std::string SinusoidalSpec::to_json() const {
  // nlohmann::json keeps keys sorted, so equal specifications have equal text.
  return nlohmann::json{{"embedding_dim", embedding_dim},
                        {"base", base},
                        {"preset", preset},
                        {"cos_first", or_null(cos_first)},
                        {"shift", or_null(shift)},
                        {"scale", scale},
                        {"padding_idx", or_null(padding_idx)}}
      .dump();
}

SinusoidalSpec SinusoidalSpec::from_json(const std::string& text) {
  try {
    const SinusoidalSpec spec = parse(text);
    spec.check();
    return spec;
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "SinusoidalSpec: expected JSON text of a specification, got '",
                      core::brief(text), "': ", dispatcher::reason(error));
  }
}

bool SinusoidalSpec::operator==(const SinusoidalSpec& other) const {
  return to_json() == other.to_json();
}

namespace sinusoidal {
namespace {

auto& specifications = *new dispatcher::TextCache<Specification>;

}  // namespace

Specification::Specification(std::string_view text)
    : spec(SinusoidalSpec::from_json(std::string(text))) {
  layout = layout_of(preset_of(spec.preset), spec.embedding_dim, spec.cos_first.value_or(false));
  first = first_of(spec);
  frequencies = sinusoidal::frequencies(spec.base, posembed::divisor_of(spec), pairs_of(layout));
  for (const core::DoubleDouble& frequency : frequencies) {
    wide_turns.push_back(core::turn_from_radians(frequency));
    turns.push_back(core::round_to_turn64(wide_turns.back()));
  }
}

Sinusoid Specification::sinusoid(int64_t order) const {
  Sinusoid result;
  result.layout = layout;
  result.pairs = static_cast<int64_t>(turns.size());
  result.turns = turns.data();
  result.wide_turns = wide_turns.data();
  result.scale = spec.scale;
  result.first = first;
  result.order = order;
  return result;
}

SpecificationPointer specification(std::string_view text) { return specifications.find(text); }

}  // namespace sinusoidal
}  // namespace posembed
