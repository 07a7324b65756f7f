// The ALiBi operators on matrices: the bias, the bias added to scores, their softmax, and
// gradients. Eager and Meta kernels share their checks.
#include "alibi/alibi_operator.h"

#include <ATen/autocast_mode.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "alibi/alibi.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"

namespace posembed::alibi {
namespace {

// ------------------------------------------------------------------------------ shapes and checks

void check_slopes(const Tensor& slopes, const Call& call) {
  // slopes: [heads], [2, heads] or [batch, sides, heads]
  dispatcher::check_floating(slopes, "slopes");
  const int64_t dim = slopes.dim();
  const bool two_sided = dim > 1 && slopes.sym_size(-2) == 2;
  TORCH_CHECK_VALUE(
      dim == 1 || (dim == 2 && two_sided) || (dim == 3 && (two_sided || slopes.sym_size(1) == 1)),
      "slopes: expected [heads], [2, heads] for keys left and right of the query, or "
      "[batch, 1 or 2, heads] for each sample, got ",
      slopes.sym_sizes());
  TORCH_CHECK_VALUE(
      !two_sided || !call.causal(), "slopes: expected ", dim == 2 ? "[heads]" : "[batch, 1, heads]",
      " with causal=True, which hides keys right of the query, got ", slopes.sym_sizes(),
      dim == 2 ? "; slopes of two samples are [batch, 1, heads]" : "");
}

/// The batch of slopes, positions or mask; none if none of them has a batch dimension.
MaybeSize batch_of_bias(const Tensor& slopes, const Call& call) {
  return has_samples(slopes) ? MaybeSize(slopes.sym_size(0)) : batch_of_positions(call);
}

at::ScalarType type_or(const MaybeType& dtype, const Tensor& tensor) {
  const at::ScalarType type = dtype.value_or(tensor.scalar_type());
  dispatcher::check_floating(type, "dtype");
  return type;
}

void check_bias(const Tensor& slopes, const c10::SymInt& queries, const c10::SymInt& keys,
                const Call& call) {
  check_slopes(slopes, call);
  check_call(call, batch_of_bias(slopes, call), queries, keys);
  dispatcher::check_result({slopes.sym_size(-1), queries, keys}, slopes.scalar_type(),
                           "key_length");
}

MaybeSize batch_size(const Tensor& scores) {
  return scores.dim() == 4 ? MaybeSize(scores.sym_size(0)) : std::nullopt;
}

/// scores or a gradient of them: [heads, queries, keys] or [batch, heads, queries, keys]
void check_matrices(const Tensor& scores, const char* argument, const Call& call) {
  dispatcher::check_floating(scores, argument);
  check_matrix_shape(scores, argument);
  check_call(call, batch_size(scores), scores.sym_size(-2), scores.sym_size(-1));
}

void check_scores(const Tensor& scores, const Tensor& slopes, const Call& call) {
  check_matrices(scores, "scores", call);
  check_slopes(slopes, call);
  if (has_samples(slopes)) {
    TORCH_CHECK_VALUE(scores.dim() == 4,
                      "scores: expected [batch, heads, query_length, key_length]"
                      " with slopes of each sample, got ",
                      scores.sym_sizes());
    dispatcher::check_size(slopes.sym_size(0), scores.sym_size(0), "slopes", "batch");
  }
  dispatcher::check_size(scores.sym_size(-3), slopes.sym_size(-1), "scores", "heads");
}

void check_by_sample(const Tensor& grad, bool by_sample) {
  TORCH_CHECK_VALUE(!by_sample || grad.dim() == 4,
                    "grad: expected [batch, heads, query_length, "
                    "key_length] with by_sample, got ",
                    grad.sym_sizes());
}

void check_softmax_backward(const Tensor& grad, const Tensor& weights, int64_t sides,
                            bool by_sample, const Call& call) {
  check_matrices(grad, "grad", call);
  dispatcher::check_same_shape(weights, "weights", grad, "grad");
  dispatcher::check_same_dtype(weights, "weights", grad, "grad");
  TORCH_CHECK_VALUE(sides >= 0 && sides <= 2, "sides: expected 0, 1 or 2, got ", sides);
  check_by_sample(grad, by_sample);
}

c10::SymDimVector bias_sizes(const Tensor& slopes, const c10::SymInt& queries,
                             const c10::SymInt& keys, const Call& call) {
  c10::SymDimVector sizes;
  if (const MaybeSize batch = batch_of_bias(slopes, call)) sizes.push_back(*batch);
  for (const c10::SymInt& size : {slopes.sym_size(-1), queries, keys}) sizes.push_back(size);
  return sizes;
}

/// The shape of the gradient of slopes; `sides` is 0 if the gradient is not needed.
c10::SymDimVector slope_sizes(const Tensor& scores, int64_t sides, bool by_sample) {
  if (sides == 0) return {0};
  const c10::SymInt heads = scores.sym_size(-3);
  if (by_sample) return {scores.sym_size(0), sides, heads};
  return sides == 2 ? c10::SymDimVector{2, heads} : c10::SymDimVector{heads};
}

// ------------------------------------------------------------------------------------ the kernels

Slopes slopes_view(const Tensor& slopes) {
  const int64_t heads = slopes.size(-1), sides = sides_of(slopes);
  return {slopes.const_data_ptr(), dispatcher::scalar_of(slopes), heads, sides,
          has_samples(slopes) ? sides * heads : 0};
}

int64_t batch_of(const Tensor& scores) { return scores.dim() == 4 ? scores.size(0) : 1; }

/// The matrices of scores, with batch 1 if they have none. Kernels write to results only.
Matrices matrices_of(const Tensor& scores) {
  return {const_cast<void*>(scores.const_data_ptr()),
          {scores.dim() == 4 ? scores.stride(0) : 0, scores.stride(-3), scores.stride(-2)}};
}

/// Runs a kernel over all rows.
template <typename Arguments, typename Cpu, typename Cuda>
void run(Arguments& arguments, const Tensor& tensor, int64_t rows, int64_t bytes_per_row,
         const Cpu& cpu, const Cuda& cuda) {
  arguments.distances.error = dispatcher::device_error(tensor.device());
  dispatcher::launch(arguments, tensor, rows, bytes_per_row, cpu, cuda);
}

void fill(const Tensor& slopes, const ScorePositions& positions, const Tensor& out) {
  if (out.numel() == 0) return;
  const Tensor dense = slopes.contiguous();
  FillArguments arguments;
  arguments.slopes = slopes_view(dense);
  arguments.distances = positions.distances();
  arguments.scalar = dispatcher::scalar_of(out);
  arguments.batch = batch_of(out);
  arguments.out = matrices_of(out);
  run(arguments, out, arguments.batch * arguments.slopes.heads * out.size(-2),
      out.size(-1) * core::size_of(arguments.scalar), fill_cpu, POSEMBED_CUDA_LAUNCHER(fill_cuda));
}

Tensor empty_bias(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys, MaybeType dtype,
                  const Call& call) {
  check_bias(slopes, queries, keys, call);
  return dispatcher::empty_symint(bias_sizes(slopes, queries, keys, call),
                                  slopes.options().dtype(type_or(dtype, slopes)));
}

void fill_bias(const Tensor& slopes, c10::SymInt queries, c10::SymInt keys, MaybeType,
               const Call& call, const Tensor& out) {
  fill(slopes, ScorePositions(call, queries.expect_int(), keys.expect_int()), out);
}

void check_bias_out(const Tensor& out, const Tensor& slopes, c10::SymInt queries, c10::SymInt keys,
                    const Call& call) {
  check_bias(slopes, queries, keys, call);
  dispatcher::check_floating(out, "out");
  const c10::SymDimVector expected = bias_sizes(slopes, queries, keys, call);
  TORCH_CHECK_VALUE(out.sym_sizes() == c10::SymIntArrayRef(expected), "out: expected ",
                    c10::SymIntArrayRef(expected), ", got ", out.sym_sizes());
  dispatcher::check_writable(out, "out");
}

void fill_out(const Tensor& out, const Tensor& slopes, c10::SymInt queries, c10::SymInt keys,
              const Call& call) {
  fill(slopes, ScorePositions(call, queries.expect_int(), keys.expect_int()), out);
}

/// The arguments of the kernels add and softmax.
struct ScoreProblem {
  ScoreProblem(const Tensor& scores, const Tensor& slopes, double scale,
               const ScorePositions& positions, const Tensor& out)
      : dense(slopes.contiguous()) {
    arguments.slopes = slopes_view(dense);
    arguments.distances = positions.distances();
    arguments.scalar = dispatcher::scalar_of(out);
    arguments.batch = batch_of(out);
    arguments.scale = scale;
    arguments.in = matrices_of(scores);
    arguments.out = matrices_of(out);
  }

