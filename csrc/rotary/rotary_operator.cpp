// The rotary operators: query, or query and key, rotated by position; functional, in place, and
// into given memory. Eager and Meta kernels share their checks.
#include "rotary/rotary_operator.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/launch.h"
#include "dispatcher/linear.h"
#include "posembed/rotary.h"
#include "rotary/rotary.h"
#include "rotary/rotary_checks.h"
#include "rotary/rotary_specification.h"

namespace posembed::rotary {

void rotate(const Job& job, const Rotation& rotation, const Specification& spec) {
  const int64_t tokens = job.in[0]->size(dimensions(rotation.call.layout()).seq);
  const Inputs inputs = checked_inputs(rotation.call, tokens);
  Arguments call = arguments(job, inputs, rotation, spec);
  AngleTables tables;
  if (spec.spec.numerics != Numerics::exact) tables = use_tables(spec, *job.in[0], inputs, &call);
  launch_rotation(call, *job.in[0]);
}

namespace {

struct Rules {
  using Call = Rotation;

  static SpecificationPointer check(const Tensor& query, const Tensor* key, const Rotation& call) {
    return rotary::check(query, key, call);
  }

  static void check_written(const Tensor& out, const char* name, const Tensor& in,
                            const char* in_name, const Rotation&) {
    if (!out.is_same(in)) dispatcher::check_like(out, name, in, in_name);
    dispatcher::check_writable(out, name);
  }

  static Tensor empty(const Tensor& in, const Rotation&) { return empty_result(in); }

  static Tensor readable(const Tensor& in, const Rotation&) {
    return dispatcher::with_contiguous_last_dim(in);
  }

  static void rotate(const Job& job, const Rotation& call, const SpecificationPointer& spec) {
    rotary::rotate(job, call, *spec);
  }
};

}  // namespace

}  // namespace posembed::rotary

namespace posembed {

// -------------------------------------------------------------------------------------- rerotation
// Moves rotated keys to other positions, or to another specification.

namespace rotary {
namespace {

/// Also accepts float8, for caches: as rotations are linear, the scale of a cache stays the same.
void check_key_type(const Tensor& key) {
  if (key.scalar_type() == at::kFloat8_e4m3fn) return;
  TORCH_CHECK_TYPE(at::isFloatingType(key.scalar_type()) && key.element_size() > 1,
                   "key: expected ", "float32, float64, bfloat16, float16 or float8_e4m3fn, got ",
                   key.scalar_type());
}

/// Writes moved keys in the dtype of the cache; float8 saturates, as rotary_cache_ does.
void store(const Tensor& wide, const Tensor& key) {
  constexpr double largest = 448;
  key.copy_(key.scalar_type() == at::kFloat8_e4m3fn ? wide.clamp(-largest, largest) : wide);
}

/// The checks of rotary_, with the argument names of rerotate_.
void check_moved(const Tensor& key, const char* argument, const Rotation& rotation) {
  check(key, nullptr, rotation, {"key", "key", argument});
  const Tensor& positions = *rotation.call.positions();
  if (positions.is_cpu() && !at::isTensorSubclassLike(positions)) {
    check_position_values(positions.resolve_neg().contiguous(), argument, rotation.call.layout());
  }
}

void rerotate(const Tensor& key, const Tensor& old_positions, const Tensor& new_positions,
              Text spec, std::optional<Text> new_spec, Text layout,
              const MaybeTensor& frequencies) {
  check_key_type(key);
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && key.requires_grad()),
                    "key: requires grad, and an in-place operator keeps no history");
  dispatcher::check_versioned(key, "key");
  const SpecificationPointer before = specification(spec);
  const SpecificationPointer after = specification(new_spec.value_or(spec));
  const auto to = [&](const Tensor& positions, bool with_frequencies) {
    RotaryCall call(positions);
    call.layout(dispatcher::enum_from<Layout>(layout));
    if (with_frequencies && frequencies.has_value()) call.frequencies(frequencies->detach());
    return call;
  };
  const Rotation back{before->for_keys, to(old_positions, true).inverse(true)};
  const Rotation forth{after->for_keys, to(new_positions, !new_spec.has_value())};
  // Use float64 between the two rotations, so that only the conversion to the keys' dtype rounds.
  const Tensor wide = key.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  check_moved(wide, "old_positions", back);
  check_moved(wide, "new_positions", forth);
  rotary_(wide, back);
  rotary_(wide, forth);
  store(wide, key);
}

}  // namespace

