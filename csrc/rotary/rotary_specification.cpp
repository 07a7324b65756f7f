// Specifications: their fields, checks, JSON and text, the operators that give them to Python, and
// those of several axes and of named models.
#include <ATen/ops/empty.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/brief.h"
#include "dispatcher/fields.h"
#include "dispatcher/fork.h"
#include "dispatcher/text_cache.h"
#include "rotary/rotary_operator.h"

namespace posembed {

using nlohmann::json;

const char* name(Numerics numerics) { return dispatcher::name_of(numerics); }

// ------------------------------------------------------------------------------------------ fields

/// What a number of a scaling must be.
struct Rule {
  const char* expected;
  bool (*holds)(double number);
};

constexpr Rule must_be_finite{"a finite number", [](double x) { return std::isfinite(x); }};
constexpr Rule must_be_positive{"a finite positive number",
                                [](double x) { return std::isfinite(x) && x > 0.0; }};
constexpr Rule must_be_one_or_more{"a finite number of at least 1",
                                   [](double x) { return std::isfinite(x) && x >= 1.0; }};
constexpr Rule must_not_be_zero{"a finite number other than 0",
                                [](double x) { return std::isfinite(x) && x != 0.0; }};
constexpr Rule must_be_part{"0 to 1", [](double x) { return x >= 0.0 && x <= 1.0; }};
constexpr Rule must_be_length{"more than 1", [](double x) { return x > 1.0; }};

/// The scalings in the order of RotaryScaling: the type in JSON, and the struct.
struct ScalingName {
  const char *type, *name;
};

constexpr ScalingName scaling_names[] = {{"", ""},
                                         {"linear", "LinearScaling"},
                                         {"ntk", "NtkScaling"},
                                         {"dynamic_ntk", "DynamicNtkScaling"},
                                         {"yarn", "YarnScaling"},
                                         {"llama3", "Llama3Scaling"},
                                         {"proportional", "ProportionalScaling"},
                                         {"longrope", "LongRopeScaling"},
                                         {"xpos", "XPosScaling"}};
static_assert(std::size(scaling_names) == std::variant_size_v<RotaryScaling>);

template <typename Visitor>
static void fields(Visitor& visit, LinearScaling& scaling) {
  visit("factor", scaling.factor, must_be_positive);
}

template <typename Visitor>
static void fields(Visitor& visit, NtkScaling& scaling) {
  visit("factor", scaling.factor, must_be_positive);
}

template <typename Visitor>
static void fields(Visitor& visit, DynamicNtkScaling& scaling) {
  visit("factor", scaling.factor, must_be_one_or_more);
  visit("original_max_positions", scaling.original_max_positions, must_be_length);
}

template <typename Visitor>
static void fields(Visitor& visit, YarnScaling& scaling) {
  visit("factor", scaling.factor, must_be_positive);
  visit("original_max_positions", scaling.original_max_positions, must_be_length);
  visit("beta_fast", scaling.beta_fast, must_be_finite);
  visit("beta_slow", scaling.beta_slow, must_be_positive);
  visit("mscale", scaling.mscale);
  visit("mscale_all_dim", scaling.mscale_all_dim);
  visit("truncate", scaling.truncate);
  visit("attention_factor", scaling.attention_factor, must_be_positive);
}

template <typename Visitor>
static void fields(Visitor& visit, Llama3Scaling& scaling) {
  visit("factor", scaling.factor, must_be_positive);
  visit("low_freq_factor", scaling.low_freq_factor, must_be_positive);
  visit("high_freq_factor", scaling.high_freq_factor, must_be_finite);
  visit("original_max_positions", scaling.original_max_positions, must_be_length);
}

template <typename Visitor>
static void fields(Visitor& visit, ProportionalScaling& scaling) {
  visit("proportion", scaling.proportion, must_be_part);
  visit("factor", scaling.factor, must_be_positive);
}

template <typename Visitor>
static void fields(Visitor& visit, LongRopeScaling& scaling) {
  visit("short_factor", scaling.short_factor, must_be_positive);
  visit("long_factor", scaling.long_factor, must_be_positive);
  visit("original_max_positions", scaling.original_max_positions, must_be_length);
  visit("factor", scaling.factor, must_be_positive);
  visit("attention_factor", scaling.attention_factor, must_be_positive);
  visit("long_attention_factor", scaling.long_attention_factor, must_be_positive);
}

template <typename Visitor>
static void fields(Visitor& visit, XPosScaling& scaling) {
  visit("scale_base", scaling.scale_base, must_not_be_zero);
  visit("center", scaling.center, must_be_finite);
}

template <typename Visitor>
static void fields(Visitor& visit, Sections& sections) {
  visit("axis_of_pair", sections.axis_of_pair);
  visit("restart", sections.restart);
  visit("axes", sections.axes);
  visit("within_axes", sections.within_axes);
}

template <typename Visitor>
static void fields(Visitor& visit, ScoreScale& scale) {
  visit("factor", scale.factor);
  visit("growth", scale.growth);
  visit("length", scale.length);
  visit("offset", scale.offset);
  visit("logn", scale.logn);
  visit("source", scale.source);
}

template <typename Visitor>
static void fields(Visitor& visit, RotarySpec& spec) {
  visit("head_dim", spec.head_dim);
  visit("base", spec.base);
  visit("rotary_dim", spec.rotary_dim);
  visit("rotary_start", spec.rotary_start);
  visit("interleaved", spec.interleaved);
  visit("reverse", spec.reverse);
  visit("scaling", spec.scaling);
  visit("sections", spec.sections);
  visit("custom_frequencies", spec.custom_frequencies);
  visit("custom_attention_factor", spec.custom_attention_factor);
  visit("numerics", spec.numerics);
  visit("score_scale", spec.score_scale);
}

// -------------------------------------------------------------------------------------------- json

static json json_of(const ScoreScale& scale) { return dispatcher::written(scale); }

static json json_of(const Sections& sections) {
  json object = dispatcher::written(sections);
  if (sections.position_axes() == sections.used_axes()) object.erase("axes");
  if (!sections.within_axes) object.erase("within_axes");
  return object;
}

static json json_of(const RotaryScaling& scaling) {
  const auto write = [&](const auto& kind) -> json {
    if constexpr (std::is_same_v<std::decay_t<decltype(kind)>, std::monostate>) {
      return {};
    } else {
      json object = dispatcher::written(kind);
      object["type"] = scaling_names[scaling.index()].type;
      return object;
    }
  };
  return std::visit(write, scaling);
}

static void read_json(const json& from, ScoreScale& scale) {
  dispatcher::read_fields("score_scale", from, scale);
}

static void read_json(const json& from, Sections& sections) {
  dispatcher::read_fields("sections", from, sections);
}

/// Reads a scaling of the kind with this index; returns whether it is of that type.
template <size_t index>
static bool read_as(const std::string& type, const json& from, RotaryScaling& result) {
  constexpr const char* own = scaling_names[index].type;
  if (type != own) return false;
  dispatcher::FieldReader reader(own, from);
  std::string same;
  reader("type", same);
  fields(reader, result.emplace<index>());
  reader.done();
  return true;
}

template <size_t... before>
static bool read_any(const std::string& type, const json& from, RotaryScaling& result,
                     std::index_sequence<before...>) {
  return (read_as<before + 1>(type, from, result) || ...);
}

static void read_json(const json& from, RotaryScaling& result) {
  if (from.is_null()) return;
  TORCH_CHECK_VALUE(from.is_object() && from.contains("type"),
                    "scaling: expected an object with a type, got ", core::brief(from.dump()));
  const auto type = from["type"].get<std::string>();
  constexpr size_t count = std::size(scaling_names) - 1;
  if (read_any(type, from, result, std::make_index_sequence<count>())) return;
  std::string known;
  for (size_t i = 1; i <= count; ++i) known += std::string(scaling_names[i].type) + "', '";
  TORCH_CHECK_VALUE(false, "scaling.type: expected '", known.substr(0, known.size() - 3), ", got '",
                    core::brief(type), "'");
}

// nlohmann::json keeps keys sorted, so equal specifications have equal text.
std::string RotarySpec::to_json() const {
  json object = dispatcher::written(*this);
  // The text of former versions, unless they are set.
  for (const char* newer : {"custom_attention_factor", "score_scale"}) {
    if (object[newer].is_null()) object.erase(newer);
  }
  return object.dump();
}

std::string ScoreScale::to_json() const { return json_of(*this).dump(); }

RotarySpec RotarySpec::from_json(const std::string& text) {
  const RotarySpec spec = rotary::parse(text);
  spec.check();
  return spec;
}

namespace rotary {

RotarySpec parse(const std::string& text) {
  return dispatcher::read_text("RotarySpec", text, [](json object) {
    if (object.contains("head_dim")) object.emplace("rotary_dim", object["head_dim"]);
    RotarySpec spec(0);
    dispatcher::read_fields("RotarySpec", std::move(object), spec);
    return spec;
  });
}

std::string complete_text(const RotarySpec& spec) { return dispatcher::written(spec).dump(); }

namespace {

// ---------------------------------------------------------------------------------------- printing

template <typename T>
void print(std::ostream& stream, const T& field) {
  stream << field;
}

void print(std::ostream& stream, bool field) { stream << (field ? "True" : "False"); }

template <typename T>
void print(std::ostream& stream, const std::vector<T>& field) {
  stream << '[' << field.size() << " numbers]";
}

void print(std::ostream& stream, Numerics field) {
  stream << '\'' << posembed::name(field) << '\'';
}

/// The number of pairs of each axis; empty where an axis is out of range.
std::vector<int64_t> sizes_of(const Sections& sections) {
  const int64_t axes = sections.position_axes();
  const auto pairs = static_cast<int64_t>(sections.axis_of_pair.size());
  if (axes < sections.used_axes() || axes > max_axes || pairs > max_pairs) return {};
  std::vector<int64_t> sizes(axes);
  for (const int64_t axis : sections.axis_of_pair) {
    if (axis < 0) return {};
    ++sizes[axis];
  }
  return sizes;
}

/// By sizes where these give the axes of all pairs: "Sections([16, 24, 24], interleaved=True)".
void print(std::ostream& stream, const Sections& field) {
  const std::vector<int64_t> sizes = sizes_of(field);
  const auto is = [&](bool interleaved) {
    return field.axis_of_pair == Sections::of(sizes, interleaved).axis_of_pair;
  };
  stream << "Sections(";
  if (is(false) || is(true)) {
    stream << json(sizes) << (is(false) ? "" : ", interleaved=True");
  } else {
    stream << "axis_of_pair=[" << field.axis_of_pair.size() << " numbers]";
  }
  stream << (field.restart ? ", restart=True" : "")
         << (field.within_axes ? ", within_axes=True" : "") << ')';
}

void print(std::ostream& stream, const ScoreScale& field) { stream << field.describe(); }

void print(std::ostream& stream, const RotaryScaling& field);

template <typename T>
void print(std::ostream& stream, const std::optional<T>& field) {
  if (field.has_value()) print(stream, *field);
}

/// Prints the fields that differ from their defaults.
struct Printer {
  std::ostream& stream;
  const json defaults;
  const char* separator = "";

