// The sinusoidal operators: encodings added to embeddings, encodings alone, and the matrix that
// shifts them. Eager and Meta kernels share their checks.
#include "sinusoidal/sinusoidal_operator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "dispatcher/autograd.h"
#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/tensors.h"

namespace posembed::sinusoidal {
namespace {

// ------------------------------------------------------------------------------ shapes and checks

void check_positions(const Tensor& positions, const Tensor& x, const c10::SymInt& offset) {
  // positions: [seq], [batch, seq] or [1, seq]
  dispatcher::check_position_type(positions, "positions");
  const auto batch = x.dim() == 3 ? std::optional(x.sym_size(0)) : std::nullopt;
  dispatcher::check_positions_shape(positions, "positions", batch, x.sym_size(-2), offset);
}

/// positions of several axes: [axes, batch or 1, seq]
void check_positions_of_axes(const MaybeTensor& positions, const Tensor& x,
                             const c10::SymInt& offset, int64_t axes) {
  TORCH_CHECK_VALUE(positions.has_value(), "positions: expected those of ", axes,
                    " axes, got none");
  TORCH_CHECK_VALUE(positions->dim() == 3 && positions->sym_size(0) == axes,
                    "positions: expected [axes, batch or 1, seq] with ", axes, " axes, got ",
                    positions->sym_sizes());
  TORCH_CHECK_VALUE(x.dim() == 3, "x: expected [batch, seq, embedding_dim] with several axes, got ",
                    x.sym_sizes());
  check_positions(positions->select(0, 0), x, offset);
}

void check_scale(const MaybeTensor& scale) {
  // scale: one number
  if (!scale.has_value()) return;
  dispatcher::check_floating(*scale, "scale");
  TORCH_CHECK_VALUE(scale->sym_numel() == 1, "scale: expected one number, got ",
                    scale->sym_sizes());
}

SpecificationPointer check_add(const Tensor& x, const Addition& addition) {
  // x: [batch, seq, embedding_dim] or [seq, embedding_dim]
  SpecificationPointer spec = specification(addition.spec);
  dispatcher::check_floating(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3,
                    "x: expected [batch, seq, embedding_dim] or [seq, embedding_dim], got ",
                    x.sym_sizes());
  dispatcher::check_size(x.sym_size(-1), spec->spec.embedding_dim, "x", "embedding_dim");
  dispatcher::sum(addition.offset.number(), x.sym_size(-2), "offset");
  if (!spec->parts.empty()) {
    check_positions_of_axes(addition.positions, x, addition.offset.number(),
                            static_cast<int64_t>(spec->parts.size()));
  } else if (addition.positions.has_value()) {
    check_positions(*addition.positions, x, addition.offset.number());
  }
  check_scale(addition.scale);
  return spec;
}

/// The dtype of encodings: the requested one, else that of floating positions, else float32.
at::ScalarType encoded_type(const MaybeType& dtype, const Tensor& positions) {
  const at::ScalarType usual = positions.is_floating_point() ? positions.scalar_type() : at::kFloat;
  const at::ScalarType type = dtype.value_or(usual);
  dispatcher::check_floating(type, "dtype");
  return type;
}

void check_encode(const Encoding& encoding) {
  dispatcher::check_position_type(encoding.positions, "positions");
  check_scale(encoding.scale);
  constexpr int64_t max_order = 1000;  // kernels take a step for each
  TORCH_CHECK_VALUE(encoding.order >= 0 && encoding.order <= max_order, "order: expected 0 to ",
                    max_order, ", got ", encoding.order);
}

// ------------------------------------------------------------------------------------ the kernels

Sinusoid with_scale(Sinusoid sinusoid, const MaybeTensor& scale) {
  if (scale.has_value()) {
    sinusoid.learned_scale = scale->const_data_ptr();
    sinusoid.learned_type = dispatcher::scalar_of(*scale);
  }
  return sinusoid;
}

/// Groups that give threads whole sequences, as other operators do, so that rows are in the caches
/// of the thread that wrote them or reads them next. For fewer than four sequences, computing
/// encodings again costs more than that saves.
int64_t groups_for_threads(int64_t batch, int64_t bytes) {
  const int64_t threads =
      std::min<int64_t>(at::get_num_threads(), bytes / dispatcher::bytes_per_task);
  return std::max<int64_t>(1, std::min(threads, batch / 4));
}

void launch(Arguments call, const Tensor& out) {
  if (out.numel() == 0) return;
  const int64_t rows = call.batch * call.seq;
  const int64_t row_bytes = 2 * call.sinusoid.layout.columns * core::size_of(call.scalar);
  if (!dispatcher::on_cuda(out)) call.groups = groups_for_threads(call.batch, rows * row_bytes);
  const int64_t count = encodings(call);
  dispatcher::launch(call, out, count, row_bytes * (rows / count), encode_cpu,
                     POSEMBED_CUDA_LAUNCHER(encode_cuda));
}

/// Copies the strides of batch and seq; without a batch dimension, as if batch were 1.
void copy_strides(const Tensor& rows, int64_t* stride) {
  stride[0] = rows.dim() == 3 ? rows.stride(0) : 0;
  stride[1] = rows.stride(-2);
}

/// A result before it is computed.
struct Prepared {
  SpecificationPointer spec;
  Tensor result;
};

Prepared prepare_add(const Tensor& x, const Addition& addition) {
  SpecificationPointer spec = check_add(x, addition);
  return {std::move(spec), dispatcher::empty_symint(x.sym_sizes(), x.options())};
}

void add_one(const Tensor& x, const Addition& addition, const Specification& spec,
             const Tensor& out) {
  const Tensor in = dispatcher::with_contiguous_last_dim(x);
  Arguments call;
  call.sinusoid = with_scale(spec.sinusoid(), addition.scale);
  call.in = in.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.scalar = dispatcher::scalar_of(x);
  call.batch = x.dim() == 3 ? x.size(0) : 1;
  call.seq = x.size(-2);
  copy_strides(in, call.in_stride);
  copy_strides(out, call.out_stride);
  call.offset = addition.offset.number().expect_int();
  if (const MaybeTensor& positions = addition.positions; positions.has_value()) {
    dispatcher::check_finite(*positions, "positions");
    call.positions = dispatcher::position_view(*positions);
    const bool one_row = positions->dim() == 1 || positions->size(0) == 1;
    call.position_stride[0] = one_row ? 0 : positions->stride(0);
    call.position_stride[1] = positions->stride(-1);
  }
  launch(call, out);
}

/// Adds each block of columns apart: together they read and write each number once.
void add(const Tensor& x, const Addition& addition, const Prepared& prepared) {
  const Specification& spec = *prepared.spec;
  if (spec.parts.empty()) return add_one(x, addition, spec, prepared.result);
  for (const Part& part : spec.parts) {
    const int64_t width = part.spec().embedding_dim;
    Addition of_block = addition;
    of_block.positions = addition.positions->select(0, part.axis);
    add_one(x.narrow(-1, part.column, width), of_block, *part.specification,
            prepared.result.narrow(-1, part.column, width));
  }
}

Prepared prepare_encode(const Encoding& encoding, MaybeType dtype) {
  check_encode(encoding);
  const Tensor& positions = encoding.positions;
  SpecificationPointer spec = specification_of_one_axis(encoding.spec);
  c10::SymDimVector sizes(positions.sym_sizes().begin(), positions.sym_sizes().end());
  sizes.emplace_back(spec->spec.embedding_dim);
  const at::TensorOptions options = positions.options().dtype(encoded_type(dtype, positions));
  return {std::move(spec), dispatcher::empty_symint(sizes, options)};
}

void encode(const Encoding& encoding, MaybeType, const Prepared& prepared) {
  const Tensor positions = encoding.positions.contiguous();
  dispatcher::check_finite(positions, "positions");
  const Tensor& out = prepared.result;
  Arguments call;
  call.sinusoid = with_scale(prepared.spec->sinusoid(encoding.order), encoding.scale);
  call.out = out.mutable_data_ptr();
  call.scalar = dispatcher::scalar_of(out);
  call.batch = 1;
  call.seq = positions.numel();
  call.out_stride[1] = out.size(-1);
  call.positions = dispatcher::position_view(positions);
  call.position_stride[1] = 1;
  launch(call, out);
}

Tensor frequency_table(Text text, std::optional<at::Device> device) {
  const SpecificationPointer spec = specification(text);
  std::vector<core::DoubleDouble> all = spec->frequencies;
  for (const Part& part : spec->parts) {
    const auto& some = part.specification->frequencies;
    all.insert(all.end(), some.begin(), some.end());
  }
  Tensor result = at::empty({static_cast<int64_t>(all.size())}, at::kDouble);
  double* value = result.mutable_data_ptr<double>();
  for (const core::DoubleDouble& frequency : all) *value++ = frequency.high;
  return result.to(device.value_or(at::kCPU));
}

/// Writes a rotation to the rows and columns of a pair.
void fill_rotation(const Layout& layout, int64_t pair, double sine, double cosine, double* matrix) {
  const int64_t first = first_column(layout, pair), second = second_column(layout, pair);
  const int64_t dim = layout.columns;
  TORCH_CHECK_VALUE(
      second < layout.filled,
      "shift_matrix: expected an even embedding_dim, because a sine without its cosine "
      "cannot be shifted, got ",
      dim);
  // sin(a + b) = sin a cos b + cos a sin b; if cosines come first, the sign changes sides.
  const double sign = layout.cos_first ? -1.0 : 1.0;
  matrix[first * dim + first] = matrix[second * dim + second] = cosine;
  matrix[first * dim + second] = sign * sine;
  matrix[second * dim + first] = -sign * sine;
}

Tensor shift_matrix(double distance, Text text) {
  const SpecificationPointer pointer = specification_of_one_axis(text);
  const Specification& spec = *pointer;
  const int64_t dim = spec.layout.columns;
  Tensor matrix = at::zeros({dim, dim}, at::kDouble);
  const Position position = core::split(distance * static_cast<double>(spec.spec.position_scale));
  TORCH_CHECK_VALUE(position.scale == 1.0, "distance: expected a finite number below 2^63, got ",
                    distance);
  for (size_t pair = 0; pair < spec.wide_turns.size(); ++pair) {
    double sine, cosine;
    sincos_at(position, spec.wide_turns[pair], 0, 1.0, &sine, &cosine);
    fill_rotation(spec.layout, static_cast<int64_t>(pair), sine, cosine,
                  matrix.mutable_data_ptr<double>());
  }
  return matrix;
}

/// The content of a column of an encoding.
struct Content {
  int64_t pair = -1;  // -1: the column is zero
  bool cosine = false;

