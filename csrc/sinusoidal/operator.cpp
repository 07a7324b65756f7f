// The sinusoidal operators: encodings added to embeddings, encodings alone, and the matrix that
// shifts them. Eager and Meta kernels share their checks.
#include "sinusoidal/operator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "dispatcher/checked.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/finite.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "sinusoidal/kernel.h"
#include "sinusoidal/specification.h"

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

Tensor frequencies(Text text, std::optional<at::Device> device) {
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
  const Position position = core::split(distance);
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
  const bool same_values =
      spec.turns == other.turns && spec.spec.scale == other.spec.scale && spec.first == other.first;
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

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  sinusoidal_add.implement<prepare_add, add>(m);
  sinusoidal_encode.implement<prepare_encode, encode>(m);
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) {
  m.impl("sinusoidal_frequencies", frequencies);
  m.impl("sinusoidal_shift_matrix", shift_matrix);
  m.impl("sinusoidal_permutation", permutation);
  m.impl("sinusoidal_specification", canonical_text);
}

}  // namespace posembed::sinusoidal