  template <typename T, typename... Rules>
  void operator()(const char* key, const T& field, const Rules&...) {
    using dispatcher::json_of;
    if (defaults.value(key, json()) == json_of(field)) return;
    stream << separator << key << '=';
    print(stream, field);
    separator = ", ";
  }
};

void print(std::ostream& stream, const RotaryScaling& field) {
  const auto print_kind = [&](auto scaling) {
    if constexpr (!std::is_same_v<decltype(scaling), std::monostate>) {
      stream << scaling_names[field.index()].type << '(';
      Printer printer{stream, dispatcher::written(decltype(scaling)())};
      fields(printer, scaling);
      stream << ')';
    }
  };
  std::visit(print_kind, field);
}

}  // namespace
}  // namespace rotary

std::string RotarySpec::describe() const {
  std::ostringstream stream;
  stream << head_dim << ", base=" << base;
  RotarySpec spec = *this, defaults(head_dim);
  defaults.base = base;
  rotary::Printer printer{stream, dispatcher::written(defaults), ", "};
  fields(printer, spec);
  return stream.str();
}

namespace {

// ------------------------------------------------------------------------------------------ checks

/// Checks each number of a scaling by its rule.
struct Checker {
  const char* scaling;

  template <typename T>
  void operator()(const char*, const T&) const {}

