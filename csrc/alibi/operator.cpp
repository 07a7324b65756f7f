// The ALiBi operators: slopes, the bias they make, the bias added to scores, and the gradient of
// slopes. Shapes are checked in one place for eager and Meta kernels; the arithmetic is the
// kernel's.
#include "alibi/operator.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "alibi/kernel.h"
#include "alibi/slopes.h"
#include "dispatcher/checks.h"
#include "dispatcher/cuda_scope.h"
#include "dispatcher/parallel.h"

namespace posembed::alibi {
namespace {

using MaybeInt = std::optional<int64_t>;

// ------------------------------------------------------------------------------ shapes and checks

void check_slopes(const Tensor& slopes) {
  // slopes: [heads] or [2, heads]
  dispatcher::check_floating(slopes, "slopes");
  TORCH_CHECK_VALUE(slopes.dim() == 1 || (slopes.dim() == 2 && slopes.sym_size(0) == 2),
                    "slopes: expected [heads] or [2, heads], got ", slopes.sym_sizes());
}

void check_lengths(const c10::SymInt& queries, const c10::SymInt& keys) {
  TORCH_CHECK_VALUE(queries >= 0, "query_length: expected 0 or more, got ", queries);
  TORCH_CHECK_VALUE(keys >= 0, "key_length: expected 0 or more, got ", keys);
}

at::ScalarType type_or(const MaybeType& dtype, const Tensor& tensor) {
  const at::ScalarType type = dtype.value_or(tensor.scalar_type());
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
      "dtype: expected float32, float64, bfloat16 or float16, got ", type);
  return type;
}

/// scores or a gradient of them: [heads, queries, keys] or [batch, heads, queries, keys]
void check_scores(const Tensor& scores, const char* argument) {
  dispatcher::check_floating(scores, argument);
  TORCH_CHECK_VALUE(scores.dim() == 3 || scores.dim() == 4, argument,
                    ": expected [batch, heads, query_length, key_length] or [heads, query_length, "
                    "key_length], got ",
                    scores.sym_sizes());
}

void check_add(const Tensor& scores, const Tensor& slopes) {
  check_scores(scores, "scores");
  check_slopes(slopes);
  dispatcher::check_same_device(slopes, "slopes", scores, "scores");
  dispatcher::check_size(slopes.sym_size(-1), scores.sym_size(-3), "slopes", "heads");
}

std::vector<c10::SymInt> slope_sizes(const Tensor& scores, bool two_sided) {
  const c10::SymInt heads = scores.sym_size(-3);
  return two_sided ? std::vector<c10::SymInt>{2, heads} : std::vector<c10::SymInt>{heads};
}

// ------------------------------------------------------------------------------------ the kernels

Slopes slopes_view(const Tensor& slopes) {
  return {slopes.const_data_ptr(), dispatcher::scalar_of(slopes), slopes.size(-1),
          slopes.dim() == 2 ? 2 : 1};
}

/// Checked here and not in Meta kernels, because a bound on symbolic lengths would be a guard of
/// compiled graphs. No offset: the last query stands at the last key.
Distances distances_of(int64_t queries, int64_t keys, const MaybeInt& query_offset, bool causal,
                       bool hide_future) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(queries <= most, "query_length: expected up to 2147483647, got ", queries);
  TORCH_CHECK_VALUE(keys <= most, "key_length: expected up to 2147483647, got ", keys);
  const int64_t offset = query_offset.value_or(keys - queries);
  TORCH_CHECK_VALUE(offset >= -most && offset <= most,
                    "query_offset: expected -2147483647 to 2147483647, got ", offset);
  TORCH_CHECK_VALUE(
      offset + queries <= most && keys - offset <= most,
      "query_offset: expected distances between queries and keys up to 2147483647, got "
      "query_offset ",
      offset, " with query_length ", queries, " and key_length ", keys);
  return {queries, keys, offset, causal, hide_future};
}

/// Strides of batch, head and query; without a batch, there is one.
void copy_strides(const Tensor& scores, int64_t* stride) {
  stride[0] = scores.dim() == 4 ? scores.stride(0) : 0;
  stride[1] = scores.stride(-3);
  stride[2] = scores.stride(-2);
}

int64_t batch_of(const Tensor& scores) { return scores.dim() == 4 ? scores.size(0) : 1; }

