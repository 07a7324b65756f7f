// The reports explain() and diff() of specifications, the same for C++ and Python.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "posembed/rotary_specification.h"
#include "rotary/scaling.h"

namespace posembed {
namespace rotary {
namespace {

using nlohmann::json;

// The smallest difference of angles that counts: about the precision of a cosine in bfloat16.
constexpr double tolerance = 1e-3;
constexpr int64_t pairs_shown = 16;
constexpr double two_pi = core::constants::two_pi.high;

template <typename... Arguments>
std::string format(const char* pattern, Arguments... arguments) {
  char line[256];
  std::snprintf(line, sizeof(line), pattern, arguments...);
  return line;
}

std::vector<double> rounded(const Series& series) {
  std::vector<double> result;
  result.reserve(series.size());
  for (const core::DoubleDouble& number : series) result.push_back(core::to_double(number));
  return result;
}

std::vector<double> frequencies(const RotarySpec& spec) {
  return rounded(scaled(spec).frequencies);
}

std::vector<double> unscaled_frequencies(RotarySpec spec) {
  spec.scaling = std::monostate();
  return frequencies(spec);
}

/// A JSON value in a line of text; for a long list, only its length.
std::string brief(json value) {
  if (value.is_array() && value.size() > 8) return std::to_string(value.size()) + " numbers";
  if (value.is_object()) {
    for (json& member : value) {
      if (member.is_array() && member.size() > 8) member = brief(member);
    }
  }
  return value.dump();
}

// ---------------------------------------------------------------------------------------- explain

/// The context length that a scaling is made for; 0 if it names none.
int64_t trained_length(const json& scaling) {
  if (!scaling.is_object() || !scaling.contains("original_max_positions")) return 0;
  const json factor = scaling.value("factor", json());
  const double stretch = factor.is_number() ? factor.get<double>() : 1.0;
  const double length = scaling["original_max_positions"].get<double>() * stretch;
  return static_cast<int64_t>(std::min(length, 0x1p62));
}

/// A number with commas: "500,000"; or as few digits as it needs.
std::string with_commas(double number) {
  if (number != std::floor(number) || std::abs(number) >= 1e15) return format("%.6g", number);
  std::string text = format("%.0f", number);
  for (auto place = static_cast<int64_t>(text.size()) - 3; place > 0; place -= 3) {
    text.insert(static_cast<size_t>(place), ",");
  }
  return text;
}

/// The rotation in one sentence.
std::string sentence(const RotarySpec& spec, const std::vector<double>& frequencies) {
  const std::string head = "head of " + std::to_string(spec.head_dim);
  if (frequencies.empty()) return head + ": no component is rotated";
  std::string window;
  if (spec.rotary_dim != spec.head_dim) {
    window = ", of which components " + std::to_string(spec.rotary_start) + " to " +
             std::to_string(spec.rotary_start + spec.rotary_dim - 1) + " are rotated";
  }
  const std::string from = spec.rotary_start == 0 ? "" : ", counted from the first of them";
  const std::string pairs = spec.interleaved ? "components 2i and 2i + 1 turn together"
                                             : "component i turns together with i + " +
                                                   std::to_string(spec.rotary_dim / 2);
  const std::string base =
      spec.custom_frequencies.has_value() ? "" : "; base " + with_commas(spec.base);
  double slowest = INFINITY;
  for (const double frequency : frequencies) {
    if (frequency != 0.0) slowest = std::min(slowest, std::abs(frequency));
  }
  const std::string longest =
      std::isinf(slowest)
          ? "; no pair turns"
          : "; longest wavelength " + with_commas(std::round(two_pi / slowest)) + " positions";
  return head + window + ": " + pairs + from + base + longest;
}

/// The ratio of a pair's scaled wavelength to its plain one; infinity for pairs that do not turn.
double stretch(double plain, double frequency) {
  return frequency == 0.0 ? INFINITY : plain / frequency;
}

/// Lists runs of pairs that are kept and of pairs that are stretched, with each run's largest
/// stretch.
std::string stretched_line(const std::vector<double>& plain, const std::vector<double>& scaled) {
  std::string line;
  for (size_t begin = 0, end = 0; begin < plain.size(); begin = end) {
    const auto kept = [&](size_t pair) {
      return std::abs(stretch(plain[pair], scaled[pair]) - 1.0) < 1e-9;
    };
    double max_stretch = 0.0;
    for (end = begin; end < plain.size() && kept(end) == kept(begin); ++end) {
      max_stretch = std::max(max_stretch, stretch(plain[end], scaled[end]));
    }
    line += line.empty() ? "pairs " : "; pairs ";
    line += std::to_string(begin) + " to " + std::to_string(end - 1);
    if (kept(begin)) {
      line += " as they are";
    } else {
      line += std::isinf(max_stretch) ? " stand still"
                                      : format(" stretched by up to %.4gx", max_stretch);
    }
  }
  return line;
}

/// Describes xPos in one line.
std::string amplitudes_line(const XPosScaling& scaling, int64_t pairs) {
  const double last = static_cast<double>(pairs - 1) / static_cast<double>(pairs);
  return format(
      "a query is multiplied by zeta ** ((position - %g) / %g), a key by the inverse; zeta from "
      "%.3f (pair 0) to %.3f",
      static_cast<double>(scaling.center), static_cast<double>(scaling.scale_base), 0.4 / 1.4,
      (last + 0.4) / 1.4);
}

/// Which columns a table has besides: those that are the same for all pairs are left out.
struct Columns {
  bool axis;
  bool stretch;
};

std::string row(const Columns& columns, int64_t pair, int64_t axis, double frequency,
                double plain) {
  std::string line = format("%4lld  ", static_cast<long long>(pair));
  if (columns.axis) line += format("%4lld  ", static_cast<long long>(axis));
  if (frequency == 0.0) return line + "stands still";
  const double turn = two_pi / std::abs(frequency);
  line += format("%16.8g  %12.2f  ", frequency, turn);
  if (columns.stretch) line += format("%8.4gx  ", plain / frequency);
  return line + format("%.0f", std::ceil(turn / 2.0));
}

/// A table of all pairs, or of evenly spread ones that fit a screen.
std::string table(const RotarySpec& spec, const std::vector<double>& plain,
                  const std::vector<double>& scaled) {
  const auto pairs = static_cast<int64_t>(scaled.size());
  const int64_t shown = std::min(pairs, pairs_shown);
  const Columns columns = {spec.sections.has_value(), plain != scaled};
  std::string text = "pair  ";
  if (columns.axis) text += "axis  ";
  text += "radians/position    wavelength  ";
  if (columns.stretch) text += "stretched  ";
  text += "positions to half a turn";
  for (int64_t i = 0; i < shown; ++i) {
    const int64_t pair = shown < 2 ? i : (i * (pairs - 1) + (shown - 1) / 2) / (shown - 1);
    const auto index = static_cast<size_t>(pair);
    const int64_t axis = spec.sections.has_value() ? spec.sections->axis_of_pair[index] : 0;
    text.append("\n").append(row(columns, pair, axis, scaled[index], plain[index]));
  }
  return text;
}

// ------------------------------------------------------------------------------------------- diff

/// The first position at which an angle differs by more than the tolerance; 0: none does.
double first_difference(const std::vector<double>& ours, const std::vector<double>& theirs) {
  double widest = 0.0;
  for (size_t pair = 0; pair < ours.size(); ++pair) {
    widest = std::max(widest, std::abs(ours[pair] - theirs[pair]));
  }
  return widest == 0.0 ? 0.0 : std::ceil(tolerance / widest);
}

/// Whether the same components turn in the same direction, by positions on the same axes.
bool turn_alike(const json& ours, const json& theirs) {
  for (const char* field : {"head_dim", "rotary_dim", "rotary_start", "interleaved", "reverse"}) {
    if (ours.at(field) != theirs.at(field)) return false;
  }
  const json none = {{"axis_of_pair", json()}};
  const json& a = ours.at("sections").is_null() ? none : ours.at("sections");
  const json& b = theirs.at("sections").is_null() ? none : theirs.at("sections");
  return a.at("axis_of_pair") == b.at("axis_of_pair");
}

}  // namespace
}  // namespace rotary

std::string RotarySpec::explain(std::optional<int64_t> seq_len,
                                std::optional<int64_t> max_positions) const {
  check();
  const RotarySpec spec = seq_len.has_value() ? resolve(*seq_len) : *this;
  const std::vector<double> scaled = rotary::frequencies(spec);
  const std::vector<double> plain = rotary::unscaled_frequencies(*this);
  const auto pairs = static_cast<int64_t>(scaled.size());
  std::string text = rotary::sentence(spec, scaled) + "\nhead_dim=" + spec.describe() +
                     rotary::format("; attention factor %.6g", spec.attention_factor());
  if (score_scale.has_value()) text += "\nscore scale: " + score_scale->describe();
  if (pairs == 0) return text;
  if (spec != *this) {
    text += "\nresolved for sequences of " + std::to_string(*seq_len) + " positions";
  } else if (is_dynamic()) {
    text += "\nas within the original context: beyond, frequencies depend on the sequence's length";
  }
  if (const auto* xpos = std::get_if<XPosScaling>(&scaling)) {
    text.append("\n").append(rotary::amplitudes_line(*xpos, pairs));
  }
  const int64_t trained = rotary::trained_length(nlohmann::json::parse(to_json()).at("scaling"));
  const int64_t length = seq_len.value_or(max_positions.value_or(trained));
  if (length > 0) {
    text += "\nfloat32 angles would be off by up to " +
            rotary::format("%.2g rad in ", float32_error(length).radians) + std::to_string(length) +
            " positions";
  }
  if (plain != scaled) text.append("\n").append(rotary::stretched_line(plain, scaled));
  return text.append("\n").append(rotary::table(spec, plain, scaled));
}

std::string RotarySpec::diff(const RotarySpec& other) const {
  auto ours = nlohmann::json::parse(to_json());
  auto theirs = nlohmann::json::parse(other.to_json());
  if (ours == theirs) return "equal";
  for (auto* each : {&ours, &theirs}) each->emplace("score_scale", nullptr);
  std::string text;
  for (const auto& field : ours.items()) {
    const nlohmann::json& second = theirs.at(field.key());
    if (field.value() == second) continue;
    text += field.key() + ": " + rotary::brief(field.value()) + " against " +
            rotary::brief(second) + "\n";
  }
  if (attention_factor() != other.attention_factor()) {
    text += rotary::format("attention factor: %.6g against %.6g\n", attention_factor(),
                           other.attention_factor());
  }
  if (!rotary::turn_alike(ours, theirs)) {
    return text + "other components turn, or the other way: results differ from position 1 on";
  }
  const bool xpos = std::holds_alternative<XPosScaling>(scaling) ||
                    std::holds_alternative<XPosScaling>(other.scaling);
  if (xpos && ours.at("scaling") != theirs.at("scaling")) {
    text += "amplitudes differ: they grow or fade with position\n";
  }
  if (is_dynamic() || other.is_dynamic()) text += "within the original context ";
  const double position =
      rotary::first_difference(rotary::frequencies(*this), rotary::frequencies(other));
  if (position == 0.0) return text + "angles are equal";
  return text + rotary::format("angles differ by more than %g rad from position %.0f on",
                               rotary::tolerance, position);
}

}  // namespace posembed