  int64_t rows() const {
    return arguments.batch * arguments.slopes.heads * arguments.distances.queries;
  }
  int64_t bytes_per_row() const {
    return 2 * arguments.distances.keys * core::size_of(arguments.scalar);
  }

  Tensor dense;
  ScoreArguments arguments;
};

void add_to(ScoreProblem problem, const Tensor& out) {
  run(problem.arguments, out, problem.rows(), problem.bytes_per_row(), add_cpu,
      POSEMBED_CUDA_LAUNCHER(add_cuda));
}

void softmax_to(ScoreProblem problem, const Tensor& out) {
  run(problem.arguments, out, problem.rows(), problem.bytes_per_row(), softmax_cpu,
      POSEMBED_CUDA_LAUNCHER(softmax_cuda));
}

using Write = void (*)(ScoreProblem problem, const Tensor& out);

Tensor empty_scores(const Tensor& scores, const Tensor& slopes, double, const Call& call) {
  check_scores(scores, slopes, call);
  return dispatcher::empty_symint(scores.sym_sizes(), scores.options());
}

template <Write write>
void fill_scores(const Tensor& scores, const Tensor& slopes, double scale, const Call& call,
                 const Tensor& out) {
  const ScorePositions positions(call, scores.size(-2), scores.size(-1));
  const Tensor in = dispatcher::with_contiguous_last_dim(scores);
  if (out.numel() > 0) write(ScoreProblem(in, slopes, scale, positions, out), out);
}

void check_in_place(const Tensor& scores, const Tensor& slopes, double, const Call& call) {
  check_scores(scores, slopes, call);
  dispatcher::check_writable(scores, "scores");
}

template <Write write>
void change_scores(const Tensor& scores, const Tensor& slopes, double scale, const Call& call) {
  const ScorePositions positions(call, scores.size(-2), scores.size(-1));
  if (scores.numel() == 0) return;
  write(ScoreProblem(scores, slopes, scale, positions, scores), scores);
}

Tensor empty_slope_gradient(const Tensor& grad, int64_t sides, bool by_sample,
                            const MaybeType& dtype) {
  return dispatcher::empty_symint(slope_sizes(grad, sides, by_sample),
                                  grad.options().dtype(type_or(dtype, grad)));
}

/// The gradient of slopes, which kernels first sum within rows.
class SlopeSum {
 public:
  SlopeSum(const Tensor& grad, int64_t sides, bool by_sample, const Tensor& out)
      : partial_(at::empty({sides, batch_of(grad), grad.size(-3), grad.size(-2)},
                           grad.options().dtype(at::kDouble))) {
    gradient_.sides = sides;
    gradient_.heads = grad.size(-3);
    gradient_.by_sample = by_sample;
    gradient_.partial = partial_.mutable_data_ptr<double>();
    gradient_.out = out.mutable_data_ptr();
    gradient_.scalar = dispatcher::scalar_of(out);
  }

