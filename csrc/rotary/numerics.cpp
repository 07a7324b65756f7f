// Each line is the ATen call behind one Python expression of the reference, in the same order, so
// that every rounding is the same. Python computes number / tensor as reciprocal times number.
#include "rotary/numerics.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "dispatcher/host_floats.h"
#include "rotary/scaling.h"

namespace posembed::rotary {
namespace {

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

Tensor frequencies(const RotarySpec& spec, const std::monostate&) { return plain(spec); }

Tensor frequencies(const RotarySpec& spec, const LinearScaling& scaling) {
  return plain(spec) / scaling.factor;
}

Tensor frequencies(const RotarySpec& spec, const NtkScaling& scaling) {
  const core::DoubleDouble base = ntk_base(spec.base, scaling.factor, spec.rotary_dim);
  return over(1.0, powers(spec, core::to_double(base)));
}

Tensor frequencies(const RotarySpec& spec, const DynamicNtkScaling&) { return plain(spec); }

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

Tensor frequencies(const RotarySpec& spec, const XPosScaling&) { return plain(spec); }

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

}  // namespace posembed
