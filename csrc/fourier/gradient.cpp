// Derivatives of Fourier features. By an angle, a feature is the same a quarter turn ahead:
// fourier_features of the next derivative. Angles are linear in coordinates, frequencies, phases.
#include <ATen/autocast_mode.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "dispatcher/autograd.h"
#include "dispatcher/saved_call.h"
#include "dispatcher/tangent.h"
#include "dispatcher/tensors.h"
#include "fourier/operator.h"

namespace posembed::fourier {
namespace {

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

class FourierFeaturesBackward : public dispatcher::OperatorNode<FourierFeaturesBackward> {
 public:
  static constexpr const char* label = "FourierFeaturesBackward";

  template <typename Visitor>
  void members(Visitor& visit) {
    saved.members(visit);
  }

  variable_list backward(variable_list&& gradients) {
    const Tensor& gradient = gradients[0];
    variable_list result(4);
    if (!gradient.defined()) return result;
    if (needs(3)) result[3] = gradient;
    if (!(needs(0) || needs(1) || needs(2))) return result;
    const NoAutocast disabled(c10::autocast_dispatch_keyset);
    const Encoding e = saved.unpack();
    const at::ScalarType type = sum_type(e, gradient.scalar_type());
    const Tensor product = unfolded(e, gradient.to(type)).mul(derivative(e, type));
    const Tensor angles = reordered(e, at::sum(product, dim_of_waves(e)));
    if (needs(0)) {
      const Tensor sum = at::matmul(angles, rates(e, e.frequencies, type).t());
      result[0] = sum.reshape_symint(e.coordinates.sym_sizes()).to(e.coordinates.scalar_type());
    }
    if (needs(1)) {
      const Tensor factor = rows(factors(e, e.coordinates, type));
      const Tensor sum = at::matmul(factor.t(), rows(angles)).mul(e.radians_of_unit());
      result[1] = sum.expand_symint(e.frequencies.sym_sizes()).to(e.frequencies.scalar_type());
    }
    if (needs(2)) result[2] = at::sum(rows(angles), 0).to(e.phases->scalar_type());
    return result;
  }

  dispatcher::SavedCall<Encoding> saved;
};

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
  auto node = dispatcher::node_for<FourierFeaturesBackward>(
      e.coordinates, e.frequencies, e.phases.value_or(Tensor()), e.x.value_or(Tensor()));
  if (node) {
    Encoding kept = e;
    kept.x.reset();
    node->saved.save(kept);
  }
  Tensor output = dispatcher::below_autograd([&] { return fourier_features(e, dtype); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, feature_tangent(e, output));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) { fourier_features.differentiate<autograd>(m); }

}  // namespace posembed::fourier
