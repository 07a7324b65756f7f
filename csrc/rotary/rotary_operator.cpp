// The rotary operators: query, or query and key, rotated by position; functional, in place, and
// into given memory. Eager and Meta kernels share their checks.
#include "rotary/rotary_operator.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"

namespace posembed::rotary {

void rotate(const Job& job, const Rotation& rotation, const Specification& spec) {
  const Inputs inputs = checked_inputs(rotation.call, *job.in[0]);
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

// -------------------------------------------------------------------------------------- rerotation
// Moves rotated keys to other positions, or to another specification. Composite, so that autograd,
// compilers and backends see the operators inside.

/// Also accepts float8, for caches: as rotations are linear, the scale of a cache stays the same.
void check_key_type(const Tensor& key) {
  if (key.scalar_type() == at::kFloat8_e4m3fn) return;
  TORCH_CHECK_TYPE(at::isFloatingType(key.scalar_type()) && key.element_size() > 1,
                   "key: expected float32, float64, bfloat16, float16 or float8_e4m3fn, got ",
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
  const Inputs inputs = checked_inputs(rotation.call, in);
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
  const Inputs inputs = checked_inputs(rotation.call, in);
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

// ------------------------------------------------------------------------------- packed
// projections Query and key of a packed projection: rotated straight out of its memory and, in the
// backward pass, straight into its one gradient, which torch would join from three.

namespace {

/// The rotation of heads by token.
Rotation by_token(Rotation rotation) {
  if (rotation.call.layout() == Layout::bhsd) rotation.call.layout(Layout::bshd);
  return rotation;
}

}  // namespace

Three parts_of(const Tensor& qkv, const PackedHeads& packing) {
  const int64_t groups = packing.groups(), keys = packing.key_heads / groups;
  const int64_t queries = packing.heads / groups;
  const Tensor heads = qkv.unflatten(-1, {groups, queries + 2 * keys, -1});
  return {heads.narrow(-2, 0, queries), heads.narrow(-2, queries, keys),
          heads.narrow(-2, queries + keys, keys)};
}

Tensor exchanged(const Tensor& heads, Layout layout) {
  return layout == Layout::bhsd ? heads.transpose(1, 2) : heads;
}

Tensor by_group(const Tensor& heads, const PackedHeads& packing, Layout layout) {
  return exchanged(heads, layout).unflatten(-2, {packing.groups(), -1});
}

void check_packed(const Tensor& qkv, const PackedRotation& call) {
  const Rotation rotation = by_token(call.rotation);
  const Dimensions where = dimensions(rotation.call.layout());
  const char* const shapes[] = {"[tokens, width]", "[batch, seq, width]", "[seq, batch, width]"};
  dispatcher::check_rank(qkv, "qkv", where.rank - 1, shapes[where.batch + 1]);
  TORCH_CHECK_VALUE(call.heads > 0, "heads: expected a positive number, got ", call.heads);
  TORCH_CHECK_VALUE(call.key_heads > 0 && call.heads % call.key_heads == 0,
                    "key_heads: expected a divisor of heads ", call.heads, ", got ",
                    call.key_heads);
  const int64_t head_dim = specification(rotation.spec)->spec.head_dim;
  dispatcher::check_size(qkv.sym_size(-1), (call.heads + 2 * call.key_heads) * head_dim, "qkv",
                         "(heads + 2 * key_heads) * head_dim");
  const auto of_size = [&](int64_t heads) {  // wherever they stand
    return qkv.narrow(-1, 0, heads * head_dim).unflatten(-1, {heads, head_dim});
  };
  const Tensor key = of_size(call.key_heads);
  check(of_size(call.heads), &key, rotation, {"qkv", "qkv"});
}

namespace {

/// A part in the call's layout. A view, but for queries of which a group has several.
Tensor laid_out(const Tensor& part, const PackedRotation& call) {
  return exchanged(part.flatten(-3, -2), call.rotation.call.layout());
}

/// The inverse of laid_out().
Tensor by_group(const Tensor& heads, const PackedRotation& call) {
  return by_group(heads, call, call.rotation.call.layout());
}

// --------------------------------------------------------------------------------- the kernel

/// Rotates query and key in groups, in one launch. Where a group has several query heads, no stride
/// leads from head to head: groups then stand for the batch, and samples are rotated one by one.
void rotate_parts(const Two& in, const Two& out, const PackedRotation& call) {
  const SpecificationPointer spec = specification(call.rotation.spec);
  Rotation rotation = by_token(call.rotation);
  const Dimensions where = dimensions(rotation.call.layout());
  const MaybeTensor positions = rotation.call.positions();
  const bool at_once = call.heads == call.key_heads || call.groups() == 1;
  const int64_t samples = at_once || where.batch < 0 ? 1 : std::get<0>(in).size(where.batch);
  if (!at_once) rotation.call.layout(Layout::bshd);
  for (int64_t sample = 0; sample < samples; ++sample) {
    const auto heads = [&](const Tensor& part) {
      if (at_once) return part.flatten(-3, -2);
      return (where.batch < 0 ? part : part.select(where.batch, sample)).transpose(0, 1);
    };
    if (!at_once && positions.has_value() && positions->dim() > 1) {
      rotation.call.positions(where.batch < 0           ? positions->unsqueeze(1)
                              : positions->size(-2) > 1 ? positions->narrow(-2, sample, 1)
                                                        : *positions);
    }
    const Tensor from[] = {heads(std::get<0>(in)), heads(std::get<1>(in))};
    const Tensor to[] = {heads(std::get<0>(out)), heads(std::get<1>(out))};
    rotate({{&from[0], &from[1]}, {&to[0], &to[1]}, 2}, rotation, *spec);
  }
}

Two prepare_packed_pair(const Tensor& qkv, const PackedRotation& call) {
  check_packed(qkv, call);
  const int64_t head_dim = specification(call.rotation.spec)->spec.head_dim;
  const auto empty = [&](int64_t heads) {
    c10::SymDimVector sizes(qkv.sym_sizes().begin(), qkv.sym_sizes().end() - 1);
    sizes.insert(sizes.end(), {heads, head_dim});
    return exchanged(dispatcher::empty_symint(sizes, qkv.options()), call.rotation.call.layout());
  };
  return {empty(call.heads), empty(call.key_heads)};
}

void rotate_packed_pair(const Tensor& qkv, const PackedRotation& call, const Two& results) {
  const auto [query, key, value] = parts_of(dispatcher::with_contiguous_last_dim(qkv), call);
  const auto& [query_out, key_out] = results;
  rotate_parts({query, key}, {by_group(query_out, call), by_group(key_out, call)}, call);
}

void check_packed_in_place(const Tensor& qkv, const PackedRotation& call) {
  check_packed(qkv, call);
  dispatcher::check_writable(qkv, "qkv");
}

void rotate_packed_in_place(const Tensor& qkv, const PackedRotation& call) {
  const auto [query, key, value] = parts_of(qkv, call);
  rotate_parts({query, key}, {query, key}, call);
}

Tensor prepare_packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                               const PackedRotation& call) {
  const Dimensions where = dimensions(call.rotation.call.layout());
  check(query, &key, call.rotation);
  dispatcher::check_size(query.sym_size(where.heads), call.heads, "query", "heads");
  dispatcher::check_size(key.sym_size(where.heads), call.key_heads, "key", "heads");
  dispatcher::check_like(value, "value", key, "key");
  c10::SymDimVector sizes(query.sym_sizes().begin(), query.sym_sizes().end());
  sizes.back() = (call.heads + 2 * call.key_heads) * sizes.back();
  sizes.erase(sizes.begin() + where.heads);
  Tensor packed = dispatcher::empty_symint(sizes, query.options());
  check_packed(packed, call);
  return packed;
}

void packed_backward(const Tensor& query, const Tensor& key, const Tensor& value,
                     const PackedRotation& call, const Tensor& packed) {
  const auto [query_out, key_out, value_out] = parts_of(packed, call);
  const auto readable = [&](const Tensor& gradient) {
    return by_group(dispatcher::with_contiguous_last_dim(gradient), call);
  };
  rotate_parts({readable(query), readable(key)}, {query_out, key_out}, call);
  value_out.copy_(by_group(value, call));
}

// -------------------------------------------------------------------------------- derivatives

using dispatcher::FunctionNode;

PackedRotation transposed(PackedRotation call) {
  call.rotation.transpose = !call.rotation.transpose;
  return call;
}

/// rotary_packed_backward with zeros for gradients that are undefined; undefined if all are.
Tensor joined(variable_list gradients, const PackedRotation& call) {
  const auto given = std::find_if(gradients.begin(), gradients.end(),
                                  [](const Tensor& gradient) { return gradient.defined(); });
  if (given == gradients.end()) return {};
  const Tensor like = *given;
  c10::SymDimVector sizes(like.sym_sizes().begin(), like.sym_sizes().end());
  for (size_t i = 0; i < 3; ++i) {
    const auto heads = static_cast<size_t>(dimensions(call.rotation.call.layout()).heads);
    sizes[heads] = i == 0 ? call.heads : call.key_heads;
    if (!gradients[i].defined()) gradients[i] = at::zeros_symint(sizes, like.options());
  }
  return rotary_packed_backward(gradients[0], gradients[1], gradients[2], call);
}

/// Gradient of rotary_packed_pair, or of rotary_packed, which adds the value.
variable_list packed_gradient(const Gradients& gradients, const PackedRotation& call) {
  variable_list parts(3);
  for (size_t i = 0; i < gradients.size(); ++i) parts[i] = gradients[i];
  return {joined(std::move(parts), transposed(call))};
}

using PackedNode = FunctionNode<rotary_packed, packed_gradient>;

variable_list joined_gradient(const Gradients& gradients, const PackedRotation& call) {
  const auto [query, key, value] = rotary_packed(gradients[0], transposed(call));
  return {query, key, value};
}

/// Tangents and frequencies that learn take the way of separate tensors.
Two packed_pair_autograd(const Tensor& qkv, const PackedRotation& call) {
  const MaybeTensor& frequencies = call.rotation.call.frequencies();
  if (dispatcher::tangent(qkv).defined() || torch::autograd::compute_requires_grad(frequencies) ||
      (frequencies.has_value() && dispatcher::tangent(*frequencies).defined())) {
    check_packed(qkv, call);
    const auto [query, key, value] = parts_of(qkv, call);
    return rotary_pair(laid_out(query, call), laid_out(key, call), call.rotation);
  }
  auto node = dispatcher::node_for<PackedNode>(qkv);
  Two results = dispatcher::below_autograd([&] { return rotary_packed_pair(qkv, call); });
  if (node) {
    node->save(call);
    torch::autograd::set_history(std::get<0>(results), node);
    torch::autograd::set_history(std::get<1>(results), node);
  }
  return results;
}

/// The value is a view as torch makes it; where query and key have a node of their own, it is that
/// node's third result, so that its gradient arrives with theirs.
Three packed(const Tensor& qkv, const PackedRotation& call) {
  const auto [query, key] = rotary_packed_pair(qkv, call);
  const auto node = query.grad_fn();
  const bool takes_value = dynamic_cast<PackedNode*>(node.get()) != nullptr;
  std::optional<at::AutoDispatchBelowAutograd> only_tracked_as_view;
  if (takes_value) only_tracked_as_view.emplace();
  const Tensor value = laid_out(std::get<2>(parts_of(qkv, call)), call);
  if (takes_value) torch::autograd::set_history(value, node);
  return {query, key, value};
}

Tensor packed_backward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                const PackedRotation& call) {
  using Node = FunctionNode<rotary_packed_backward, joined_gradient>;
  auto node = dispatcher::node_for<Node>(query, key, value);
  Tensor packed =
      dispatcher::below_autograd([&] { return rotary_packed_backward(query, key, value, call); });
  if (node) node->save(call);
  if (node) torch::autograd::set_history(packed, node);
  using dispatcher::tangent;
  dispatcher::set_tangent(packed, joined({tangent(query), tangent(key), tangent(value)}, call));
  return packed;
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
  const std::string heads = "int heads, int key_heads, str order, " + rotation;
  define(m, "rotary_packed(Tensor qkv, " + heads + ") -> (Tensor, Tensor, Tensor)");
  define(m, "rotary_packed_pair(Tensor qkv, " + heads + ") -> (Tensor, Tensor)");
  define(m, "rotary_packed_(Tensor(a!) qkv, " + heads + ") -> ()");
  define(m,
         "rotary_packed_backward(Tensor query, Tensor key, Tensor value, " + heads + ") -> Tensor");
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
  rotary_packed.compose_batched<packed>(m);
  rotary_packed_pair.implement<prepare_packed_pair, rotate_packed_pair>(m);
  rotary_packed_pair.differentiate<packed_pair_autograd>(m);
  rotary_packed_.implement<check_packed_in_place, rotate_packed_in_place>(m);
  rotary_packed_.refuse_gradients(m);
  rotary_packed_backward.implement<prepare_packed_backward, packed_backward>(m);
  rotary_packed_backward.differentiate<packed_backward_autograd>(m);
}

}  // namespace posembed::rotary
