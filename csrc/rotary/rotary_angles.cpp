// Angles of specifications: frequencies and factors of scalings, those for a length, the angles
// of PyTorch programs and what float32 costs, and reports. The scalings' types cite the papers.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "dispatcher/launch.h"
#include "rotary/rotary_operator.h"

namespace posembed::rotary {
namespace {

Series series(const RotarySpec& spec, core::DoubleDouble base) {
  if (spec.sections.has_value() && spec.sections->restart && spec.rotary_dim > 0) {
    return restarted_frequencies(base, spec.sections->axis_of_pair);
  }
  return geometric_frequencies(base, spec.rotary_dim);
}

Series series(const RotarySpec& spec) { return series(spec, spec.base); }

Series divided(Series series, double factor) {
  for (core::DoubleDouble& frequency : series) frequency = frequency / factor;
  return series;
}

/// Without a scaling, or within the original context of a dynamic one.
template <typename Scaling>
Scaled scaled(const RotarySpec& spec, const Scaling&) {
  return {series(spec)};
}

Scaled scaled(const RotarySpec& spec, const LinearScaling& scaling) {
  return {divided(series(spec), scaling.factor)};
}

Scaled scaled(const RotarySpec& spec, const NtkScaling& scaling) {
  return {series(spec, ntk_base(spec.base, scaling.factor, spec.rotary_dim))};
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double attention_factor(const YarnScaling& scaling) {
  if (scaling.attention_factor.has_value()) return *scaling.attention_factor;
  const double mscale = scaling.mscale.value_or(0.0);
  const double all_dim = scaling.mscale_all_dim.value_or(0.0);
  if (mscale == 0.0 || all_dim == 0.0) return yarn_mscale(scaling.factor, 1.0);
  return yarn_mscale(scaling.factor, mscale) / yarn_mscale(scaling.factor, all_dim);
}

YarnBlend blend_of(const YarnScaling& scaling) {
  return {scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow, scaling.truncate};
}

Scaled scaled(const RotarySpec& spec, const YarnScaling& scaling) {
  Scaled result{series(spec), attention_factor(scaling)};
  scale_yarn(result.frequencies, spec.base, scaling.factor, blend_of(scaling));
  return result;
}

Scaled scaled(const RotarySpec& spec, const Llama3Scaling& scaling) {
  Scaled result{series(spec)};
  scale_llama3(result.frequencies, scaling.factor, scaling.low_freq_factor,
               scaling.high_freq_factor, scaling.original_max_positions);
  return result;
}

Scaled scaled(const RotarySpec& spec, const ProportionalScaling& scaling) {
  Series result = divided(series(spec), scaling.factor);
  const double turning = scaling.proportion * static_cast<double>(spec.rotary_dim) / 2.0;
  std::fill(result.begin() + static_cast<int64_t>(turning), result.end(), core::DoubleDouble());
  return {result};
}

double attention_factor(const LongRopeScaling& scaling) {
  if (scaling.attention_factor.has_value()) return *scaling.attention_factor;
  const double factor = scaling.factor.value_or(1.0);
  if (factor <= 1.0) return 1.0;
  const double length = static_cast<double>(scaling.original_max_positions);
  return std::sqrt(1.0 + std::log(factor) / std::log(length));
}

Scaled scaled(const RotarySpec& spec, const LongRopeScaling& scaling) {
  Scaled result{series(spec), attention_factor(scaling)};
  for (size_t pair = 0; pair < result.frequencies.size(); ++pair) {
    result.frequencies[pair] = result.frequencies[pair] / scaling.short_factor[pair];
  }
  return result;
}

Scaled scaled(const RotarySpec& spec, const XPosScaling& scaling) {
  Scaled result{series(spec)};
  result.decay_center = scaling.center;
  const double pairs = static_cast<double>(spec.rotary_dim / 2);
  for (int64_t pair = 0; pair < spec.rotary_dim / 2; ++pair) {
    constexpr double gamma = 0.4;
    const double zeta = (static_cast<double>(pair) / pairs + gamma) / (1.0 + gamma);
    result.decay.push_back(std::log2(zeta) / scaling.scale_base);
  }
  return result;
}

}  // namespace

Scaled scaled(const RotarySpec& spec) {
  if (spec.custom_frequencies.has_value()) {
    return {Series(spec.custom_frequencies->begin(), spec.custom_frequencies->end()),
            spec.custom_attention_factor.value_or(1.0)};
  }
  return std::visit([&](const auto& scaling) { return scaled(spec, scaling); }, spec.scaling);
}

namespace {

// ---------------------------------------------------------------------------------------- numerics
// Each line is the ATen call behind one Python expression of the reference, in the same order, so
// that every rounding is the same. Python computes number / tensor as reciprocal times number.

// ------------------------------------------------------------------------------------ frequencies

Tensor over(double number, const Tensor& tensor) { return at::reciprocal(tensor) * number; }

/// base^(2i / dim) for `count` pairs.
Tensor powers(double base, int64_t dim, int64_t count) {
  const Tensor even = at::arange(0, 2 * count, 2, at::kLong).to(at::kFloat);
  return at::pow(base, even / dim);
}

/// The same for all pairs; with restarting axes, one series per axis.
Tensor powers(const RotarySpec& spec, double base) {
  const int64_t pairs = spec.rotary_dim / 2;
  if (!spec.sections.has_value() || !spec.sections->restart) {
    return powers(base, spec.rotary_dim, pairs);
  }
  Tensor result = at::empty({pairs}, at::kFloat);
  const Tensor axis_of_pair = at::tensor(spec.sections->axis_of_pair);
  for (int64_t axis = 0; axis < max_axes; ++axis) {
    const Tensor own = axis_of_pair.eq(axis).nonzero().squeeze(1);
    result.index_copy_(0, own, powers(base, 2 * own.numel(), own.numel()));
  }
  return result;
}

Tensor plain(const RotarySpec& spec) { return over(1.0, powers(spec, spec.base)); }

template <typename Scaling>
Tensor frequencies(const RotarySpec& spec, const Scaling&) {
  return plain(spec);
}

Tensor frequencies(const RotarySpec& spec, const LinearScaling& scaling) {
  return plain(spec) / scaling.factor;
}

Tensor frequencies(const RotarySpec& spec, const NtkScaling& scaling) {
  const core::DoubleDouble base = ntk_base(spec.base, scaling.factor, spec.rotary_dim);
  return over(1.0, powers(spec, core::to_double(base)));
}

Tensor frequencies(const RotarySpec& spec, const YarnScaling& scaling) {
  const Tensor turning = powers(spec, spec.base);
  const Tensor kept = over(1.0, turning), stretched = over(1.0, turning * scaling.factor);
  const YarnRange<double> range = yarn_range(spec.base, blend_of(scaling), spec.rotary_dim);
  const Tensor pair = at::arange(spec.rotary_dim / 2, at::kFloat);
  const Tensor ramp = at::clamp((pair - range.begin) / (range.end - range.begin), 0, 1);
  const Tensor part = at::rsub(ramp, 1);
  return stretched * at::rsub(part, 1) + kept * part;
}

Tensor frequencies(const RotarySpec& spec, const Llama3Scaling& scaling) {
  const double length = static_cast<double>(scaling.original_max_positions);
  const double low = length / scaling.low_freq_factor, high = length / scaling.high_freq_factor;
  const Tensor kept = plain(spec);
  const Tensor wavelength = over(core::constants::two_pi.high, kept);
  const Tensor scaled = at::where(wavelength.gt(low), kept / scaling.factor, kept);
  if (scaling.high_freq_factor == scaling.low_freq_factor) return scaled;  // nothing to blend
  const Tensor part = (over(length, wavelength) - scaling.low_freq_factor) /
                      (scaling.high_freq_factor - scaling.low_freq_factor);
  const Tensor blended = at::rsub(part, 1) * scaled / scaling.factor + part * scaled;
  const Tensor between = wavelength.lt(high).logical_not() * wavelength.gt(low).logical_not();
  return at::where(between, blended, scaled);
}

Tensor frequencies(const RotarySpec& spec, const ProportionalScaling& scaling) {
  const int64_t pairs = spec.rotary_dim / 2;
  const auto turning = static_cast<int64_t>(scaling.proportion * static_cast<double>(pairs));
  const Tensor standing = at::zeros({pairs - turning}, at::kFloat);
  const Tensor all = plain(spec).narrow(0, 0, turning);
  return at::cat({all, standing}) / scaling.factor;
}

Tensor frequencies(const RotarySpec& spec, const LongRopeScaling& scaling) {
  const Tensor factors = at::tensor(scaling.short_factor).to(at::kFloat);
  return over(1.0, factors * powers(spec, spec.base));
}

/// The frequencies of a specification, computed once, on the CPU as in the models.
const std::vector<float>& known_frequencies(const Specification& spec) {
  return spec.float32_frequencies.get([&spec] {
    const Tensor computed = float32_frequencies(spec.spec).contiguous();
    const float* values = computed.const_data_ptr<float>();
    return std::vector<float>(values, values + computed.numel());
  });
}

// ----------------------------------------------------------------------------------------- tables

/// The positions of tokens without given positions: [seq].
Tensor counted_positions(const Inputs& inputs, const Arguments& call, const Tensor& query) {
  const auto options = query.options().dtype(at::kLong);
  if (!inputs.cu_seqlens.defined()) {
    return at::arange(call.offset, call.offset + call.seq, options);
  }
  const Tensor tokens = at::arange(call.seq, options);
  const Tensor document = at::bucketize(tokens, inputs.cu_seqlens, false, /*right=*/true) - 1;
  const Tensor start = inputs.cu_seqlens.index_select(0, document.clamp_min(0));
  return tokens - start + call.offset;
}

/// Positions as [..., seq, 1], or [..., seq, pairs] if pairs belong to different axes.
Tensor positions_of_pairs(const Specification& spec, const Inputs& inputs, const Arguments& call,
                          const Tensor& query) {
  if (!inputs.positions.defined()) return counted_positions(inputs, call, query).unsqueeze(-1);
  if (call.axes == 1) return inputs.positions.unsqueeze(-1);
  std::vector<Tensor> of_pair;  // a CUDA graph cannot capture an index's copy to the device
  for (const int64_t axis : spec.spec.sections->axis_of_pair) {
    of_pair.push_back(inputs.positions.select(0, axis));
  }
  return at::stack(of_pair, -1);
}

AngleTables sines_and_cosines(const Tensor& angles, Numerics numerics) {
  if (numerics == Numerics::float32_polar) {
    const Tensor parts = at::view_as_real(at::polar(at::ones_like(angles), angles));
    return {parts.select(-1, 0), parts.select(-1, 1)};
  }
  return {angles.cos(), angles.sin()};
}

Tensor finished(const Tensor& table, double amplitude, bool rounded, at::ScalarType type) {
  const Tensor scaled = amplitude == 1.0 ? table : table * amplitude;
  return (rounded ? scaled.to(type).to(at::kFloat) : scaled).contiguous();
}

/// How the program rounds products on the device of `query`.
ProductRounding product_rounding_for(Numerics numerics, const Tensor& query) {
  if (numerics == Numerics::float32) return ProductRounding::to_data_type;
  const bool fuses = numerics == Numerics::float32_polar && query.is_cuda();
  return fuses ? ProductRounding::fused : ProductRounding::none;
}

}  // namespace

Tensor float32_frequencies(const RotarySpec& spec) {
  if (spec.custom_frequencies.has_value()) {
    return at::tensor(*spec.custom_frequencies).to(at::kFloat);
  }
  return std::visit([&](const auto& scaling) { return frequencies(spec, scaling); }, spec.scaling);
}

namespace {

/// The error of a pair's float32 angle at a position, and its bound at all positions up to there.
struct PairError {
  double exact;  // radians per position
  float rounded;