/// The kernels ask for a contiguous last dimension.
Tensor with_dense_rows(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

Tensor bias(const Tensor& slopes, int64_t queries, int64_t keys, MaybeInt query_offset, bool causal,
            bool hide_future, MaybeType dtype) {
  check_slopes(slopes);
  check_lengths(queries, keys);
  const Distances distances = distances_of(queries, keys, query_offset, causal, hide_future);
  Tensor out =
      at::empty({slopes.size(-1), queries, keys}, slopes.options().dtype(type_or(dtype, slopes)));
  if (out.numel() == 0) return out;
  const Tensor dense = slopes.contiguous();
  FillArguments call;
  call.slopes = slopes_view(dense);
  call.distances = distances;
  call.out = out.mutable_data_ptr();
  call.scalar = dispatcher::scalar_of(out);
  if (out.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(out);
      dispatcher::check_launch(fill_cuda(call, scope.stream()));
    }
    return out;
  }
  dispatcher::parallel_for(out.size(0) * queries, keys * core::size_of(call.scalar),
                           [&call](int64_t begin, int64_t end) { fill_cpu(call, begin, end); });
  return out;
}

void add_to(const Tensor& scores, const Tensor& slopes, const MaybeInt& query_offset, bool causal,
            bool hide_future, const Tensor& out) {
  const Distances distances =
      distances_of(out.size(-2), out.size(-1), query_offset, causal, hide_future);
  if (out.numel() == 0) return;
  const Tensor dense = slopes.contiguous();
  AddArguments call;
  call.slopes = slopes_view(dense);
  call.distances = distances;
  call.in = scores.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.scalar = dispatcher::scalar_of(out);
  call.batch = batch_of(out);
  copy_strides(scores, call.in_stride);
  copy_strides(out, call.out_stride);
  if (out.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(out);
      dispatcher::check_launch(add_cuda(call, scope.stream()));
    }
    return;
  }
  dispatcher::parallel_for(call.batch * call.slopes.heads * call.distances.queries,
                           2 * call.distances.keys * core::size_of(call.scalar),
                           [&call](int64_t begin, int64_t end) { add_cpu(call, begin, end); });
}

Tensor add(const Tensor& scores, const Tensor& slopes, MaybeInt query_offset, bool causal,
           bool hide_future) {
  check_add(scores, slopes);
  const Tensor in = with_dense_rows(scores);
  Tensor out = at::empty(scores.sizes(), scores.options());
  add_to(in, slopes, query_offset, causal, hide_future, out);
  return out;
}

void add_in_place(const Tensor& scores, const Tensor& slopes, MaybeInt query_offset, bool causal,
                  bool hide_future) {
  check_add(scores, slopes);
  TORCH_CHECK_VALUE(scores.size(-1) <= 1 || scores.stride(-1) == 1,
                    "scores: expected a contiguous last dimension, got strides ", scores.strides());
  TORCH_CHECK_VALUE(at::has_internal_overlap(scores) != at::MemOverlap::Yes,
                    "scores: expected elements that do not share memory, got strides ",
                    scores.strides());
  add_to(scores, slopes, query_offset, causal, hide_future, scores);
}

Tensor bias_backward(const Tensor& grad, MaybeInt query_offset, bool causal, bool two_sided,
                     MaybeType dtype) {
  check_scores(grad, "grad");
  const int64_t queries = grad.size(-2), keys = grad.size(-1), heads = grad.size(-3);
  Tensor out =
      at::empty_symint(slope_sizes(grad, two_sided), grad.options().dtype(type_or(dtype, grad)));
  if (heads == 0) return out;
  const Tensor in = with_dense_rows(grad);
  ReduceArguments call;
  call.distances = distances_of(queries, keys, query_offset, causal, false);
  call.sides = two_sided ? 2 : 1;
  call.heads = heads;
  call.grad = in.const_data_ptr();
  call.scalar = dispatcher::scalar_of(in);
  call.batch = batch_of(in);
  copy_strides(in, call.stride);
  call.out = out.mutable_data_ptr();
  call.out_scalar = dispatcher::scalar_of(out);
  if (out.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(out);
      const Tensor partial =
          at::empty({call.sides, heads, queries}, grad.options().dtype(at::kDouble));
      call.partial = partial.mutable_data_ptr<double>();
      dispatcher::check_launch(reduce_cuda(call, scope.stream()));
    }
    return out;
  }
  dispatcher::parallel_for(heads, call.batch * queries * keys * core::size_of(call.scalar),
                           [&call](int64_t begin, int64_t end) { reduce_cpu(call, begin, end); });
  return out;
}

// ----------------------------------------------------------------------------------------- slopes

SlopeKind kind_of(Text kind) {
  if (kind == "press") return SlopeKind::press;
  if (kind == "geometric") return SlopeKind::geometric;
  TORCH_CHECK_VALUE(false, "kind: expected 'press' or 'geometric', got '", kind, "'");
}

