// The derivatives of rotations by their frequencies: tangents, which are rotations too, and
// gradients, which frequency_gradient.h sums.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/launch.h"
#include "rotary/arguments.h"
#include "rotary/frequency_gradient.h"

namespace posembed::rotary {
namespace {

/// The specification of a rotation, and memory for the result.
struct PreparedDerivative {
  SpecificationPointer spec;
  Tensor result;
};

PreparedDerivative prepare_tangent(const Tensor& rotated, const Rotation& rotation) {
  TORCH_CHECK_VALUE(rotation.call.frequencies().has_value(),
                    "frequencies: expected the direction in which frequencies move, got None");
  return {check(rotated, nullptr, rotation), empty_result(rotated)};
}

void fill_tangent(const Tensor& rotated, const Rotation& rotation,
                  const PreparedDerivative& prepared) {
  const Tensor in = dispatcher::with_contiguous_last_dim(rotated);
  const Tensor& out = prepared.result.zero_();
  const Inputs inputs =
      checked_inputs(rotation.call, in.size(dimensions(rotation.call.layout()).seq));
  Arguments call =
      arguments({{&in, nullptr}, {&out, nullptr}, 1}, inputs, rotation, *prepared.spec);
  call.tangent = true;
  call.amplitude = 1;
  call.decay = nullptr;
  launch_rotation(call, in);
}

Tensor empty_frequencies(const Tensor& query, const Rotation& rotation, const RotarySpec& spec) {
  const MaybeTensor& frequencies = rotation.call.frequencies();
  const at::ScalarType type =
      frequencies ? frequencies->scalar_type() : dispatcher::compute_type(query);
  const c10::SymDimVector sizes = frequencies ? c10::SymDimVector(frequencies->sym_sizes())
                                              : c10::SymDimVector{spec.rotary_dim / 2};
  return at::empty_symint(sizes, query.options().dtype(type));
}

PreparedDerivative prepare_gradient(const Tensor& gradient, const Tensor& query,
                                    const Rotation& rotation) {
  SpecificationPointer spec = check(query, nullptr, rotation);
  dispatcher::check_like(gradient, "gradient", query, "query");
  Tensor result = empty_frequencies(query, rotation, spec->spec);
  return {std::move(spec), std::move(result)};
}

void sum_on_cpu(const Arguments& call, const Tensor& sums, const Tensor& out) {
  double* const parts = sums.mutable_data_ptr<double>();
  const int64_t tokens = call.batch * call.seq, frequencies = frequency_count(call);
  const int64_t token_bytes = 2 * call.views[0].heads * call.head_dim * core::size_of(call.scalar);
  dispatcher::parallel_for(
      sums.size(0), tokens_of_chunk(tokens) * token_bytes,
      [&](int64_t begin, int64_t end) { sum_moments_cpu(call, parts, begin, end); });
  core::visit_scalar(dispatcher::scalar_of(out), [&](auto tag) {
    using Out = core::Compute<typename decltype(tag)::type>;
    Out* const results = static_cast<Out*>(out.mutable_data_ptr());
    for (int64_t i = 0; i < frequencies; ++i) {
      results[i] = static_cast<Out>(total_of(parts, sums.size(0), frequencies, i));
    }
  });
}

void sum_gradient(const Tensor& gradient, const Tensor& query, const Rotation& rotation,
                  const PreparedDerivative& prepared) {
  const Tensor in = dispatcher::with_contiguous_last_dim(query),
               dense = dispatcher::with_contiguous_last_dim(gradient);
  const Inputs inputs =
      checked_inputs(rotation.call, in.size(dimensions(rotation.call.layout()).seq));
  const Arguments call = arguments({{&in, &dense}, {}, 2}, inputs, rotation, *prepared.spec);
  const Tensor& out = prepared.result;
  const Tensor sums = at::empty({chunks_of(call.batch * call.seq), frequency_count(call)},
                                query.options().dtype(at::kDouble));
  if (dispatcher::on_cuda(query)) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(query);
      dispatcher::check_launch(sum_moments_cuda(call, sums.mutable_data_ptr<double>(),
                                                out.mutable_data_ptr(), dispatcher::scalar_of(out),
                                                scope.stream()));
    }
  } else {
    sum_on_cpu(call, sums, out);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  rotary_tangent.implement<prepare_tangent, fill_tangent>(m);
  rotary_frequencies_backward.implement<prepare_gradient, sum_gradient>(m);
}

}  // namespace posembed::rotary