  const SlopeGradient& gradient() const { return gradient_; }

  /// Writes the sum over rows. CUDA kernels have already computed it.
  void finish(int64_t batch, int64_t queries) const {
    if (gradient_.sides > 0 && partial_.is_cpu()) reduce_heads_cpu(gradient_, batch, queries);
  }

 private:
  Tensor partial_;
  SlopeGradient gradient_;
};

Tensor empty_bias_backward(const Tensor& grad, bool two_sided, bool by_sample, MaybeType dtype,
                           const Call& call) {
  check_matrices(grad, "grad", call);
  check_by_sample(grad, by_sample);
  return empty_slope_gradient(grad, two_sided ? 2 : 1, by_sample, dtype);
}

void bias_backward(const Tensor& grad, bool two_sided, bool by_sample, MaybeType, const Call& call,
                   const Tensor& out) {
  const ScorePositions positions(call, grad.size(-2), grad.size(-1));
  const Tensor in = dispatcher::with_contiguous_last_dim(grad);
  const SlopeSum sum(in, two_sided ? 2 : 1, by_sample, out);
  ReduceArguments arguments;
  arguments.distances = positions.distances();
  arguments.scalar = dispatcher::scalar_of(in);
  arguments.batch = batch_of(in);
  arguments.grad = matrices_of(in);
  arguments.slopes = sum.gradient();
  run(arguments, in, arguments.batch * arguments.slopes.heads * arguments.distances.queries,
      arguments.distances.keys * core::size_of(arguments.scalar), reduce_cpu,
      POSEMBED_CUDA_LAUNCHER(reduce_cuda));
  sum.finish(arguments.batch, arguments.distances.queries);
}

using Two = std::tuple<Tensor, Tensor>;

Two empty_softmax_backward(const Tensor& grad, const Tensor& weights, double, int64_t sides,
                           bool by_sample, MaybeType dtype, const Call& call) {
  check_softmax_backward(grad, weights, sides, by_sample, call);
  return {dispatcher::empty_symint(grad.sym_sizes(), grad.options()),
          empty_slope_gradient(grad, sides, by_sample, dtype)};
}

void softmax_backward(const Tensor& grad, const Tensor& weights, double scale, int64_t sides,
                      bool by_sample, MaybeType, const Call& call, const Two& results) {
  const auto& [out, slopes] = results;
  const ScorePositions positions(call, grad.size(-2), grad.size(-1));
  const Tensor of_output = dispatcher::with_contiguous_last_dim(grad),
               output = dispatcher::with_contiguous_last_dim(weights);
  const SlopeSum sum(grad, sides, by_sample, slopes);
  SoftmaxBackwardArguments arguments;
  arguments.distances = positions.distances();
  arguments.scalar = dispatcher::scalar_of(out);
  arguments.batch = batch_of(out);
  arguments.scale = scale;
  arguments.grad = matrices_of(of_output);
  arguments.weights = matrices_of(output);
  arguments.out = matrices_of(out);
  arguments.slopes = sum.gradient();
  run(arguments, out, arguments.batch * arguments.slopes.heads * arguments.distances.queries,
      3 * arguments.distances.keys * core::size_of(arguments.scalar), softmax_backward_cpu,
      POSEMBED_CUDA_LAUNCHER(softmax_backward_cuda));
  sum.finish(arguments.batch, arguments.distances.queries);
}

}  // namespace

void check_matrix_shape(const Tensor& scores, const char* argument) {
  TORCH_CHECK_VALUE(scores.dim() == 3 || scores.dim() == 4, argument,
                    ": expected [batch, heads, query_length, key_length] or [heads, query_length, "
                    "key_length], got ",
                    scores.sym_sizes());
}

namespace {

// --------------------------------------------------------------------------------- slope operators
// Operators that compute inputs of ALiBi: the slopes of heads, positions that skip padding, and the
// correction for a block of scores whose biases used local positions.

SlopeKind kind_of(Text kind) {
  return static_cast<SlopeKind>(dispatcher::index_of(kind, "kind", {"paper", "geometric"}));
}

/// Slopes [sides, num_heads] of a model's heads, starting at head_start; 0 for padding after them.
std::vector<float> slope_values(int64_t num_heads, Text kind, double max_bias, int64_t total,
                                int64_t head_start, at::ArrayRef<double> custom) {
  std::vector<float> values;
  if (custom.empty()) {
    const SlopeKind series = kind_of(kind);
    for (int64_t head = head_start; head < head_start + num_heads; ++head) {
      values.push_back(head < total ? slope(series, max_bias, total, head) : 0.0f);
    }
  }
  const int64_t own = std::min(num_heads, total - head_start);
  for (size_t row = 0; row < custom.size(); row += static_cast<size_t>(total)) {
    for (const double value :
         custom.slice(row + static_cast<size_t>(head_start), static_cast<size_t>(own))) {
      values.push_back(static_cast<float>(value));
    }
    values.insert(values.end(), static_cast<size_t>(num_heads - own), 0.0f);
  }
  return values;
}

Tensor slopes(int64_t num_heads, Text kind, double max_bias, std::optional<int64_t> total_heads,
              int64_t head_start, at::ArrayRef<double> values, double factor,
              std::optional<at::Device> device) {
  const int64_t total = total_heads.value_or(num_heads);
  TORCH_CHECK_VALUE(num_heads > 0, "num_heads: expected a positive number, got ", num_heads);
  TORCH_CHECK_VALUE(num_heads <= max_heads, "num_heads: expected at most ", max_heads, ", got ",
                    num_heads);
  TORCH_CHECK_VALUE(total <= max_heads, "total_heads: expected at most ", max_heads, ", got ",
                    total);
  // Equal shards of a number of heads that they do not divide: the last one is padded.
  const bool padded = head_start >= 0 && head_start < total && head_start % num_heads == 0;
  TORCH_CHECK_VALUE(padded || (head_start >= 0 && head_start <= total - num_heads),
                    "head_start: expected heads within total_heads, ", total,
                    ", or a multiple of num_heads below it, got head_start ", head_start,
                    " and num_heads ", num_heads);
  TORCH_CHECK_VALUE(std::isfinite(max_bias) && max_bias > 0,
                    "max_bias: expected a positive number, got ", max_bias);
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0, "factor: expected a positive number, got ",
                    factor);
  const auto count = static_cast<int64_t>(values.size());
  TORCH_CHECK_VALUE(count == 0 || count == total || count == 2 * total,
                    "values: expected none, or one or two for each of total_heads ", total,
                    ", got ", count);
  TORCH_CHECK_VALUE(count == 0 || max_bias == 8.0,
                    "max_bias: expected none where slopes are given, got ", max_bias);
  for (const double slope : values) {
    TORCH_CHECK_VALUE(std::isfinite(slope) && slope >= 0,
                      "slopes: expected finite numbers of at least 0, got ", slope,
                      "; the bias is minus the slope times the distance");
  }
  std::vector<float> all = slope_values(num_heads, kind, max_bias, total, head_start, values);
  for (float& slope : all) slope /= static_cast<float>(factor);
  const bool two_sided = count != 0 && count == 2 * total;
  const at::DimVector sizes = two_sided ? at::DimVector{2, num_heads} : at::DimVector{num_heads};
  return dispatcher::floats_on(device.value_or(at::kCPU), all, sizes);
}

/// JAIS and BTLM flatten the bias of texts that are longer than those in training. A symbolic
/// length is not compared, so that one compiled program serves all lengths.
Tensor scaled_slopes(const Tensor& slopes, c10::SymInt key_length, int64_t train_length) {
  TORCH_CHECK_VALUE(train_length > 0, "train_length: expected a positive number, got ",
                    train_length);
  if (!key_length.is_symbolic() && key_length <= train_length) return slopes;
  const Tensor length = at::full({}, at::Scalar(key_length.max(train_length)), at::kDouble);
  return slopes.div(length / train_length);
}

/// Numbers only visible keys, from 0, as Bloom does.
Tensor positions(const Tensor& attention_mask) {
  TORCH_CHECK_TYPE(at::isIntegralType(attention_mask.scalar_type(), /*includeBool=*/true),
                   "attention_mask: expected bool or integers, got ",
                   dispatcher::dtype_name(attention_mask.scalar_type()));
  TORCH_CHECK_VALUE(attention_mask.dim() >= 1,
                    "attention_mask: expected [key_length] or [batch, key_length], got []");
  const Tensor visible = attention_mask.ne(0);
  return (visible.cumsum(-1) - 1) * visible;
}

/// A block whose biases use local indices lacks the bias between its first key and first query,
/// which is constant along a row: slope * (key - query) in the form "distance", slope * key in the
/// form "key".
Tensor lse_correction(const Tensor& slopes, c10::SymInt query_length, c10::SymInt query_start,
                      c10::SymInt key_start, Text form, bool causal) {
  dispatcher::index_of(form, "form", {"distance", "key"});
  const Call call = ALiBiCall().query_offset(query_start - key_start).causal(causal);
  if (form == "key") return alibi_bias(slopes, query_length, 1, {}, call).squeeze(-1);
  const Tensor of_row = alibi_bias(slopes, 1, 1, {}, call).squeeze(-1);
  c10::SymDimVector sizes(of_row.sym_sizes().begin(), of_row.sym_sizes().end());
  sizes.back() = query_length;
  return of_row.expand_symint(sizes).contiguous();
}

}  // namespace

