#include "rotary/specification.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <shared_mutex>

#include "rotary/frequencies.h"
#include "rotary/kernel.h"

namespace posembed {
namespace {

template <typename T>
void read(const nlohmann::json& object, const char* key, T& value) {
  if (object.contains(key)) object.at(key).get_to(value);
}

RotarySpec parse(const std::string& text) {
  const nlohmann::json object = nlohmann::json::parse(text);
  RotarySpec spec(object.at("head_dim").get<int64_t>());
  read(object, "base", spec.base);
  read(object, "rotary_dim", spec.rotary_dim);
  read(object, "rotary_start", spec.rotary_start);
  read(object, "interleaved", spec.interleaved);
  read(object, "reverse", spec.reverse);
  const nlohmann::json known = nlohmann::json::parse(spec.to_json());
  for (const auto& entry : object.items()) {
    TORCH_CHECK_VALUE(known.contains(entry.key()), "RotarySpec: unknown key '", entry.key(),
                      "' in ", text);
  }
  return spec;
}

}  // namespace

RotarySpec::RotarySpec(int64_t head_dim) : head_dim(head_dim), rotary_dim(head_dim) {}

void RotarySpec::check() const {
  TORCH_CHECK_VALUE(head_dim > 0, "head_dim: expected a positive number, got ", head_dim);
  TORCH_CHECK_VALUE(rotary_dim >= 0 && rotary_dim % 2 == 0,
                    "rotary_dim: expected an even number, got ", rotary_dim);
  TORCH_CHECK_VALUE(rotary_start >= 0, "rotary_start: expected 0 or more, got ", rotary_start);
  TORCH_CHECK_VALUE(rotary_start + rotary_dim <= head_dim,
                    "rotary_start + rotary_dim: expected at ", "most head_dim, ", head_dim,
                    ", got ", rotary_start, " + ", rotary_dim);
  TORCH_CHECK_VALUE(rotary_dim <= 2 * rotary::max_pairs, "rotary_dim: expected at most ",
                    2 * rotary::max_pairs, ", got ", rotary_dim);
  TORCH_CHECK_VALUE(std::isfinite(base) && base >= 1.0,
                    "base: expected a finite number of at least 1, got ", base);
}

std::string RotarySpec::to_json() const {
  // nlohmann::json keeps keys sorted, so equal specifications have equal text.
  return nlohmann::json{{"head_dim", head_dim},       {"base", base},
                        {"rotary_dim", rotary_dim},   {"rotary_start", rotary_start},
                        {"interleaved", interleaved}, {"reverse", reverse}}
      .dump();
}

RotarySpec RotarySpec::from_json(const std::string& text) {
  try {
    const RotarySpec spec = parse(text);
    spec.check();
    return spec;
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "RotarySpec: expected JSON text of a specification, got '", text,
                      "': ", error.what());
  }
}

bool RotarySpec::operator==(const RotarySpec& other) const { return to_json() == other.to_json(); }

namespace rotary {
namespace {

std::unique_ptr<const Specification> read(std::string_view text) {
  const RotarySpec spec = RotarySpec::from_json(std::string(text));
  std::vector<core::DoubleDouble> frequencies = geometric_frequencies(spec.base, spec.rotary_dim);
  std::vector<core::Turn128> turns;
  for (const core::DoubleDouble& frequency : frequencies) {
    turns.push_back(core::turn_from_radians(frequency));
  }
  return std::make_unique<Specification>(Specification{spec, frequencies, turns});
}

}  // namespace

const Specification& specification(std::string_view text) {
  static std::shared_mutex mutex;
  static auto& known =
      *new std::map<std::string, std::unique_ptr<const Specification>, std::less<>>;
  {
    std::shared_lock<std::shared_mutex> lock(mutex);
    const auto found = known.find(text);
    if (found != known.end()) return *found->second;
  }
  auto made = read(text);
  std::unique_lock<std::shared_mutex> lock(mutex);
  return *known.try_emplace(std::string(text), std::move(made)).first->second;
}

}  // namespace rotary
}  // namespace posembed