/// Slopes [sides, num_heads] of the heads from head_start on, out of all that a model has.
std::vector<float> slope_values(int64_t num_heads, Text kind, double max_bias, int64_t total,
                                int64_t head_start, at::ArrayRef<double> given) {
  std::vector<float> values;
  if (given.empty()) {
    const SlopeKind series = kind_of(kind);
    for (int64_t head = head_start; head < head_start + num_heads; ++head) {
      values.push_back(slope(series, max_bias, total, head));
    }
  }
  for (size_t row = 0; row < given.size(); row += static_cast<size_t>(total)) {
    for (const double value :
         given.slice(row + static_cast<size_t>(head_start), static_cast<size_t>(num_heads))) {
      values.push_back(static_cast<float>(value));
    }
  }
  return values;
}

void write_slopes(const std::vector<float>& values, const Tensor& out) {
  if (values.empty() || out.is_meta()) return;
  if (out.is_cuda()) {
    if constexpr (core::built_with_cuda) {
      const dispatcher::CudaScope scope(out);
      dispatcher::check_launch(write_slopes_cuda(values.data(), out.numel(),
                                                 out.mutable_data_ptr<float>(), scope.stream()));
    }
    return;
  }
  std::copy(values.begin(), values.end(), out.mutable_data_ptr<float>());
}

Tensor slopes(int64_t num_heads, Text kind, double max_bias, std::optional<int64_t> total_heads,
              int64_t head_start, at::ArrayRef<double> values, std::optional<at::Device> device) {
  const int64_t total = total_heads.value_or(num_heads);
  TORCH_CHECK_VALUE(num_heads > 0, "num_heads: expected a positive number, got ", num_heads);
  TORCH_CHECK_VALUE(head_start >= 0 && total >= num_heads && head_start <= total - num_heads,
                    "head_start: expected heads within total_heads, ", total, ", got head_start ",
                    head_start, " and num_heads ", num_heads);
  TORCH_CHECK_VALUE(std::isfinite(max_bias) && max_bias > 0,
                    "max_bias: expected a positive number, got ", max_bias);
  const auto count = static_cast<int64_t>(values.size());
  TORCH_CHECK_VALUE(count == 0 || count == total || count == 2 * total,
                    "values: expected none, or one or two for each of total_heads ", total,
                    ", got ", count);
  const std::vector<float> all = slope_values(num_heads, kind, max_bias, total, head_start, values);
  const bool two_sided = count != 0 && count == 2 * total;
  Tensor out =
      at::empty(two_sided ? std::vector<int64_t>{2, num_heads} : std::vector<int64_t>{num_heads},
                at::TensorOptions(at::kFloat).device(device.value_or(at::kCPU)));
  write_slopes(all, out);
  return out;
}

// ------------------------------------------------------------------------------------------- Meta

Tensor bias_meta(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys, MaybeOffset, bool,
                 bool, MaybeType dtype) {
  check_slopes(slopes);
  check_lengths(queries, keys);
  return at::empty_symint({slopes.sym_size(-1), queries, keys},
                          slopes.options().dtype(type_or(dtype, slopes)));
}

Tensor bias_backward_meta(const Tensor& grad, MaybeOffset, bool, bool two_sided, MaybeType dtype) {
  check_scores(grad, "grad");
  return at::empty_symint(slope_sizes(grad, two_sided), grad.options().dtype(type_or(dtype, grad)));
}

Tensor add_meta(const Tensor& scores, const Tensor& slopes, MaybeOffset, bool, bool) {
  check_add(scores, slopes);
  return at::empty_symint(scores.sym_sizes(), scores.options());
}

void add_in_place_meta(const Tensor& scores, const Tensor& slopes, MaybeOffset, bool, bool) {
  check_add(scores, slopes);
}

void register_kernels(torch::Library& m) {
  m.impl("alibi_bias", bias);
  m.impl("alibi_bias_backward", bias_backward);
  m.impl("alibi_add", add);
  m.impl("alibi_add_", add_in_place);
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CPU, m) { register_kernels(m); }

#if defined(POSEMBED_WITH_CUDA)
TORCH_LIBRARY_IMPL(posembed, CUDA, m) { register_kernels(m); }
#endif

TORCH_LIBRARY_IMPL(posembed, Meta, m) {
  m.impl("alibi_bias", bias_meta);
  m.impl("alibi_bias_backward", bias_backward_meta);
  m.impl("alibi_add", add_meta);
  m.impl("alibi_add_", add_in_place_meta);
}

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) { m.impl("alibi_slopes", slopes); }

}  // namespace posembed::alibi