  double at(int64_t position) const {
    const float angle = rounded * static_cast<float>(position);
    return std::abs(static_cast<double>(angle) - exact * static_cast<double>(position));
  }

  double bound(int64_t position) const {
    const auto turns = static_cast<double>(position);
    const double angle = std::abs(static_cast<double>(rounded)) * turns;
    const double of_position = position > int64_t{1} << 24 ? angle * 0x1p-24 : 0.0;
    const double unit = angle == 0.0 ? 0.0 : std::ldexp(1.0, std::ilogb(angle * (1 + 0x1p-23)));
    return std::abs(rounded - exact) * turns + of_position + unit * 0x1p-24;
  }
};

}  // namespace

AngleTables use_tables(const Specification& spec, const Tensor& query, const Inputs& inputs,
                       Arguments* call) {
  const Numerics numerics = spec.spec.numerics;
  const std::vector<float>& known = known_frequencies(spec);
  const auto count = static_cast<int64_t>(known.size());
  const Tensor frequencies = dispatcher::floats_on(query.device(), known, count);
  const Tensor positions = positions_of_pairs(spec, inputs, *call, query);
  const Tensor angles = positions.to(at::kFloat) * frequencies;
  const AngleTables whole = sines_and_cosines(angles, numerics);
  const bool rounded =
      (numerics == Numerics::float32 || numerics == Numerics::float32_rounded_table) &&
      query.scalar_type() != at::kDouble;
  AngleTables tables{finished(whole.cosines, call->amplitude, rounded, query.scalar_type()),
                     finished(whole.sines, call->amplitude, rounded, query.scalar_type())};
  call->cosines = tables.cosines.const_data_ptr();
  call->sines = tables.sines.const_data_ptr();
  call->table_stride[0] =
      tables.cosines.dim() > 2 && tables.cosines.size(0) > 1 ? tables.cosines.stride(0) : 0;
  call->table_stride[1] = call->pairs;
  call->product_rounding = product_rounding_for(numerics, query);
  return tables;
}

}  // namespace posembed::rotary

namespace posembed {

// -------------------------------------------------------------------------------------- resolution
// Resolves specifications whose frequencies depend on the sequence's length to those of one length.

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

AngleError RotarySpec::float32_error(int64_t length) const {
  TORCH_CHECK_VALUE(length > 0, "length: expected 1 or more, got ", length);
  const RotarySpec spec = is_dynamic() ? resolve(length) : *this;
  const torch::Tensor exact = spec.frequencies();
  const torch::Tensor rounded = rotary::float32_frequencies(spec).contiguous();
  const int64_t last = length - 1;
  std::vector<std::pair<double, rotary::PairError>> pairs;  // by their bounds, the largest first
  for (int64_t i = 0; i < exact.numel(); ++i) {
    const rotary::PairError pair{exact.const_data_ptr<double>()[i],
                                 rounded.const_data_ptr<float>()[i]};
    pairs.emplace_back(pair.bound(last), pair);
  }
  std::sort(pairs.begin(), pairs.end(),
            [](const auto& a, const auto& b) { return a.first > b.first; });
  AngleError worst;
  // Bounds grow with the position: the search goes back from the end, and stops where none can be
  // larger.
  const int64_t span = (int64_t{1} << 28) / std::max<int64_t>(exact.numel(), 1);
  const int64_t first = std::max<int64_t>(1, length - std::max(span, int64_t{1} << 17));
  for (const auto& [bound, pair] : pairs) {
    if (bound <= worst.radians) break;
    for (int64_t i = last; i >= first && (i % 1024 != 0 || pair.bound(i) > worst.radians); --i) {
      const double error = pair.at(i);
      if (error > worst.radians) worst = {error, i};
    }
  }
  return worst;
}

// ------------------------------------------------------------------------------------- explanation
// The reports explain() and diff() of specifications, the same for C++ and Python.

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
  return rounded(rotary::scaled(spec).frequencies);
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
  const auto ours = nlohmann::json::parse(rotary::complete_text(*this));
  const auto theirs = nlohmann::json::parse(rotary::complete_text(other));
  if (ours == theirs) return "equal";
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
