// Lists the fields of a specification and of every scaling once; writing, reading and printing
// iterate over the lists.
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "core/brief.h"
#include "dispatcher/json.h"
#include "rotary/rotary_checks.h"
#include "rotary/rotary_operator.h"

namespace posembed {

const char* name(Numerics numerics) {
  switch (numerics) {
    case Numerics::float32:
      return "float32";
    case Numerics::float32_product:
      return "float32_product";
    case Numerics::float32_rounded_table:
      return "float32_rounded_table";
    case Numerics::float32_polar:
      return "float32_polar";
    default:
      return "exact";
  }
}

namespace rotary {
namespace {

using nlohmann::json;

// --------------------------------------------------------------------------------- names of fields

const char* name(const LinearScaling&) { return "linear"; }
const char* name(const NtkScaling&) { return "ntk"; }
const char* name(const DynamicNtkScaling&) { return "dynamic_ntk"; }
const char* name(const YarnScaling&) { return "yarn"; }
const char* name(const Llama3Scaling&) { return "llama3"; }
const char* name(const ProportionalScaling&) { return "proportional"; }
const char* name(const LongRopeScaling&) { return "longrope"; }
const char* name(const XPosScaling&) { return "xpos"; }

template <typename Visitor>
void fields(Visitor& visit, LinearScaling& scaling) {
  visit("factor", scaling.factor);
}

template <typename Visitor>
void fields(Visitor& visit, NtkScaling& scaling) {
  visit("factor", scaling.factor);
}

template <typename Visitor>
void fields(Visitor& visit, DynamicNtkScaling& scaling) {
  visit("factor", scaling.factor);
  visit("original_max_positions", scaling.original_max_positions);
}

template <typename Visitor>
void fields(Visitor& visit, YarnScaling& scaling) {
  visit("factor", scaling.factor);
  visit("original_max_positions", scaling.original_max_positions);
  visit("beta_fast", scaling.beta_fast);
  visit("beta_slow", scaling.beta_slow);
  visit("mscale", scaling.mscale);
  visit("mscale_all_dim", scaling.mscale_all_dim);
  visit("truncate", scaling.truncate);
  visit("attention_factor", scaling.attention_factor);
}

template <typename Visitor>
void fields(Visitor& visit, Llama3Scaling& scaling) {
  visit("factor", scaling.factor);
  visit("low_freq_factor", scaling.low_freq_factor);
  visit("high_freq_factor", scaling.high_freq_factor);
  visit("original_max_positions", scaling.original_max_positions);
}

template <typename Visitor>
void fields(Visitor& visit, ProportionalScaling& scaling) {
  visit("proportion", scaling.proportion);
  visit("factor", scaling.factor);
}

template <typename Visitor>
void fields(Visitor& visit, LongRopeScaling& scaling) {
  visit("short_factor", scaling.short_factor);
  visit("long_factor", scaling.long_factor);
  visit("original_max_positions", scaling.original_max_positions);
  visit("factor", scaling.factor);
  visit("attention_factor", scaling.attention_factor);
  visit("long_attention_factor", scaling.long_attention_factor);
}

template <typename Visitor>
void fields(Visitor& visit, XPosScaling& scaling) {
  visit("scale_base", scaling.scale_base);
  visit("center", scaling.center);
}

template <typename Visitor>
void fields(Visitor& visit, ScoreScale& scale) {
  visit("factor", scale.factor);
  visit("growth", scale.growth);
  visit("length", scale.length);
  visit("offset", scale.offset);
  visit("logn", scale.logn);
  visit("source", scale.source);
}

template <typename Visitor>
void fields(Visitor& visit, RotarySpec& spec) {
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

// ----------------------------------------------------------------------------------------- writing

template <typename T>
json value(const T& field) {
  return field;
}

template <typename T>
json value(const std::optional<T>& field) {
  return field.has_value() ? json(*field) : json();
}

json value(Numerics field) { return posembed::name(field); }

json value(const std::optional<Sections>& sections) {
  if (!sections.has_value()) return {};
  json object = {{"axis_of_pair", sections->axis_of_pair}, {"restart", sections->restart}};
  if (sections->position_axes() != sections->used_axes()) object["axes"] = *sections->axes;
  if (sections->within_axes) object["within_axes"] = true;
  return object;
}

json value(const RotaryScaling& scaling);
json value(const std::optional<ScoreScale>& scale);

/// Keys that a text has only if they are set, so that most texts are as before the key was added.
bool newer(std::string_view key) { return key == "custom_attention_factor"; }

struct Writer {
  json object = json::object();

  template <typename T>
  void operator()(const char* key, const T& field) {
    object[key] = value(field);
    if (object[key].is_null() && newer(key)) object.erase(key);
  }
};

/// Takes a copy, because fields() visits mutable fields.
template <typename Fields>
json write(Fields object) {
  Writer writer;
  fields(writer, object);
  return writer.object;
}

struct ScalingWriter {
  json operator()(std::monostate) const { return {}; }

  template <typename Scaling>
  json operator()(const Scaling& scaling) const {
    json object = write(scaling);
    object["type"] = name(scaling);
    return object;
  }
};

json value(const RotaryScaling& scaling) { return std::visit(ScalingWriter(), scaling); }

json value(const std::optional<ScoreScale>& scale) {
  return scale.has_value() ? write(*scale) : json();
}

// ----------------------------------------------------------------------------------------- reading

/// Removes keys as they are read; done() throws if any are left.
class Reader {
 public:
  Reader(const char* what, json object) : what_(what), object_(std::move(object)) {
    TORCH_CHECK_VALUE(object_.is_object(), what, ": expected a JSON object, got ",
                      core::brief(object_.dump()));
  }

  template <typename T>
  void operator()(const char* key, T& field) {
    known_ += known_.empty() ? key : std::string(", ") + key;
    if (!object_.contains(key)) return;
    try {
      read(object_.at(key), field);
    } catch (const json::exception&) {
      TORCH_CHECK_VALUE(false, what_, ": ", key, ": expected ", kind(field), ", got ",
                        core::brief(object_.at(key).dump()));
    }
    object_.erase(key);
  }

  void done() const {
    for (const auto& left : object_.items()) {
      TORCH_CHECK_VALUE(false, what_, ": unknown key '", core::brief(left.key()),
                        "'; known are: ", known_);
    }
  }

 private:
  template <typename T>
  static void read(const json& from, T& result) {
    from.get_to(result);
  }

  static void read(const json& from, int64_t& result) {
    // get_to() alone would truncate fractions.
    if (!from.is_number_integer()) throw json::type_error::create(302, "no whole number", &from);
    from.get_to(result);
  }

  static void read(const json& from, std::vector<int64_t>& result) {
    for (const json& each : from.get_ref<const json::array_t&>()) read(each, result.emplace_back());
  }

  static void read(const json& from, Numerics& result);
  static void read(const json& from, RotaryScaling& result);
  static void read(const json& from, Sections& result);
  static void read(const json& from, ScoreScale& result);

  template <typename T>
  static void read(const json& from, std::optional<T>& result) {
    if (from.is_null()) {
      result = std::nullopt;
    } else {
      read(from, result.emplace());
    }
  }

  static const char* kind(int64_t) { return "a whole number"; }
  static const char* kind(double) { return "a number"; }
  static const char* kind(bool) { return "true or false"; }
  static const char* kind(const std::string&) { return "a text"; }
  static const char* kind(Numerics) { return "a text"; }
  static const char* kind(const RotaryScaling&) { return "an object with a type"; }
  static const char* kind(const Sections&) { return "an object"; }
  static const char* kind(const ScoreScale&) { return "an object"; }
  template <typename T>
  static const char* kind(const std::optional<T>&) {
    return kind(T());
  }
  template <typename T>
  static const char* kind(const std::vector<T>&) {
    return std::is_same_v<T, int64_t> ? "whole numbers" : "numbers";
  }

  const char* what_;
  json object_;
  std::string known_;
};

template <typename Scaling>
bool read_as(const std::string& type, const json& object, RotaryScaling& result) {
  Scaling scaling;
  if (type != name(scaling)) return false;
  Reader reader(name(scaling), object);
  std::string same;
  reader("type", same);
  fields(reader, scaling);
  reader.done();
  result = scaling;
  return true;
}

void Reader::read(const json& from, Numerics& result) {
  result = dispatcher::enum_from<Numerics>(from.get<std::string>());
}

void Reader::read(const json& from, RotaryScaling& result) {
  if (from.is_null()) return;
  const auto type = from.at("type").get<std::string>();
  const bool known =
      read_as<LinearScaling>(type, from, result) || read_as<NtkScaling>(type, from, result) ||
      read_as<DynamicNtkScaling>(type, from, result) || read_as<YarnScaling>(type, from, result) ||
      read_as<Llama3Scaling>(type, from, result) ||
      read_as<ProportionalScaling>(type, from, result) ||
      read_as<LongRopeScaling>(type, from, result) || read_as<XPosScaling>(type, from, result);
  TORCH_CHECK_VALUE(known, "scaling.type: expected 'linear', 'ntk', 'dynamic_ntk', 'yarn', ",
                    "'llama3', 'proportional', 'longrope' or 'xpos', got '", core::brief(type),
                    "'");
}

void Reader::read(const json& from, Sections& result) {
  Reader reader("sections", from);
  reader("axis_of_pair", result.axis_of_pair);
  reader("restart", result.restart);
  reader("axes", result.axes);
  reader("within_axes", result.within_axes);
  reader.done();
}

void Reader::read(const json& from, ScoreScale& result) {
  Reader reader("score_scale", from);
  fields(reader, result);
  reader.done();
}

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

template <typename T>
void print(std::ostream& stream, const std::optional<T>& field) {
  if (field.has_value()) print(stream, *field);
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
void print(std::ostream& stream, const std::optional<Sections>& field) {
  const std::vector<int64_t> sizes = sizes_of(*field);
  const auto is = [&](bool interleaved) {
    return field->axis_of_pair == Sections::of(sizes, interleaved).axis_of_pair;
  };
  stream << "Sections(";
  if (is(false) || is(true)) {
    stream << json(sizes) << (is(false) ? "" : ", interleaved=True");
  } else {
    stream << "axis_of_pair=[" << field->axis_of_pair.size() << " numbers]";
  }
  stream << (field->restart ? ", restart=True" : "")
         << (field->within_axes ? ", within_axes=True" : "") << ')';
}

void print(std::ostream& stream, const std::optional<ScoreScale>& field) {
  if (field.has_value()) stream << field->describe();
}

void print(std::ostream& stream, const RotaryScaling& field);

/// Prints the fields that differ from their defaults.
struct Printer {
  std::ostream& stream;
  const json defaults;
  const char* separator = "";

  template <typename T>
  void operator()(const char* key, const T& field) {
    if (defaults.value(key, json()) == value(field)) return;
    stream << separator << key << '=';
    print(stream, field);
    separator = ", ";
  }
};

struct ScalingPrinter {
  std::ostream& stream;

  void operator()(std::monostate) const {}

  template <typename Scaling>
  void operator()(Scaling scaling) const {
    stream << name(scaling) << '(';
    Printer printer{stream, write(Scaling())};
    fields(printer, scaling);
    stream << ')';
  }
};

void print(std::ostream& stream, const RotaryScaling& field) {
  std::visit(ScalingPrinter{stream}, field);
}

}  // namespace

RotarySpec parse(const std::string& text) {
  try {
    json object = dispatcher::parse_json("RotarySpec", text);
    if (object.contains("head_dim")) object.emplace("rotary_dim", object["head_dim"]);
    RotarySpec spec(0);
    Reader reader("RotarySpec", std::move(object));
    fields(reader, spec);
    reader.done();
    return spec;
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "RotarySpec: expected JSON text of a specification, got '",
                      core::brief(text), "': ", dispatcher::reason(error));
  }
}

std::string describe(RotarySpec spec) {
  std::ostringstream stream;
  stream << spec.head_dim << ", base=" << spec.base;
  RotarySpec defaults(spec.head_dim);
  defaults.base = spec.base;
  Printer printer{stream, write(defaults), ", "};
  fields(printer, spec);
  return stream.str();
}

}  // namespace rotary

// nlohmann::json keeps keys sorted, so equal specifications have equal text. Without a scale of
// scores, it is the text of former versions.
std::string RotarySpec::to_json() const {
  nlohmann::json object = rotary::write(*this);
  if (!score_scale.has_value()) object.erase("score_scale");
  return object.dump();
}

std::string ScoreScale::to_json() const { return rotary::write(*this).dump(); }

std::string RotarySpec::describe() const { return rotary::describe(*this); }

}  // namespace posembed