// Composite, so that autograd, compilers and backends see the operators inside.

}  // namespace rotary

torch::Tensor functional::rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                                    const torch::Tensor& new_positions, const RotarySpec& spec,
                                    const std::optional<RotarySpec>& new_spec,
                                    const RotaryCall& call) {
  TORCH_CHECK_VALUE(!call.positions() && !call.cu_seqlens() && !call.inverse() &&
                        !call.offset().of_samples() && call.offset().number() == 0,
                    "call: expected only a layout and frequencies for rerotate_");
  std::optional<std::string> new_text;
  if (new_spec.has_value()) new_text = new_spec->to_json();
  rotary::rerotate(key, old_positions, new_positions, spec.to_json(), new_text, name(call.layout()),
                   call.frequencies());
  return key;
}

}  // namespace posembed

namespace posembed::rotary {
namespace {

// ----------------------------------------------------------------------------- frequency operators
// The derivatives of rotations by their frequencies: tangents, which are rotations too, and
// gradients, which rotary.h sums.

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

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of the rotary operators. A rotation is linear in its tensor: tangents are rotated
// forward, gradients by the transpose. Frequencies have an operator for tangents and one for
// gradients; both are linear in each argument and each other's derivative. Rotated tensors are
// saved only if frequencies need a gradient.

using dispatcher::Gradients;
using dispatcher::variable_list;

/// The transpose of a rotation: a rotation by minus the angle, times the same factor.
Rotation transposed(Rotation rotation) {
  rotation.transpose = !rotation.transpose;
  return rotation;
}

Rotation with_frequencies(Rotation rotation, MaybeTensor frequencies) {
  rotation.call.frequencies(std::move(frequencies));
  return rotation;
}

/// The text for rotating a tensor on its own as the key of a pair.
std::string text_of_key(const Rotation& rotation) { return specification(rotation.spec)->for_keys; }

Rotation with_text(Rotation rotation, Text spec) {
  rotation.spec = spec;
  return rotation;
}

/// Gradients of the rotated tensors of rotary and rotary_pair, then that of frequencies, for which
/// alone `query` and `key` are saved.
variable_list rotated_gradient(const Gradients& gradients, const Rotation& forward,
                               const Tensor& query, const Tensor& key) {
  const Rotation back = transposed(forward);
  const size_t count = gradients.size();
  variable_list result(count + 1);
  if (count == 2 && gradients[0].defined() && gradients[1].defined()) {
    std::tie(result[0], result[1]) = rotary_pair(gradients[0], gradients[1], back);
  } else {
    if (gradients[0].defined()) result[0] = rotary(gradients[0], back);
    if (count == 2 && gradients[1].defined()) {
      const std::string spec = text_of_key(forward);
      result[1] = rotary(gradients[1], with_text(back, spec));
    }
  }
  if (!gradients.needs(count)) return result;
  for (size_t i = 0; i < count; ++i) {
    if (!result[i].defined()) continue;
    const Tensor part = rotary_frequencies_backward(result[i], i == 0 ? query : key, forward);
    result[count] = dispatcher::accumulate(result[count], part);
  }
  return result;
}

/// `rotated` is saved for the frequencies' gradient.
variable_list tangent_gradient(const Gradients& gradients, const Rotation& forward,
                               const Tensor& rotated) {
  variable_list result(2);
  if (gradients.needs(0)) result[0] = rotary_tangent(gradients[0], transposed(forward));
  if (gradients.needs(1)) {
    result[1] = rotary_frequencies_backward(gradients[0], rotated, forward);
  }
  return result;
}

variable_list frequencies_gradient(const Gradients& gradients, const Rotation& rotation,
                                   const Tensor& gradient, const Tensor& query) {
  const Rotation tangent_call = with_frequencies(rotation, gradients[0]);
  variable_list result(2);
  if (gradients.needs(0)) result[0] = rotary_tangent(query, tangent_call);
  if (gradients.needs(1)) result[1] = rotary_tangent(gradient, transposed(tangent_call));
  return result;
}

/// The node of a rotation. Saves the rotated tensors only for the gradient of frequencies.
auto backward_node(const Rotation& rotation, const Tensor& query, const Tensor& key = {}) {
  using Node = dispatcher::FunctionNode<rotary, rotated_gradient>;
  const MaybeTensor& frequencies = rotation.call.frequencies();
  auto node = key.defined() ? dispatcher::node_for<Node>(query, key, frequencies)
                            : dispatcher::node_for<Node>(query, frequencies);
  if (node) {
    const bool keeps = frequencies.has_value() && frequencies->requires_grad();
    node->save(rotation, keeps ? query : Tensor(), keeps ? key : Tensor());
  }
  return node;
}

MaybeTensor primal(const MaybeTensor& tensor) {
  return tensor.has_value() ? MaybeTensor(dispatcher::primal(*tensor)) : std::nullopt;
}

MaybeTensor tangent_of(const MaybeTensor& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  Tensor direction = dispatcher::tangent(*tensor);
  return direction.defined() ? MaybeTensor(std::move(direction)) : std::nullopt;
}

/// Undefined if neither the rotated tensor nor the frequencies have a tangent.
Tensor rotated_tangent(const Tensor& in, const Tensor& out, const Rotation& rotation) {
  Tensor result;
  if (const Tensor direction = dispatcher::tangent(in); direction.defined()) {
    result = rotary(direction, with_frequencies(rotation, primal(rotation.call.frequencies())));
  }
  if (MaybeTensor direction = tangent_of(rotation.call.frequencies()); direction.has_value()) {
    result = dispatcher::accumulate(
        result, rotary_tangent(out, with_frequencies(rotation, std::move(direction))));
  }
  return result;
}

bool has_tangent(const Tensor& in, const Rotation& rotation) {
  return dispatcher::tangent(in).defined() || tangent_of(rotation.call.frequencies()).has_value();
}

Tensor one_autograd(const Tensor& query, const Rotation& rotation) {
  auto node = backward_node(rotation, query);
  Tensor output = dispatcher::below_autograd([&] { return rotary(query, rotation); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, rotated_tangent(query, output, rotation));
  return output;
}

std::tuple<Tensor, Tensor> pair_autograd(const Tensor& query, const Tensor& key,
                                         const Rotation& rotation) {
  auto node = backward_node(rotation, query, key);
  std::tuple<Tensor, Tensor> outputs =
      dispatcher::below_autograd([&] { return rotary_pair(query, key, rotation); });
  auto& [query_out, key_out] = outputs;
  if (node) torch::autograd::set_history(query_out, node);
  if (node) torch::autograd::set_history(key_out, node);
  dispatcher::set_tangent(query_out, rotated_tangent(query, query_out, rotation));
  if (has_tangent(key, rotation)) {
    const std::string spec = text_of_key(rotation);
    dispatcher::set_tangent(key_out, rotated_tangent(key, key_out, with_text(rotation, spec)));
  }
  return outputs;
}

Tensor tangent_autograd(const Tensor& rotated, const Rotation& rotation) {
  using Node = dispatcher::FunctionNode<rotary_tangent, tangent_gradient>;
  auto node = dispatcher::node_for<Node>(rotated, rotation.call.frequencies());
  if (node) node->save(rotation, rotated);
  const Tensor direction = rotation.call.frequencies().value_or(Tensor());
  return dispatcher::bilinear(
      node, rotated, direction, [&](const Tensor& in, const Tensor& tangent) {
        const MaybeTensor frequencies = tangent.defined() ? MaybeTensor(tangent) : std::nullopt;
        return rotary_tangent(in, with_frequencies(rotation, frequencies));
      });
}

Tensor frequencies_backward_autograd(const Tensor& gradient, const Tensor& query,
                                     const Rotation& rotation) {
  using Node = dispatcher::FunctionNode<rotary_frequencies_backward, frequencies_gradient>;
  auto node = dispatcher::node_for<Node>(gradient, query);
  if (node) node->save(rotation, gradient, query);
  // Only the dtype of the frequencies matters.
  const Rotation plain = with_frequencies(rotation, primal(rotation.call.frequencies()));
  return dispatcher::bilinear(node, gradient, query,
                              [&](const Tensor& gradients, const Tensor& rows) {
                                return rotary_frequencies_backward(gradients, rows, plain);
                              });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  const std::string rotation =
      "str spec, "
      "Tensor? positions=None, "
      "str layout=\"bshd\", "
      "SymInt offset=0, "
      "bool inverse=False, "
      "Tensor? cu_seqlens=None, "
      "Tensor? frequencies=None, "
      "bool transpose=False";
  define(m, "rotary(Tensor query, " + rotation + ") -> Tensor");
  define(m, "rotary_pair(Tensor query, Tensor key, " + rotation + ") -> (Tensor, Tensor)");
  define(m, "rotary_(Tensor(a!) query, " + rotation + ") -> ()");
  define(m, "rotary_pair_(Tensor(a!) query, Tensor(b!) key, " + rotation + ") -> ()");
  define(m, "rotary_out(Tensor(a!) out, Tensor query, " + rotation + ") -> ()");
  define(m, "rotary_pair_out(Tensor(a!) query_out, Tensor(b!) key_out, Tensor query, Tensor key, " +
                rotation + ") -> ()");
  const std::string packed = "int heads, int key_heads, str order, " + rotation;
  define(m, "rotary_packed(Tensor qkv, " + packed + ") -> (Tensor, Tensor, Tensor)");
  define(m, "rotary_packed_pair(Tensor qkv, " + packed + ") -> (Tensor, Tensor)");
  define(m, "rotary_packed_(Tensor(a!) qkv, " + packed + ") -> ()");
  define(m, "rotary_packed_backward(Tensor query, Tensor key, Tensor value, " + packed +
                ") -> Tensor");
  define(m, "rotary_tangent(Tensor rotated, " + rotation + ") -> Tensor");
  define(m,
         "rotary_frequencies_backward(Tensor gradient, Tensor query, " + rotation + ") -> Tensor");
  define(m,
         "rotary_rerotate_("
         "Tensor(a!) key, "
         "Tensor old_positions, "
         "Tensor new_positions, "
         "str spec, "
         "str? new_spec=None, "
         "str layout=\"bshd\", "
         "Tensor? frequencies=None) -> ()");
  define(m,
         "rotary_permute_weight("
         "Tensor weight, "
         "int num_heads, "
         "bool interleaved, "
         "int? rotary_dim=None, "
         "int rotary_start=0, "
         "int[]? heads=None) -> Tensor");
  define(m, "rotary_frequencies(str spec, Device? device=None) -> Tensor");
  define(m, "rotary_wavelengths(str spec, Device? device=None) -> Tensor");
  define(m, "rotary_attention_factor(str spec) -> float");
  define(m, "rotary_specification(str spec) -> str");
  define(m, "rotary_resolve(str spec, int seq_len) -> str");
  define(m, "rotary_for_keys(str spec) -> str");
  define(m, "rotary_description(str spec) -> str");
  define(m, "rotary_explanation(str spec, int? seq_len=None, int? max_positions=None) -> str");
  define(m, "rotary_float32_error(str spec, int length) -> (float, int)");
  define(m, "rotary_difference(str spec, str other) -> str");
  define(m, "rotary_axial(str[] axes, bool within_axes=True) -> str");
  define(m,
         "rotary_preset("
         "str name, "
         "int? head_dim=None, "
         "int[]? axes=None, "
         "float? base=None, "
         "float[]? ntk=None) -> str");
  define(m,
         "score_scale("
         "Tensor positions, "
         "float factor, "
         "float growth, "
         "float length, "
         "int offset, "
         "bool logn) -> Tensor");
  define(m, "rotary_sections(int[] sizes, bool interleaved) -> int[]");
  Forms<Rules>::implement<rotary, rotary_pair, rotary_, rotary_pair_, rotary_out, rotary_pair_out>(
      m);
  rotary_rerotate_.compose<rerotate>(m);
  rotary_tangent.implement<prepare_tangent, fill_tangent>(m);
  rotary_frequencies_backward.implement<prepare_gradient, sum_gradient>(m);
  rotary.differentiate<one_autograd>(m);
  rotary_pair.differentiate<pair_autograd>(m);
  rotary_tangent.differentiate<tangent_autograd>(m);
  rotary_frequencies_backward.differentiate<frequencies_backward_autograd>(m);
}

}  // namespace posembed::rotary
