// The Fourier operators: checks, allocation and the call of the kernel.
#include "fourier/fourier_operator.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "core/brief.h"
#include "core/double_double.h"
#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/tensors.h"
#include "fourier/fourier.h"

namespace posembed::fourier {
namespace {

/// Words are given as in the message: 'fw', 'wf'.
void check_word(std::string_view word, std::string_view known, const char* argument) {
  const bool found = known.find("'" + std::string(word) + "'") != std::string_view::npos;
  TORCH_CHECK_VALUE(found, argument, ": expected one of ", known, ", got '", core::brief(word),
                    "'");
}

void check(const Encoding& e) {
  dispatcher::check_position_type(e.coordinates, "coordinates");
  TORCH_CHECK_VALUE(e.coordinates.dim() >= 1, "coordinates: expected [..., axes], got a scalar");
  check_word(e.unit, "'radian', 'half_turn', 'turn'", "unit");
  check_word(e.waves, "'sin_cos', 'cos_sin', 'sin', 'cos'", "waves");
  check_word(e.order, "'wf', 'fw', 'waf', 'wfa', 'awf', 'afw', 'fwa', 'faw'", "order");
  dispatcher::check_floating(e.frequencies, "frequencies");
  dispatcher::check_rank(e.frequencies, "frequencies", 2, "[axes, n]");
  if (!e.apart()) {
    dispatcher::check_size(e.frequencies.sym_size(0), e.coordinates.sym_size(-1), "frequencies",
                           "axes");
  }
  constexpr int64_t max_derivative = 1000;
  TORCH_CHECK_VALUE(e.derivative >= 0 && e.derivative <= max_derivative,
                    "derivative: expected 0 to ", max_derivative, ", got ", e.derivative);
  if (!e.phases.has_value()) return;
  dispatcher::check_floating(*e.phases, "phases");
  dispatcher::check_rank(*e.phases, "phases", 1, "[n]");
  dispatcher::check_size(e.phases->sym_size(0), e.frequencies.sym_size(1), "phases", "n");
}

/// The dtype of the result: that of x, the requested one, or that of floating coordinates.
at::ScalarType result_type(const Encoding& e, MaybeType dtype) {
  const at::ScalarType usual =
      e.coordinates.is_floating_point() ? e.coordinates.scalar_type() : at::kFloat;
  const at::ScalarType type = e.x.has_value() ? e.x->scalar_type() : dtype.value_or(usual);
  dispatcher::check_floating(type, e.x.has_value() ? "x" : "dtype");
  TORCH_CHECK_TYPE(dtype.value_or(type) == type, "dtype: expected that of x, ",
                   dispatcher::dtype_name(type), ", got ", dispatcher::dtype_name(*dtype));
  return type;
}

Tensor prepare(const Encoding& e, MaybeType dtype) {
  check(e);
  const at::ScalarType type = result_type(e, dtype);
  c10::SymDimVector sizes(e.coordinates.sym_sizes().begin(), e.coordinates.sym_sizes().end());
  const c10::SymInt groups = e.apart() ? sizes.back() : c10::SymInt(1);
  const c10::SymInt count = e.frequencies.sym_size(1);
  sizes.back() = groups;
  sizes.append({count, c10::SymInt(e.num_waves())});
  dispatcher::check_result(sizes, type, "frequencies");
  sizes.resize(sizes.size() - 2);
  sizes.back() = groups * count * e.num_waves();
  TORCH_CHECK_VALUE(!e.x.has_value() || e.x->sym_sizes() == c10::SymIntArrayRef(sizes),
                    "x: expected ", sizes, ", got ", e.x.has_value() ? e.x->sym_sizes() : sizes);
  return dispatcher::empty_symint(sizes, e.coordinates.options().dtype(type));
}

/// The step in columns from one value of a letter to the next.
int64_t step_of(const Encoding& e, const Arguments& call, char letter) {
  int64_t step = 1;
  for (size_t i = e.order.size(); i-- > 0 && e.order[i] != letter;) {
    step *= e.order[i] == 'f' ? call.count : e.order[i] == 'a' ? call.groups : e.num_waves();
  }
  return step;
}

void compute(const Encoding& e, MaybeType, const Tensor& out) {
  if (out.numel() == 0) return;
  const auto dense = [](const Tensor& tensor) { return tensor.contiguous(); };
  const Tensor coordinates = dense(e.coordinates), frequencies = dense(e.frequencies);
  const Tensor phases = dense(e.phases.value_or(frequencies)), in = dense(e.x.value_or(out));
  Arguments call;
  call.coordinates = dispatcher::position_view(coordinates);
  call.frequencies = dispatcher::position_view(frequencies);
  if (e.phases.has_value()) call.phases = dispatcher::position_view(phases);
  call.unit = e.turns_of_unit();
  call.in = e.x.has_value() ? in.const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.scalar = dispatcher::scalar_of(out);
  call.columns = out.size(-1);
  call.rows = out.numel() / call.columns;
  call.terms = frequencies.size(0);
  call.count = frequencies.size(1);
  call.apart = e.apart();
  call.groups = e.apart() ? coordinates.size(-1) : 1;
  call.group_step = step_of(e, call, 'a');
  call.count_step = step_of(e, call, 'f');
  const int64_t second = step_of(e, call, 'w');
  call.sine = e.waves == "cos" ? -1 : e.waves == "cos_sin" ? second : 0;
  call.cosine = e.waves == "sin" ? -1 : e.waves == "sin_cos" ? second : 0;
  call.derivative = e.derivative;
  constexpr int64_t bytes_of_product = 32;  // copying that many takes as long
  dispatcher::launch(call, out, call.rows * call.groups, bytes_of_product * call.count * call.terms,
                     encode_cpu, POSEMBED_CUDA_LAUNCHER(encode_cuda));
}

Tensor bands(double first, double last, int64_t count, std::optional<at::Device> device) {
  TORCH_CHECK_VALUE(std::isfinite(first) && std::isfinite(last - first),
                    "first: expected finite numbers first and last, got ", first, " and ", last);
  constexpr int64_t most = 65536;
  TORCH_CHECK_VALUE(count >= 1 && count <= most, "count: expected 1 to ", most, ", got ", count);
  Tensor result = at::empty({2, count}, at::kDouble);
  const core::DoubleDouble range = core::two_sum(last, -first);
  for (int64_t i = 0; i < count; ++i) {
    const auto part = core::DoubleDouble(static_cast<double>(i)) /
                      core::DoubleDouble(static_cast<double>(std::max<int64_t>(1, count - 1)));
    const core::DoubleDouble band = core::DoubleDouble(first) + range * part;
    result.mutable_data_ptr<double>()[i] = band.high;
    result.mutable_data_ptr<double>()[count + i] = band.low;
  }
  return result.to(device.value_or(at::kCPU));
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) { m.impl("fourier_bands", bands); }

namespace {

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of Fourier features. By an angle, a feature is the same a quarter turn ahead:
// fourier_features of the next derivative. Angles are linear in coordinates, frequencies, phases.

using dispatcher::variable_list;
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

/// Features [..., columns] with a dimension for each letter of the order.
Tensor unfolded(const Encoding& e, const Tensor& features) {
  c10::SymDimVector sizes(features.sym_sizes().begin(), features.sym_sizes().end() - 1);
  for (const char letter : e.order) {
    sizes.push_back(letter == 'f'   ? e.frequencies.sym_size(1)
                    : letter == 'a' ? e.coordinates.sym_size(-1)
                                    : c10::SymInt(e.num_waves()));
  }
  return features.view_symint(sizes);
}

/// The features' derivatives by their angles.
Tensor derivative(Encoding e, at::ScalarType type) {
  ++e.derivative;
  e.x.reset();
  return unfolded(e, fourier_features(e, type));
}

/// The dimension of waves among those of the order.
int64_t dim_of_waves(const Encoding& e) {
  return static_cast<int64_t>(e.order.find('w')) - static_cast<int64_t>(e.order.size());
}

/// Angles [..., axes, n] as [..., n, axes], or the reverse, if columns have that order.
Tensor reordered(const Encoding& e, const Tensor& angles) {
  return e.order.find('f') < e.order.rfind('a') && e.apart() ? angles.transpose(-1, -2) : angles;
}

/// Coordinates as rows of a matrix product with rates(): [..., axes], or [..., axes, 1] if apart.
Tensor factors(const Encoding& e, const Tensor& coordinates, at::ScalarType type) {
  return e.apart() ? coordinates.to(type).unsqueeze(-1) : coordinates.to(type);
}

/// Frequencies in radians: [axes, n], or [1, n] if axes are apart.
Tensor rates(const Encoding& e, const Tensor& frequencies, at::ScalarType type) {
  const Tensor wide = frequencies.to(at::kDouble).mul(e.radians_of_unit());
  return (e.apart() ? at::sum(wide, 0, /*keepdim=*/true) : wide).to(type);
}

/// All dimensions but the last as one.
Tensor rows(const Tensor& tensor) {
  c10::SymInt count = 1;
  for (const c10::SymInt& size : tensor.sym_sizes().slice(0, tensor.dim() - 1))
    count = count * size;
  return tensor.reshape_symint({count, tensor.sym_size(-1)});
}

/// The dtype of sums: at least float32, and that of floating coordinates.
at::ScalarType sum_type(const Encoding& e, at::ScalarType type) {
  const bool wide = e.coordinates.scalar_type() == at::kDouble || type == at::kDouble;
  return wide ? at::kDouble : at::kFloat;
}

variable_list gradient(const dispatcher::Gradients& gradients, const Encoding& e) {
  variable_list result(4);
  if (gradients.needs(3)) result[3] = gradients[0];
  if (!(gradients.needs(0) || gradients.needs(1) || gradients.needs(2))) return result;
  const NoAutocast disabled(c10::autocast_dispatch_keyset);
  const at::ScalarType type = sum_type(e, gradients[0].scalar_type());
  const Tensor product = unfolded(e, gradients[0].to(type)).mul(derivative(e, type));
  const Tensor angles = reordered(e, at::sum(product, dim_of_waves(e)));
  if (gradients.needs(0)) {
    const Tensor sum = at::matmul(angles, rates(e, e.frequencies, type).t());
    result[0] = sum.reshape_symint(e.coordinates.sym_sizes()).to(e.coordinates.scalar_type());
  }
  if (gradients.needs(1)) {
    const Tensor factor = rows(factors(e, e.coordinates, type));
    const Tensor sum = at::matmul(factor.t(), rows(angles)).mul(e.radians_of_unit());
    result[1] = sum.expand_symint(e.frequencies.sym_sizes()).to(e.frequencies.scalar_type());
  }
  if (gradients.needs(2)) result[2] = at::sum(rows(angles), 0).to(e.phases->scalar_type());
  return result;
}

/// The tangent of features; undefined if no argument has one.
Tensor feature_tangent(const Encoding& e, const Tensor& features) {
  const Tensor of_coordinates = dispatcher::tangent(e.coordinates),
               of_frequencies = dispatcher::tangent(e.frequencies),
               of_phases = dispatcher::tangent(e.phases.value_or(Tensor())),
               of_x = dispatcher::copied_tangent(e.x.value_or(Tensor()));
  if (!of_coordinates.defined() && !of_frequencies.defined() && !of_phases.defined()) return of_x;
  const NoAutocast disabled(c10::autocast_dispatch_keyset);
  Encoding plain = e;
  plain.coordinates = dispatcher::primal(e.coordinates);
  plain.frequencies = dispatcher::primal(e.frequencies);
  if (e.phases.has_value()) plain.phases = dispatcher::primal(*e.phases);
  const at::ScalarType type = sum_type(e, features.scalar_type());
  const auto product = [&](const Tensor& coordinates, const Tensor& frequencies) {
    return at::matmul(factors(e, coordinates, type), rates(e, frequencies, type));
  };
  Tensor angles;
  if (of_coordinates.defined()) angles = product(of_coordinates, plain.frequencies);
  if (of_frequencies.defined()) {
    angles = dispatcher::accumulate(angles, product(plain.coordinates, of_frequencies));
  }
  if (of_phases.defined()) {
    angles = dispatcher::accumulate(of_phases.to(type).unsqueeze(0), angles);
  }
  const Tensor result =
      derivative(plain, type).mul(reordered(e, angles).unsqueeze(dim_of_waves(e)));
  return dispatcher::accumulate(
      result.reshape_symint(features.sym_sizes()).to(features.scalar_type()), of_x);
}

Tensor autograd(const Encoding& e, MaybeType dtype) {
  auto node = dispatcher::node_for<dispatcher::FunctionNode<fourier_features, gradient>>(
      e.coordinates, e.frequencies, e.phases.value_or(Tensor()), e.x.value_or(Tensor()));
  if (node) {
    Encoding kept = e;
    kept.x.reset();
    node->save(kept);
  }
  Tensor output = dispatcher::below_autograd([&] { return fourier_features(e, dtype); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, feature_tangent(e, output));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "fourier_features("
         "Tensor coordinates, "
         "Tensor frequencies, "
         "Tensor? phases=None, "
         "Tensor? x=None, "
         "str unit=\"radian\", "
         "str waves=\"sin_cos\", "
         "str order=\"wf\", "
         "int derivative=0, "
         "ScalarType? dtype=None) -> Tensor");
  define(m, "fourier_bands(float first, float last, int count, Device? device=None) -> Tensor");
  fourier_features.implement<prepare, compute>(m);
  fourier_features.differentiate<autograd>(m);
}

}  // namespace posembed::fourier