TORCH_LIBRARY_IMPL(posembed, CompositeExplicitAutograd, m) { m.impl("alibi_slopes", slopes); }

namespace {

// --------------------------------------------------------------------------------------- attention
// Attention with ALiBi's bias: scores in memory, and one kernel for scale, bias, mask and softmax.

/// Autocast casts the operands of matrix products, so that their dtypes may differ.
void check_dtype_of_query(const Tensor& tensor, const char* argument, const Tensor& query) {
  const auto device = query.device().type();
  if (at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device)) {
    return;
  }
  dispatcher::check_same_dtype(tensor, argument, query, "query");
}

/// Matrix products would broadcast some of these shapes, and reject others without naming the
/// argument.
void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout) {
  dispatcher::check_rank(query, "query", 4, "[batch, num_heads, seq, head_dim]");
  dispatcher::check_rank(key, "key", 4, "[batch, heads, keys, head_dim]");
  dispatcher::check_rank(value, "value", 4, "[batch, heads, keys, value_dim]");
  check_dtype_of_query(key, "key", query);
  check_dtype_of_query(value, "value", query);
  dispatcher::check_size(key.sym_size(0), query.sym_size(0), "key", "batch");
  dispatcher::check_size(key.sym_size(3), query.sym_size(3), "key", "head_dim");
  dispatcher::check_size(value.sym_size(0), query.sym_size(0), "value", "batch");
  dispatcher::check_size(value.sym_size(1), key.sym_size(1), "value", "heads");
  dispatcher::check_size(value.sym_size(2), key.sym_size(2), "value", "keys");
  TORCH_CHECK_VALUE(key.sym_size(1) > 0 && query.sym_size(1) % key.sym_size(1) == 0,
                    "key: expected heads that divide those of query, ", query.sym_size(1), ", got ",
                    key.sym_size(1));
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, "dropout: expected 0 to 1, got ", dropout);
}