  template <typename T>
  void operator()(const char* key, const T& number, const Rule& rule) const {
    TORCH_CHECK_VALUE(rule.holds(static_cast<double>(number)), scaling, ".", key, ": expected ",
                      rule.expected, ", got ", number);
  }

  template <typename T>
  void operator()(const char* key, const std::optional<T>& number, const Rule& rule) const {
    if (number.has_value()) (*this)(key, *number, rule);
  }

  template <typename T>
  void operator()(const char* key, const std::vector<T>& numbers, const Rule& rule) const {
    for (const T& number : numbers) (*this)(key, number, rule);
  }
};

/// A factor that large beside a length that short is a length: the arguments are swapped. Short
/// sequences have short lengths: 16 codebooks, beside a factor of 32 (CSM).
void check_not_swapped(const char* name, int64_t length, double factor) {
  TORCH_CHECK_VALUE(length >= 256 || factor < 256, name,
                    ".factor: expected at most original_max_positions, ", length, ", got ", factor,
                    "; the factor comes first");
}

void check_dim(const char* name, const RotarySpec& spec) {
  TORCH_CHECK_VALUE(spec.rotary_dim > 2, name, ": expected rotary_dim over 2, got ",
                    spec.rotary_dim);
}

// What the numbers of a scaling must be together.

template <typename Scaling>
void check_together(const char*, const RotarySpec&, const Scaling&) {}

void check_together(const char* name, const RotarySpec& spec, const NtkScaling&) {
  check_dim(name, spec);
}

void check_together(const char* name, const RotarySpec& spec, const DynamicNtkScaling& scaling) {
  check_not_swapped(name, scaling.original_max_positions, scaling.factor);
  check_dim(name, spec);
}

void check_together(const char* name, const RotarySpec& spec, const YarnScaling& scaling) {
  check_not_swapped(name, scaling.original_max_positions, scaling.factor);
  TORCH_CHECK_VALUE(scaling.beta_fast >= scaling.beta_slow, name,
                    ".beta_fast: expected at least beta_slow, ", scaling.beta_slow, ", got ",
                    scaling.beta_fast);
  TORCH_CHECK_VALUE(spec.base > 1.0, "base: expected more than 1 for YarnScaling, got ", spec.base);
}

void check_together(const char* name, const RotarySpec&, const Llama3Scaling& scaling) {
  check_not_swapped(name, scaling.original_max_positions, scaling.factor);
  TORCH_CHECK_VALUE(scaling.high_freq_factor >= scaling.low_freq_factor, name,
                    ".high_freq_factor: expected at least low_freq_factor, ",
                    scaling.low_freq_factor, ", got ", scaling.high_freq_factor);
}

void check_together(const char* name, const RotarySpec& spec, const LongRopeScaling& scaling) {
  const auto check_count = [&](const char* field, const std::vector<double>& factors) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(factors.size()) == spec.rotary_dim / 2, name, ".", field,
                      ": expected rotary_dim / 2 = ", spec.rotary_dim / 2, " numbers, got ",
                      factors.size());
  };
  check_count("short_factor", scaling.short_factor);
  check_count("long_factor", scaling.long_factor);
  check_not_swapped(name, scaling.original_max_positions, scaling.factor.value_or(1.0));
}

}  // namespace