  bool operator==(const Content& other) const {
    return pair == other.pair && cosine == other.cosine;
  }
};

std::vector<Content> contents(const Specification& spec) {
  const Layout& layout = spec.layout;
  std::vector<Content> result(static_cast<size_t>(layout.columns));
  for (int64_t pair = 0; pair < static_cast<int64_t>(spec.turns.size()); ++pair) {
    const int64_t first = first_column(layout, pair), second = second_column(layout, pair);
    if (first < layout.filled) result[static_cast<size_t>(first)] = {pair, layout.cos_first};
    if (second < layout.filled) result[static_cast<size_t>(second)] = {pair, !layout.cos_first};
  }
  return result;
}

std::string canonical_text(Text text) { return specification(text)->spec.to_json(); }

/// The column of `spec` that equals each column of `other`.
Tensor permutation(Text text, Text other_text) {
  const SpecificationPointer pointer = specification_of_one_axis(text),
                             other_pointer = specification_of_one_axis(other_text);
  const Specification &spec = *pointer, &other = *other_pointer;
  const bool same_values = spec.turns == other.turns && spec.spec.scale == other.spec.scale &&
                           spec.spec.position_scale == other.spec.position_scale &&
                           spec.first == other.first;
  const std::vector<Content> from = contents(spec), to = contents(other);
  TORCH_CHECK_VALUE(
      same_values && std::is_permutation(from.begin(), from.end(), to.begin(), to.end()),
      "other: expected the frequencies, the scale and the padding of ", text,
      " in another order of columns, got ", other_text);
  Tensor result = at::empty({spec.layout.columns}, at::kLong);
  int64_t* column = result.mutable_data_ptr<int64_t>();
  for (const Content& content : to) {
    *column++ = std::find(from.begin(), from.end(), content) - from.begin();
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("sinusoidal_frequencies", frequency_table);
  m.impl("sinusoidal_shift_matrix", shift_matrix);
  m.impl("sinusoidal_permutation", permutation);
  m.impl("sinusoidal_specification", canonical_text);
}

namespace {

// -------------------------------------------------------------------------------------------- grid
// The positions of a grid's cells: indices along each axis, which programs shift, scale, or divide
// by the size of the picture. Carion et al., "End-to-End Object Detection with Transformers"
// (DETR), arXiv:2005.12872; Esser et al. (Stable Diffusion 3), arXiv:2403.03206.

void check_grid(c10::SymIntArrayRef grid, const Specification& spec, const MaybeTensor& mask) {
  TORCH_CHECK_VALUE(!spec.parts.empty() && grid.size() == spec.parts.size(),
                    "grid: expected a size for each of ", spec.parts.size(), " axes, got ", grid);
  for (const c10::SymInt& size : grid) {
    TORCH_CHECK_VALUE(size >= 1, "grid: expected sizes of at least 1, got ", grid);
    TORCH_CHECK_VALUE(spec.grid.max_size == 0 || size <= spec.grid.max_size,
                      "grid: expected at most max_size, ", spec.grid.max_size, ", got ", grid);
  }
  c10::SymDimVector sizes(grid.begin(), grid.end());
  sizes.emplace_back(static_cast<int64_t>(grid.size()));
  dispatcher::check_result(sizes, at::kDouble, "grid");
  if (!mask.has_value()) return;
  TORCH_CHECK_VALUE(grid.size() == 2 && spec.grid.max_size == 0,
                    "mask: expected none beside three axes or max_size");
  TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool, "mask: expected bool, got ",
                   mask->scalar_type());
  TORCH_CHECK_VALUE(
      mask->dim() == 3 && mask->sym_size(1) == grid[0] && mask->sym_size(2) == grid[1],
      "mask: expected [batch, rows, columns] of the grid ", grid, ", got ", mask->sym_sizes());
}

/// Shifts and scales indices of an axis along `dim`, whose last is the largest.
Tensor scaled(const Tensor& indices, int64_t dim, const GridRule& rule, size_t axis) {
  Tensor result = indices + rule.start;
  if (rule.length > 0) {
    // A picture of padding alone has no cells.
    const Tensor cells = rule.max_size > 0 ? indices.new_full({1}, rule.max_size)
                                           : (indices.slice(dim, -1) + 1).clamp_min(1);
    result = result * rule.length / (cells + rule.epsilon);
  }
  return result / rule.interpolation_scale[axis];
}

/// The positions along an axis: [1, ...sizes].
Tensor along(const Tensor& like, c10::SymIntArrayRef grid, const GridRule& rule, size_t axis) {
  const at::TensorOptions options = at::TensorOptions(like.device()).dtype(at::kDouble);
  Tensor indices = at::arange(grid[axis], options);
  if (rule.max_size > 0) indices = indices + (rule.max_size - grid[axis]) / 2;
  const Tensor positions = scaled(indices, 0, rule, axis);
  c10::SymDimVector shape(grid.size() + 1, c10::SymInt(1)), sizes(grid.begin(), grid.end());
  shape[axis + 1] = grid[axis];
  sizes.insert(sizes.begin(), 1);
  return positions.view_symint(shape).expand_symint(sizes);
}

Tensor grid_positions(const Tensor& like, Text text, c10::SymIntArrayRef grid,
                      const MaybeTensor& mask) {
  const SpecificationPointer spec = specification(text);
  check_grid(grid, *spec, mask);
  std::vector<Tensor> axes;
  for (size_t axis = 0; axis < grid.size(); ++axis) {
    if (mask.has_value()) {
      const int64_t dim = static_cast<int64_t>(axis) + 1;
      const Tensor counted = at::cumsum(mask->to(at::kDouble), dim) - 1;
      axes.push_back(scaled(counted, dim, spec->grid, axis).flatten(1));
    } else {
      axes.push_back(along(like, grid, spec->grid, axis).flatten(1));
    }
  }
  return at::stack(axes);
}

/// The axis and the specification of each block of columns.
std::tuple<std::vector<int64_t>, std::vector<std::string>> blocks(Text text) {
  const SpecificationPointer spec = specification(text);
  if (spec->parts.empty()) return {{0}, {spec->spec.to_json()}};
  std::tuple<std::vector<int64_t>, std::vector<std::string>> result;
  for (const Part& part : spec->parts) {
    std::get<0>(result).push_back(part.axis);
    std::get<1>(result).push_back(part.text());
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) { m.impl("sinusoidal_blocks", blocks); }

namespace {

// ---------------------------------------------------------------------------------------- gradient
// Derivatives of the sinusoidal operators. The gradient of x is the output's gradient. The
// derivative with respect to a position is again a sinusoid, a quarter turn ahead and times the
// frequency: sinusoidal_encode of the next order. A learned scale multiplies it.

using dispatcher::Gradients;
using dispatcher::variable_list;

Tensor derivative(Encoding encoding, at::ScalarType dtype) {
  ++encoding.order;
  return sinusoidal_encode(encoding, dtype);
}

/// Encodings with scale 1.
Tensor unscaled(Encoding encoding, at::ScalarType dtype) {
  encoding.scale.reset();
  return sinusoidal_encode(encoding, dtype);
}

/// The same encodings without tangents; with tangents, each derivative would need the next one.
Encoding primal(Encoding encoding) {
  encoding.positions = dispatcher::primal(encoding.positions);
  if (encoding.scale.has_value()) encoding.scale = dispatcher::primal(*encoding.scale);
  return encoding;
}

/// Sum over columns of gradient * d encoding / d position, in float32 for 16-bit data.
Tensor position_gradient(const Tensor& gradient, const Encoding& encoded) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  const Tensor result = at::sum(gradient.to(type).mul(derivative(encoded, type)), -1);
  // Positions [seq] or [1, seq] serve every row of a batch.
  return result.sum_to_size_symint(encoded.positions.sym_sizes())
      .to(encoded.positions.scalar_type());
}

/// Sum of gradient * encoding, in float32 for 16-bit data.
Tensor scale_gradient(const Tensor& gradient, const Encoding& encoded) {
  const at::ScalarType type = dispatcher::compute_type(gradient);
  const Tensor rows = at::sum(gradient.to(type).mul(unscaled(encoded, type)), -1);
  return at::sum(rows).reshape_symint(encoded.scale->sym_sizes());
}

/// The tangent of encodings, from the tangents of positions and scale; undefined if neither has
/// one.
Tensor encoding_tangent(const Encoding& encoded, at::ScalarType dtype) {
  const at::ScalarType type = at::promote_types(dtype, at::kFloat);  // rounded once
  const Encoding plain = primal(encoded);
  Tensor result;
  if (const Tensor position_tangent = dispatcher::tangent(encoded.positions);
      position_tangent.defined()) {
    result = derivative(plain, type).mul(position_tangent.unsqueeze(-1).to(type));
  }
  const Tensor scale_tangent =
      encoded.scale.has_value() ? dispatcher::tangent(*encoded.scale) : Tensor();
  if (scale_tangent.defined()) {
    result = dispatcher::accumulate(result,
                                    unscaled(plain, type).mul(scale_tangent.reshape({}).to(type)));
  }
  return result.defined() ? result.to(dtype) : result;
}

/// The default positions: offset, offset + 1, …
Tensor counted(const Tensor& x, const c10::SymInt& offset) {
  const auto options = at::TensorOptions(x.device()).dtype(at::kLong);
  return at::arange(offset, offset + x.sym_size(-2), options);
}

/// The encodings that sinusoidal_add added to `x` [..., seq, embedding_dim].
Encoding encoding_of(const Addition& addition, const Tensor& x) {
  const bool counts = !addition.positions.has_value();
  return {counts ? counted(x, addition.offset.number()) : *addition.positions, addition.spec,
          addition.scale};
}

/// A block of the columns that sinusoidal_add encodes: all of them with one axis.
struct Block {
  Addition addition;  // of the block
  std::string text;   // its specification
  Tensor x;
  size_t axis = 0;
  int64_t column = 0;
  std::optional<int64_t> width;

  Encoding encoding() const {
    Encoding result = encoding_of(addition, x);
    result.spec = text;
    return result;
  }

  Tensor columns(const Tensor& rows) const {
    return width.has_value() ? rows.narrow(-1, column, *width) : rows;
  }
};

/// x: [..., seq, embedding_dim]
std::vector<Block> blocks_of(const Addition& addition, const Tensor& x, const Specification& spec) {
  if (spec.parts.empty()) return {{addition, std::string(addition.spec), x, 0, 0, std::nullopt}};
  std::vector<Block> blocks;
  for (const Part& part : spec.parts) {
    Addition of_block = addition;
    of_block.positions = addition.positions->select(0, part.axis);
    blocks.push_back({of_block, part.text(), x, static_cast<size_t>(part.axis), part.column,
                      part.spec().embedding_dim});
  }
  return blocks;
}

/// The tangent of what sinusoidal_add adds to x.
Tensor addition_tangent(const Addition& addition, const Tensor& x) {
  const SpecificationPointer spec = specification(addition.spec);
  std::vector<Tensor> tangents;
  for (const Block& block : blocks_of(addition, x, *spec)) {
    const Tensor columns = block.columns(x);
    tangents.push_back(
        encoding_tangent(block.encoding(), x.scalar_type()).expand_symint(columns.sym_sizes()));
  }
  return tangents.size() == 1 ? tangents[0] : at::cat(tangents, -1);
}

/// `addition` is empty if only x needs a gradient.
variable_list add_gradient(const Gradients& gradients, const Addition& addition) {
  const bool positions = gradients.needs(1), factor = gradients.needs(2);
  variable_list result{gradients[0], Tensor(), Tensor()};
  if (!positions && !factor) return result;
  const SpecificationPointer spec = specification(addition.spec);
  std::vector<Tensor> of_axis(std::max<size_t>(1, spec->parts.size()));
  for (const Block& block : blocks_of(addition, gradients[0], *spec)) {
    const Tensor columns = block.columns(gradients[0]);
    if (positions) of_axis[block.axis] = position_gradient(columns, block.encoding());
    if (factor) {
      result[2] = dispatcher::accumulate(result[2], scale_gradient(columns, block.encoding()));
    }
  }
  if (positions) result[1] = spec->parts.empty() ? of_axis[0] : at::stack(of_axis);
  if (factor) result[2] = result[2].to(addition.scale->scalar_type());
  return result;
}

variable_list encode_gradient(const Gradients& gradients, const Encoding& encoded) {
  variable_list result(2);
  if (gradients.needs(0)) result[0] = position_gradient(gradients[0], encoded);
  if (gradients.needs(1)) {
    result[1] = scale_gradient(gradients[0], encoded).to(encoded.scale->scalar_type());
  }
  return result;
}

bool requires_grad(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

Tensor add_autograd(const Tensor& x, const Addition& addition) {
  const Tensor positions = addition.positions.value_or(Tensor()),
               factor = addition.scale.value_or(Tensor());
  using Node = dispatcher::FunctionNode<sinusoidal_add, add_gradient>;
  auto node = dispatcher::node_for<Node>(x, positions, factor);
  if (node && (requires_grad(addition.positions) || requires_grad(addition.scale))) {
    node->save(addition);
  }
  Tensor output = dispatcher::below_autograd([&] { return sinusoidal_add(x, addition); });
  if (node) torch::autograd::set_history(output, node);
  if (dispatcher::tangent(positions).defined() || dispatcher::tangent(factor).defined()) {
    dispatcher::set_tangent(
        output, dispatcher::accumulate(dispatcher::tangent(x), addition_tangent(addition, x)));
  } else {
    dispatcher::set_tangent(output, dispatcher::copied_tangent(x));
  }
  return output;
}

Tensor encode_autograd(const Encoding& encoding, MaybeType dtype) {
  using Node = dispatcher::FunctionNode<sinusoidal_encode, encode_gradient>;
  auto node = dispatcher::node_for<Node>(encoding.positions, encoding.scale.value_or(Tensor()));
  if (node) node->save(encoding);
  Tensor output = dispatcher::below_autograd([&] { return sinusoidal_encode(encoding, dtype); });
  if (node) torch::autograd::set_history(output, node);
  dispatcher::set_tangent(output, encoding_tangent(encoding, output.scalar_type()));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "sinusoidal_add("
         "Tensor x, "
         "str spec, "
         "Tensor? positions=None, "
         "SymInt offset=0, "
         "Tensor? scale=None) -> Tensor");
  define(m,
         "sinusoidal_encode("
         "Tensor positions, "
         "str spec, "
         "Tensor? scale=None, "
         "int order=0, "
         "ScalarType? dtype=None) -> Tensor");
  define(m,
         "sinusoidal_grid_positions("
         "Tensor like, "
         "str spec, "
         "SymInt[] grid, "
         "Tensor? mask=None) -> Tensor");
  define(m, "sinusoidal_blocks(str spec) -> (int[], str[])");
  define(m, "sinusoidal_frequencies(str spec, Device? device=None) -> Tensor");
  define(m, "sinusoidal_shift_matrix(float distance, str spec) -> Tensor");
  define(m, "sinusoidal_permutation(str spec, str other) -> Tensor");
  define(m, "sinusoidal_specification(str spec) -> str");
  sinusoidal_add.implement<prepare_add, add>(m);
  sinusoidal_encode.implement<prepare_encode, encode>(m);
  sinusoidal_grid_positions.compose_batched<grid_positions>(m);
  sinusoidal_add.differentiate<add_autograd>(m);
  sinusoidal_encode.differentiate<encode_autograd>(m);
}

}  // namespace posembed::sinusoidal