double scale_for(const Tensor& query) {
  return 1.0 / std::sqrt(static_cast<double>(query.sym_size(3).guard_int(__FILE__, __LINE__)));
}

/// The softmax, in place if no gradient can be needed. Does not ask scores whether they require
/// grad, because inside a torch.func transform they do not tell.
Tensor weights_of(Tensor scores, const Tensor& slopes, double scale, const Call& call) {
  if (at::GradMode::is_enabled()) return alibi_softmax(scores, slopes, scale, call);
  alibi_softmax_(scores, slopes, scale, call);
  return scores;
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& slopes,
                 std::optional<double> scale, double dropout, const Call& call) {
  check_attention(query, key, value, dropout);
  check_slopes(slopes, call);
  // As long as there are no scores, a misfit is the query's: tensors in another layout, usually.
  TORCH_CHECK_VALUE(query.sym_size(1) == slopes.sym_size(-1),
                    "query: expected [batch, heads, seq, head_dim] with ", slopes.sym_size(-1),
                    " heads, got ", query.sym_sizes());
  const c10::SymInt batch = query.sym_size(0), heads = query.sym_size(1),
                    queries = query.sym_size(2), key_heads = key.sym_size(1),
                    keys = key.sym_size(2);
  // The queries of a group of heads are rows of one matrix, so keys need not be copied for each
  // head.
  const c10::SymInt rows = heads / key_heads * queries;
  const Tensor grouped = query.reshape_symint({batch, key_heads, rows, query.sym_size(3)});
  const Tensor scores =
      at::matmul(grouped, key.transpose(-2, -1)).view_symint({batch, heads, queries, keys});
  Tensor weights = weights_of(scores, slopes, scale.has_value() ? *scale : scale_for(query), call);
  if (dropout > 0) weights = at::dropout(weights, dropout, /*train=*/true);
  return at::matmul(weights.view_symint({batch, key_heads, rows, keys}), value)
      .view_symint({batch, heads, queries, value.sym_size(3)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(posembed, m) {
  using posembed::dispatcher::define;
  define(m,
         "alibi_slopes("
         "int num_heads, "
         "str kind=\"paper\", "
         "float max_bias=8.0, "
         "int? total_heads=None, "
         "int head_start=0, "
         "float[] values=[], "
         "float factor=1.0, "
         "Device? device=None) -> Tensor");
  define(m,
         "alibi_scaled_slopes(Tensor(a) slopes, SymInt key_length, int train_length) -> Tensor(a)");
  define(m, "alibi_positions(Tensor attention_mask) -> Tensor");

  const std::string call = call_schema("True");
  const std::string lengths = "Tensor slopes, SymInt query_length, SymInt key_length, ";
  define(m, "alibi_bias(" + lengths + "ScalarType? dtype=None, " + call + ") -> Tensor");
  define(m, "alibi_bias_out(Tensor(a!) out, " + lengths + call + ") -> ()");
  define(m,
         "alibi_bias_backward("
         "Tensor grad, "
         "bool two_sided=False, "
         "bool by_sample=False, "
         "ScalarType? dtype=None, " +
             call + ") -> Tensor");
  const std::string scores = "Tensor slopes, float scale=1.0, " + call;
  define(m, "alibi_add(Tensor scores, " + scores + ") -> Tensor");
  define(m, "alibi_add_(Tensor(a!) scores, " + scores + ") -> ()");
  define(m, "alibi_softmax(Tensor scores, " + scores + ") -> Tensor");
  define(m, "alibi_softmax_(Tensor(a!) scores, " + scores + ") -> ()");
  define(m,
         "alibi_softmax_backward("
         "Tensor grad, "
         "Tensor weights, "
         "float scale=1.0, "
         "int sides=1, "
         "bool by_sample=False, "
         "ScalarType? dtype=None, " +
             call + ") -> (Tensor, Tensor)");
  define(m,
         "alibi_attention("
         "Tensor query, "
         "Tensor key, "
         "Tensor value, "
         "Tensor slopes, "
         "float? scale=None, "
         "float dropout=0.0, " +
             call + ") -> Tensor");
  define(m,
         "alibi_check_attention(Tensor query, Tensor key, Tensor value, float dropout=0.0) -> ()");
  define(m,
         "alibi_lse_correction("
         "Tensor slopes, "
         "SymInt query_length, "
         "SymInt query_start, "
         "SymInt key_start, "
         "str form=\"distance\", "
         "bool causal=True) -> Tensor");
  alibi_bias.implement<empty_bias, fill_bias>(m);
  alibi_bias_out.implement<check_bias_out, fill_out>(m);
  alibi_bias_backward.implement<empty_bias_backward, bias_backward>(m);
  alibi_add.implement<empty_scores, fill_scores<add_to>>(m);
  alibi_add_.implement<check_in_place, change_scores<add_to>>(m);
  alibi_softmax.implement<empty_scores, fill_scores<softmax_to>>(m);
  alibi_softmax_.implement<check_in_place, change_scores<softmax_to>>(m);
  alibi_softmax_backward.implement<empty_softmax_backward, softmax_backward>(m);
  alibi_lse_correction.compose<lse_correction>(m);
  alibi_positions.compose<positions>(m);
  alibi_scaled_slopes.compose_batched<scaled_slopes>(m);
  alibi_attention.compose_batched<attention>(m);
  alibi_check_attention.compose_batched<check_attention>(m);
}

}  // namespace posembed::alibi