void rotary::check_scaling(const RotarySpec& spec) {
  const auto check = [&](auto scaling) {
    if constexpr (!std::is_same_v<decltype(scaling), std::monostate>) {
      const Checker checker{scaling_names[spec.scaling.index()].name};
      fields(checker, scaling);
      check_together(checker.scaling, spec, scaling);
    }
  };
  std::visit(check, spec.scaling);
}

RotarySpec::RotarySpec(int64_t head_dim) : head_dim(head_dim), rotary_dim(head_dim) {}

bool RotarySpec::operator==(const RotarySpec& other) const {
  RotarySpec ours = *this, theirs = other;
  ours.score_scale.reset();
  theirs.score_scale.reset();
  return ours.to_json() == theirs.to_json();
}

RotarySpec RotarySpec::for_keys() const {
  RotarySpec result = *this;
  if (auto* xpos = std::get_if<XPosScaling>(&result.scaling)) xpos->scale_base = -xpos->scale_base;
  return result;
}

int64_t Sections::used_axes() const {
  if (axis_of_pair.empty()) return 1;
  return 1 + *std::max_element(axis_of_pair.begin(), axis_of_pair.end());
}

Sections Sections::of(const std::vector<int64_t>& sizes, bool interleaved, bool restart) {
  const auto axes = static_cast<int64_t>(sizes.size());
  Sections result{{}, restart};
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t size = sizes[static_cast<size_t>(axis)];
    const auto left = rotary::max_pairs - static_cast<int64_t>(result.axis_of_pair.size());
    TORCH_CHECK_VALUE(size >= 0, "sections: expected sizes of 0 or more, got ", size);
    TORCH_CHECK_VALUE(size <= left, "sections: expected at most ", rotary::max_pairs,
                      " pairs in all, got a size of ", size, " for axis ", axis);
    result.axis_of_pair.insert(result.axis_of_pair.end(), static_cast<size_t>(size), axis);
  }
  const auto pairs = static_cast<int64_t>(result.axis_of_pair.size());
  for (int64_t pair = 0; interleaved && pair < pairs; ++pair) {
    const int64_t axis = pair % axes;
    const bool taken = pair / axes < sizes[static_cast<size_t>(axis)];
    result.axis_of_pair[static_cast<size_t>(pair)] = taken ? axis : 0;
  }
  if (axes > result.used_axes()) result.axes = axes;
  return result;
}

namespace rotary {
// ------------------------------------------------------------------------- specification operators

namespace {

Tensor on(std::optional<at::Device> device, const Tensor& numbers) {
  return numbers.to(device.value_or(at::kCPU));
}

Tensor frequencies_of(Text text, std::optional<at::Device> device) {
  const SpecificationPointer spec = specification(text);
  Tensor result = at::empty({static_cast<int64_t>(spec->frequencies.size())}, at::kDouble);
  double* value = result.mutable_data_ptr<double>();
  for (const core::DoubleDouble& frequency : spec->frequencies) *value++ = frequency.high;
  return on(device, result);
}

std::string axial(const c10::List<std::string>& axes, bool within_axes) {
  std::vector<RotarySpec> specs;
  for (const std::string& text : axes) specs.push_back(specification(text)->spec);
  return RotarySpec::axial(specs, within_axes).to_json();
}

std::string preset_text(Text name, std::optional<int64_t> head_dim, at::OptionalIntArrayRef axes,
                        std::optional<double> base, std::optional<at::ArrayRef<double>> ntk) {
  PresetNumbers stated{head_dim, std::nullopt, base, std::nullopt};
  if (axes.has_value()) stated.axes = axes->vec();
  if (ntk.has_value()) stated.ntk = ntk->vec();
  return preset(std::string(name), stated).to_json();
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("rotary_frequencies", frequencies_of);
  m.impl("rotary_axial", axial);
  m.impl("rotary_preset", preset_text);
  m.impl("rotary_wavelengths", [](Text text, std::optional<at::Device> device) {
    return on(device, specification(text)->spec.wavelengths());
  });
  m.impl("rotary_attention_factor",
         [](Text text) { return specification(text)->attention_factor; });
  m.impl("rotary_specification", [](Text text) { return specification(text)->spec.to_json(); });
  m.impl("rotary_resolve", [](Text text, int64_t seq_len) {
    return specification(text)->spec.resolve(seq_len).to_json();
  });
  m.impl("rotary_for_keys", [](Text text) { return specification(text)->for_keys; });
  m.impl("rotary_description", [](Text text) { return specification(text)->spec.describe(); });
  m.impl("rotary_explanation",
         [](Text text, std::optional<int64_t> seq_len, std::optional<int64_t> max_positions) {
           return specification(text)->spec.explain(seq_len, max_positions);
         });
  m.impl("rotary_float32_error", [](Text text, int64_t length) {
    const AngleError error = specification(text)->spec.float32_error(length);
    return std::tuple(error.radians, error.position);
  });
  m.impl("rotary_difference", [](Text text, Text other) {
    return specification(text)->spec.diff(specification(other)->spec);
  });
  m.impl("rotary_sections", [](at::IntArrayRef sizes, bool interleaved) {
    return Sections::of(sizes.vec(), interleaved).axis_of_pair;
  });
}

}  // namespace rotary

namespace {

// ------------------------------------------------------------------------------------------- axial
// A specification for positions with several axes, from one for each axis.

/// The scaling that a window of restarting series may have as a whole.
bool is_shared(const RotaryScaling& scaling) {
  return std::holds_alternative<std::monostate>(scaling) ||
         std::holds_alternative<LinearScaling>(scaling);
}

/// `axis` with the head and the base of `first`, and without what axes may differ in.
std::string common_text(RotarySpec axis) {
  axis.head_dim = axis.rotary_dim = 0;
  axis.base = 1.0;
  axis.scaling = {};
  axis.custom_frequencies = std::nullopt;
  axis.custom_attention_factor = std::nullopt;
  return axis.to_json();
}

void check_axis(const RotarySpec& axis, const RotarySpec& first) {
  axis.check();
  TORCH_CHECK_VALUE(axis.rotary_dim == axis.head_dim && !axis.sections.has_value(),
                    "axes: expected specifications that rotate a whole head by one axis, got ",
                    axis.describe());
  TORCH_CHECK_VALUE(
      !axis.is_dynamic() && !std::holds_alternative<XPosScaling>(axis.scaling),
      "axes: expected frequencies that do not depend on the length, and no xPos, got ",
      axis.describe());
  TORCH_CHECK_VALUE(common_text(axis) == common_text(first),
                    "axes: expected the same interleaved, reverse and numerics, got ",
                    first.describe(), " and ", axis.describe());
  TORCH_CHECK_VALUE(axis.attention_factor() == first.attention_factor(),
                    "axes: expected the same attention factor, got ", first.attention_factor(),
                    " and ", axis.attention_factor());
}

/// Whether one base and one scaling describe all axes.
bool is_uniform(const std::vector<RotarySpec>& axes) {
  for (const RotarySpec& axis : axes) {
    RotarySpec same = axis;
    same.head_dim = same.rotary_dim = axes[0].head_dim;
    if (same != axes[0] || axis.custom_frequencies.has_value()) return false;
  }
  return is_shared(axes[0].scaling);
}

}  // namespace

RotarySpec RotarySpec::axial(const std::vector<RotarySpec>& axes, bool within_axes) {
  TORCH_CHECK_VALUE(!axes.empty(), "axes: expected at least one specification, got none");
  std::vector<int64_t> sizes;
  std::vector<double> frequencies;
  RotarySpec result(0);
  for (const RotarySpec& axis : axes) {
    check_axis(axis, axes[0]);
    result.head_dim += axis.head_dim;
    sizes.push_back(axis.rotary_dim / 2);
    for (const core::DoubleDouble& each : rotary::scaled(axis).frequencies) {
      frequencies.push_back(each.high);
    }
  }
  if (axes.size() == 1) return axes[0];
  result.rotary_dim = result.head_dim;
  result.interleaved = axes[0].interleaved;
  result.reverse = axes[0].reverse;
  result.numerics = axes[0].numerics;
  const bool uniform = is_uniform(axes);
  result.sections = Sections::of(sizes, false, uniform);
  result.sections->within_axes = within_axes && !result.interleaved;
  if (uniform) {
    result.base = axes[0].base;
    result.scaling = axes[0].scaling;
  } else {
    result.custom_frequencies = std::move(frequencies);
    const double factor = axes[0].attention_factor();
    if (factor != 1.0) result.custom_attention_factor = factor;
  }
  result.check();
  return result;
}

// ----------------------------------------------------------------------------------------- presets

namespace rotary {
namespace {

constexpr const char* table_text =
#include "rotary/rotary_presets.inc"
    ;

const json& presets_table() {
  static dispatcher::FirstUse<json> parsed;
  return parsed.get([] { return json::parse(table_text); });
}

/// The names of an object's keys, in quotes.
std::string names_of(const json& object) {
  std::string names;
  for (const auto& each : object.items()) names += (names.empty() ? "'" : ", '") + each.key() + "'";
  return "[" + names + "]";
}

/// The entry of a name; throws for others.
const json& entry(const std::string& name) {
  const json &refused = presets_table()["refused"], &known = presets_table()["presets"];
  TORCH_CHECK_VALUE(!refused.contains(name), name,
                    ": has no specification: ", refused.value(name, std::string()));
  TORCH_CHECK_VALUE(known.contains(name), "name: expected one of ", names_of(known), ", got '",
                    core::brief(name), "'");
  return known[name];
}

/// The parts of a head: a number of components for every `of`; null is what remains.
std::vector<int64_t> parts_of(const json& rule, int64_t head_dim) {
  const int64_t share = head_dim / rule["of"].get<int64_t>();
  std::vector<int64_t> sizes;
  for (const json& part : rule["parts"]) {
    sizes.push_back(part.is_null() ? 0 : share * part.get<int64_t>());
  }
  const int64_t rest = head_dim - std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  for (int64_t& size : sizes) size = size == 0 ? rest : size;
  return sizes;
}

/// The components of each axis.
std::vector<int64_t> axes_of(const json& preset, const PresetNumbers& stated) {
  if (stated.axes.has_value()) return *stated.axes;
  const json& axes = preset["axes"];
  if (axes.is_array()) return axes;
  return parts_of(
      axes, stated.head_dim.has_value() ? *stated.head_dim : preset["head_dim"].get<int64_t>());
}

void check_head_dim(const std::vector<int64_t>& axes, const PresetNumbers& stated) {
  const int64_t total = std::accumulate(axes.begin(), axes.end(), int64_t{0});
  TORCH_CHECK_VALUE(!stated.head_dim.has_value() || *stated.head_dim == total,
                    "head_dim: expected ", total, ", the sum of the axes ", c10::IntArrayRef(axes),
                    ", got ", stated.head_dim.value_or(0));
}

RotaryScaling scaling_of_axis(const json& preset, const std::optional<std::vector<double>>& ntk,
                              size_t axis) {
  if (preset.contains("scale")) return LinearScaling{1 / preset["scale"].get<double>()};
  if (!ntk.has_value() || (*ntk)[axis] == 1.0) return {};
  return NtkScaling{(*ntk)[axis]};
}

}  // namespace

RotarySpec preset(const std::string& name, const PresetNumbers& stated) {
  TORCH_CHECK_VALUE(stated.head_dim.value_or(1) > 0, "head_dim: expected a positive number, got ",
                    stated.head_dim.value_or(1));
  const json& found = entry(name);
  const std::vector<int64_t> axes = axes_of(found, stated);
  check_head_dim(axes, stated);
  std::optional<std::vector<double>> ntk = stated.ntk;
  if (!ntk.has_value() && found.contains("ntk")) ntk = found["ntk"].get<std::vector<double>>();
  TORCH_CHECK_VALUE(!ntk.has_value() || ntk->size() == axes.size(), "rope_scale: expected ",
                    axes.size(), " numbers, got ", ntk.has_value() ? ntk->size() : 0);
  const std::string pairing = found["pairing"].get<std::string>();
  std::vector<RotarySpec> parts;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    RotarySpec& part = parts.emplace_back(axes[axis]);
    part.base = stated.base.has_value() ? *stated.base : found["base"].get<double>();
    part.scaling = scaling_of_axis(found, ntk, axis);
    part.interleaved = pairing == "interleaved";
  }
  return RotarySpec::axial(parts, pairing != "half_split");
}

}  // namespace rotary

RotarySpec RotarySpec::from_preset(const std::string& name, std::optional<int64_t> head_dim) {
  rotary::PresetNumbers stated;
  stated.head_dim = head_dim;
  return rotary::preset(name, stated);
}

}  // namespace posembed
