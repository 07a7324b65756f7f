// Checks of specifications and of calls, and the kernel's arguments from tensors and layouts.

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "dispatcher/checks.h"
#include "dispatcher/launch.h"
#include "dispatcher/output_memory.h"
#include "dispatcher/text_cache.h"
#include "rotary/rotary_operator.h"

namespace posembed::rotary {
namespace {

std::string or_window(const RotarySpec& spec) {
  if (spec.rotary_dim == spec.head_dim) return {};
  return ", or " + std::to_string(spec.rotary_dim) + " for the rotated window alone";
}

/// " (layout 'bshd'; [2, 8, 10, 64] looks like 'bhsd')": the end of a message about a size that
/// does not fit. Names the layout and, if there is one, another in which it `fits`.
template <typename Fits>
std::string layout_hint(const Tensor& query, const Dimensions& where, const Fits& fits) {
  std::ostringstream hint;
  hint << " (layout '" << name(where.layout) << "'";
  for (const Layout layout : {Layout::bshd, Layout::bhsd, Layout::sbhd, Layout::thd}) {
    const Dimensions other = dimensions(layout);
    if (layout == where.layout || other.rank != where.rank || !fits(other)) continue;
    hint << "; " << query.sym_sizes() << " looks like '" << name(layout) << "'";
    break;
  }
  hint << ")";
  return hint.str();
}

/// Checks that rows are whole heads or only their rotated windows.
void check_rotated(const Tensor& tensor, const char* argument, const Dimensions& where,
                   const RotarySpec& spec) {
  dispatcher::check_floating(tensor, argument);
  dispatcher::check_rank(tensor, argument, where.rank, where.shape,
                         [&] { return std::string(" (layout '") + name(where.layout) + "')"; });
  const c10::SymInt head_dim = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(head_dim == spec.head_dim || head_dim == spec.rotary_dim, argument,
                    ": expected head_dim ", spec.head_dim, or_window(spec), ", got ", head_dim);
}

/// Checks that heads are as many as the model's, or a divisor of that number; keys may be repeated.
/// Heads of a symbolic number are checked when the program runs.
void check_heads(const Tensor& query, const Tensor* key, const Dimensions& where,
                 const Specification& spec, const Names& names) {
  const auto found = query.sym_size(where.heads).maybe_as_int();
  if (!found.has_value()) return;
  const auto hint = [&](const Tensor& tensor, int64_t heads) {
    return layout_hint(tensor, where, [&](const Dimensions& other) {
      return tensor.sym_size(other.heads) == heads;
    });
  };
  const int64_t parts = *found > 0 ? spec.heads / *found : 0;
  TORCH_CHECK_VALUE(parts > 0 && spec.heads % *found == 0, names.query, ": expected ", spec.heads,
                    " heads, or a divisor of that number, got ", *found, hint(query, spec.heads),
                    "; heads=None takes any number");
  if (key == nullptr || spec.key_heads == 0) return;
  const auto keys = key->sym_size(where.heads).maybe_as_int();
  const bool fits = !keys.has_value() || *keys == *found || *keys * parts == spec.key_heads ||
                    (*keys == 1 && parts % spec.key_heads == 0);
  TORCH_CHECK_VALUE(fits, names.key, ": expected ", spec.key_heads, " heads",
                    parts > 1 ? ", in as many parts as the query's" : "", ", or the query's ",
                    *found, ", got ", key->sym_size(where.heads), hint(*key, spec.key_heads),
                    "; heads=None takes any number");
}

/// Whether positions have a row for each axis, one dimension more than [batch, seq] or [tokens].
bool has_axes(const Tensor& positions, const Dimensions& where) {
  return positions.dim() == (where.batch < 0 ? 2 : 3);
}

void check_position_type(const Tensor& positions, const char* argument) {
  dispatcher::check_position_type(positions, argument);
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && positions.requires_grad()), argument,
                    ": requires grad, but rotations have no gradient for positions; detach them");
}

/// Positions without a batch would be read as [batch, seq] if they had as many axes as the batch
/// has sequences, so they are always refused.
void check_batch(const Tensor& positions, const std::optional<c10::SymInt>& batch,
                 const Specification& spec, const char* argument) {
  if (spec.axes == 1 || !batch.has_value() || positions.dim() != 2) return;
  TORCH_CHECK_VALUE(positions.sym_size(0) == *batch || positions.sym_size(0) == 1, argument,
                    ": expected [axes, batch, seq] or, with the same position on all axes, ",
                    "[batch, seq] with batch ", *batch, *batch == 1 ? "" : " or 1", ", got ",
                    positions.sym_sizes(),
                    "; give [axes, seq] a dimension for the batch: positions.unsqueeze(1)");
}

/// Accepts the axes in use, and the unused ones after them that the specification declares.
void check_axes(const c10::SymInt& axes, const Specification& spec, const char* argument) {
  const int64_t min_axes = std::max<int64_t>(2, spec.used_axes);
  if (min_axes == spec.axes) return dispatcher::check_size(axes, min_axes, argument, "axes");
  TORCH_CHECK_VALUE(axes >= min_axes && axes <= spec.axes, argument, ": expected axes ", min_axes,
                    " to ", spec.axes, ", got ", axes);
}

/// Whether the angle of a pair is a sum over axes, each with frequencies of its own.
bool mixes_axes(const RotaryCall& call) {
  return call.frequencies().has_value() && call.frequencies()->dim() == 3;
}

void check_positions(const Tensor& all, const Tensor& query, const Dimensions& where,
                     const Specification& spec, const RotaryCall& call, const Names& names) {
  // positions: [seq], [batch, seq] or [1, seq]; with sections, after a leading dimension of axes
  const bool mixes = mixes_axes(call);
  const bool by_axis = (spec.axes > 1 || mixes) && has_axes(all, where);
  if (by_axis && !mixes) check_axes(all.sym_size(0), spec, names.positions);
  const Tensor positions = by_axis ? all.select(0, 0) : all;
  check_position_type(positions, names.positions);
  const auto batch = where.batch < 0 ? std::nullopt : std::optional(query.sym_size(where.batch));
  if (!by_axis) check_batch(positions, batch, spec, names.positions);
  const c10::SymInt& offset = call.offset().number();
  const auto hint = [&] {
    return layout_hint(query, where, [&](const Dimensions& other) {
      return positions.sym_size(-1) == query.sym_size(other.seq);
    });
  };
  dispatcher::check_positions_shape(positions, names.positions, batch, query.sym_size(where.seq),
                                    offset, hint);
}

/// Checks frequencies [heads, rotary_dim / 2] and [axes, heads, rotary_dim / 2].
void check_frequencies_by_head(const Tensor& frequencies, const Tensor& query, const Tensor* key,
                               const Dimensions& where, const RotarySpec& spec) {
  TORCH_CHECK_VALUE(!std::holds_alternative<XPosScaling>(spec.scaling),
                    "frequencies: expected [rotary_dim / 2] with XPosScaling, got ",
                    frequencies.sym_sizes());
  const c10::SymInt heads = frequencies.sym_size(-2);
  dispatcher::check_size(heads, query.sym_size(where.heads), "frequencies", "heads");
  if (key != nullptr) dispatcher::check_size(key->sym_size(where.heads), heads, "key", "heads");
}

/// Checks frequencies [axes, heads, rotary_dim / 2] and the positions that they need.
void check_mixed_axes(const Tensor& frequencies, const MaybeTensor& positions,
                      const Dimensions& where, const RotarySpec& spec) {
  const c10::SymInt axes = frequencies.sym_size(0);
  TORCH_CHECK_VALUE(!spec.sections.has_value(),
                    "sections: expected none where frequencies sum over axes");
  TORCH_CHECK_VALUE(axes >= 1 && axes <= max_axes, "frequencies: expected 1 to ", max_axes,
                    " axes, got ", axes);
  const char* shape = where.batch < 0 ? "[axes, tokens]" : "[axes, batch, seq]";
  TORCH_CHECK_VALUE(positions.has_value() && has_axes(*positions, where), "positions: expected ",
                    shape, " where frequencies sum over axes");
  dispatcher::check_size(positions->sym_size(0), axes, "positions", "axes");
}

void check_frequencies(const Tensor& query, const Tensor* key, const RotaryCall& call,
                       const Dimensions& where, const RotarySpec& spec) {
  const Tensor& frequencies = *call.frequencies();
  TORCH_CHECK_VALUE(spec.numerics == Numerics::exact,
                    "numerics: expected 'exact' where frequencies are given, got '",
                    name(spec.numerics), "'");
  const at::ScalarType type = frequencies.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble,
                   "frequencies: expected float32 or float64, got ", dispatcher::dtype_name(type));
  TORCH_CHECK_VALUE(frequencies.dim() >= 1 && frequencies.dim() <= 3,
                    "frequencies: expected [rotary_dim / 2], [heads, rotary_dim / 2] or ",
                    "[axes, heads, rotary_dim / 2], got ", frequencies.sym_sizes());
  dispatcher::check_size(frequencies.sym_size(-1), spec.rotary_dim / 2, "frequencies",
                         "rotary_dim / 2");
  if (frequencies.dim() > 1) check_frequencies_by_head(frequencies, query, key, where, spec);
  if (mixes_axes(call)) check_mixed_axes(frequencies, call.positions(), where, spec);
}

void check_documents(const Tensor& cu_seqlens, const Tensor& query, const Dimensions& where,
                     bool with_positions) {
  dispatcher::check_boundaries(cu_seqlens);
  TORCH_CHECK_VALUE(!with_positions, "cu_seqlens: expected none where positions are given");
  TORCH_CHECK_VALUE(where.batch < 0 || query.sym_size(where.batch) == 1,
                    "cu_seqlens: expected layout 'thd' or batch 1, got batch ",
                    query.sym_size(std::max<int64_t>(where.batch, 0)));
}

void set_positions(const Tensor& positions, const Specification& spec, const Dimensions& where,
                   Arguments* result) {
  result->positions = dispatcher::position_view(positions);
  const bool by_row = where.batch >= 0 && positions.dim() > 1 && positions.size(-2) > 1;
  result->position_stride[0] = by_row ? positions.stride(-2) : 0;
  result->position_stride[1] = positions.stride(-1);
  if (has_axes(positions, where)) {
    result->position_stride[2] = positions.stride(0);
    result->axes = positions.size(0);
    if (!spec.axis_of_pair.empty()) result->axis_of_pair = spec.axis_of_pair.data();
  }
}

/// Like at::empty_like, but reuses memory that posembed keeps: see output_memory.h.
Tensor empty_on_cpu(const Tensor& input, const at::TensorOptions& options) {
  if (input.is_contiguous()) return dispatcher::empty(input.sizes(), options);
  const auto strides = input.is_non_overlapping_and_dense()
                           ? input.strides().vec()
                           : at::infer_dense_strides(input.sizes(), input.strides());
  if (input.size(-1) > 1 && strides.back() != 1) return dispatcher::empty(input.sizes(), options);
  return dispatcher::empty_strided(input.sizes(), strides, options);
}

/// "rotary: in order, streamed": the way of tokens [begin, end).
std::string walk_name(const Arguments& arguments, int64_t begin, int64_t end) {
  const char* parts[3];
  name_walk_cpu(arguments, begin, end, parts);
  return std::string("rotary: ") + parts[0] + parts[1] + parts[2];
}

}  // namespace

Dimensions dimensions(Layout layout) {
  constexpr Dimensions all[] = {{4, 0, 1, 2, "[batch, seq, heads, head_dim]", Layout::bshd},
                                {4, 0, 2, 1, "[batch, heads, seq, head_dim]", Layout::bhsd},
                                {4, 1, 0, 2, "[seq, batch, heads, head_dim]", Layout::sbhd},
                                {3, -1, 0, 1, "[tokens, heads, head_dim]", Layout::thd}};
  return all[static_cast<int>(layout)];
}

SpecificationPointer check(const Tensor& query, const Tensor* key, const Rotation& rotation,
                           const Names& names) {
  SpecificationPointer resolved = specification(rotation.spec);
  const RotarySpec& spec = resolved->spec;
  const RotaryCall& call = rotation.call;
  TORCH_CHECK_VALUE(!spec.is_dynamic(),
                    "spec: its frequencies depend on the length of the sequence, which the ",
                    "operator does not know: pass seq_len, or resolve(seq_len) of it");
  const Dimensions where = dimensions(call.layout());
  check_rotated(query, names.query, where, spec);
  if (key != nullptr) {
    check_rotated(*key, names.key, where, spec);
    check_key(*key, names.key, query, where);
  }
  if (resolved->heads > 0) check_heads(query, key, where, *resolved, names);
  const c10::SymInt& offset = call.offset().number();
  TORCH_CHECK_VALUE(offset >= 0, "offset: expected 0 or more, got ", offset);
  dispatcher::sum(offset, query.sym_size(where.seq), "offset");
  const MaybeTensor& positions = call.positions();
  if (positions.has_value()) check_positions(*positions, query, where, *resolved, call, names);
  if (call.frequencies().has_value()) check_frequencies(query, key, call, where, spec);
  if (call.cu_seqlens().has_value()) {
    check_documents(*call.cu_seqlens(), query, where, positions.has_value());
  }
  return resolved;
}

void check_key(const Tensor& key, const char* name, const Tensor& query, const Dimensions& where) {
  dispatcher::check_same_dtype(key, name, query, "query");
  const auto same = [&](int64_t dimension) {
    return dimension < 0 || key.sym_size(dimension) == query.sym_size(dimension);
  };
  const auto grouped = [&](int64_t heads) {
    return key.sym_size(heads) > 0 && query.sym_size(heads) % key.sym_size(heads) == 0;
  };
  const auto hint = [&] {
    return layout_hint(query, where, [&](const Dimensions& other) {
      return same(other.seq) && same(other.batch) && grouped(other.heads);
    });
  };
  dispatcher::check_size(key.sym_size(where.seq), query.sym_size(where.seq), name, "seq", hint);
  if (where.batch < 0) return;
  dispatcher::check_size(key.sym_size(where.batch), query.sym_size(where.batch), name, "batch",
                         hint);
}

void check_pair_memory(const Tensor& query_out, const Tensor& key_out, const Tensor& query,
                       const Tensor& key) {
  dispatcher::check_no_overlap(key_out, "key_out", query_out, "query_out");
  dispatcher::check_no_overlap(query_out, "query_out", key, "key");
  dispatcher::check_no_overlap(key_out, "key_out", query, "query");
  dispatcher::check_no_overlap_or_same(query_out, "query_out", query, "query");
  dispatcher::check_no_overlap_or_same(key_out, "key_out", key, "key");
}

void check_position_values(const Tensor& positions, const char* argument, Layout layout) {
  if (positions.is_floating_point()) return dispatcher::check_finite(positions, argument);
  const core::IndexView view = dispatcher::index_view(positions);
  for (int64_t i = 0; i < positions.numel(); ++i) {
    const int64_t position = core::read(view, i);
    TORCH_CHECK_INDEX(position >= -1, argument,
                      ": expected -1 (leave the token as it is) or more, got ", position,
                      " at index ", i, "; floating positions may be negative");
  }
  if (!has_axes(positions, dimensions(layout)) || positions.numel() == 0) return;
  const int64_t tokens = positions.numel() / positions.size(0);
  for (int64_t i = tokens; i < positions.numel(); ++i) {
    const int64_t token = i % tokens;
    TORCH_CHECK_INDEX((core::read(view, i) == -1) == (core::read(view, token) == -1), argument,
                      ": expected -1 (leave the token as it is) on all axes of a token or on none,",
                      " got -1 on some axes of token ", token,
                      "; floating positions may be negative");
  }
}

Inputs checked_inputs(const RotaryCall& call, const Tensor& query) {
  Inputs inputs;
  if (call.positions().has_value()) {
    inputs.positions = *call.positions();
    if (!dispatcher::on_cuda(inputs.positions)) {
      inputs.positions = inputs.positions.contiguous();
      check_position_values(inputs.positions, "positions", call.layout());
    }
  }
  if (call.cu_seqlens().has_value()) {
    inputs.cu_seqlens = call.cu_seqlens()->contiguous();
    dispatcher::check_cu_seqlens(inputs.cu_seqlens, query.size(dimensions(call.layout()).seq),
                                 "the number of tokens");
  }
  if (call.frequencies().has_value()) inputs.frequencies = call.frequencies()->contiguous();
  return inputs;
}

HeadView head_view(const Tensor& in, const Tensor* out, const Dimensions& where) {
  HeadView result;
  result.in = in.const_data_ptr();
  if (out != nullptr) result.out = out->mutable_data_ptr();
  result.heads = in.size(where.heads);
  const int64_t order[3] = {where.batch, where.seq, where.heads};
  for (int i = 0; i < 3; ++i) {
    if (order[i] < 0) continue;
    result.in_stride[i] = in.stride(order[i]);
    if (out != nullptr) result.out_stride[i] = out->stride(order[i]);
  }
  return result;
}

Arguments arguments(const Job& job, const Dimensions& where) {
  const Tensor& query = *job.in[0];
  Arguments result;
  result.count = job.count;
  for (int64_t i = 0; i < job.count; ++i) {
    result.views[i] = head_view(*job.in[i], job.out[i], where);
  }
  result.scalar = dispatcher::scalar_of(query);
  result.batch = where.batch < 0 ? 1 : query.size(where.batch);
  result.seq = query.size(where.seq);
  return result;
}

Arguments arguments(const Job& job, const Inputs& inputs, const Rotation& rotation,
                    const Specification& spec) {
  const RotaryCall& call = rotation.call;
  const Dimensions where = dimensions(call.layout());
  Arguments result = arguments(job, where);
  for (int64_t i = 0; i < job.count; ++i) {
    result.views[i].window_only = job.in[i]->size(-1) != spec.spec.head_dim;
  }
  result.head_dim = spec.spec.head_dim;
  result.pairs = spec.spec.rotary_dim / 2;
  result.start = spec.spec.rotary_start;
  result.interleaved = spec.spec.interleaved;
  result.reverse = (call.inverse() != rotation.transpose) != spec.spec.reverse;
  result.turns = spec.turns.data();
  result.wide_turns = spec.wide_turns.data();
  result.radians = spec.frequencies.data();
  if (!spec.decay.empty()) {
    result.decay = spec.decay.data();
    result.decay_center = spec.decay_center;
    result.decay_sign = call.inverse() ? -1.0 : 1.0;
  }
  result.amplitude = call.inverse() ? 1.0 / spec.attention_factor : spec.attention_factor;
  result.offset = call.offset().number().expect_int();
  if (inputs.positions.defined()) set_positions(inputs.positions, spec, where, &result);
  if (inputs.cu_seqlens.defined()) {
    result.documents = {dispatcher::index_view(inputs.cu_seqlens), inputs.cu_seqlens.size(0) - 1};
  }
  if (inputs.frequencies.defined()) {
    const Tensor& frequencies = inputs.frequencies;
    result.frequencies = {frequencies.const_data_ptr(), dispatcher::scalar_of(frequencies)};
    if (frequencies.dim() > 1) result.frequencies.head_stride = result.pairs;
    if (frequencies.dim() > 2) {
      result.frequencies.axis_stride = frequencies.size(-2) * result.pairs;
    }
  }
  if (spec.windows.size() > 2) {
    result.windows = spec.windows.data();
    result.window_count = static_cast<int64_t>(spec.windows.size()) - 1;
  }
  return result;
}

void launch_rotation(Arguments& call, const Tensor& query) {
  call.error = dispatcher::device_error(query.device());
  const int64_t heads = call.views[0].heads + (call.count > 1 ? call.views[1].heads : 0);
  const int64_t token_bytes = 2 * heads * call.head_dim * core::size_of(call.scalar);
  const auto rotate = [](const Arguments& arguments, int64_t begin, int64_t end) {
    const dispatcher::ProfiledRange range([&] { return walk_name(arguments, begin, end); });
    rotate_cpu(arguments, begin, end);
  };
  dispatcher::launch(call, query, call.batch * call.seq, token_bytes, rotate,
                     POSEMBED_CUDA_LAUNCHER(rotate_cuda));
}

void check_exact_angles(const Specification& spec, const char* operator_name) {
  TORCH_CHECK_VALUE(spec.decay.empty(), "spec: expected no XPosScaling, which ", operator_name,
                    " does not have");
  TORCH_CHECK_VALUE(spec.windows.size() <= 2, "sections: expected within_axes=False for ",
                    operator_name);
  TORCH_CHECK_VALUE(spec.spec.numerics == Numerics::exact, "numerics: expected 'exact' for ",
                    operator_name, ", got '", name(spec.spec.numerics), "'");
}

Tensor empty_result(const Tensor& input, at::ScalarType type) {
  const at::TensorOptions options = input.options().dtype(type);
  if (input.is_cpu()) return empty_on_cpu(input, options);
  Tensor result = at::empty_like(input, options);
  const bool dense = input.sym_size(-1) <= 1 || result.sym_stride(-1) == 1;
  return dense ? result : at::empty_symint(input.sym_sizes(), options);
}

}  // namespace posembed::rotary

namespace posembed {
namespace {

// ---------------------------------------------------------------------------------- specifications

/// The first pair of each run of pairs of one axis, then the number of pairs.
std::vector<int64_t> runs_of(const std::vector<int64_t>& axis_of_pair) {
  std::vector<int64_t> result;
  for (size_t pair = 0; pair < axis_of_pair.size(); ++pair) {
    const bool begins = pair == 0 || axis_of_pair[pair] != axis_of_pair[pair - 1];
    if (begins) result.push_back(static_cast<int64_t>(pair));
  }
  result.push_back(static_cast<int64_t>(axis_of_pair.size()));
  return result;
}

void check_within_axes(const RotarySpec& spec) {
  if (!spec.sections->within_axes) return;
  TORCH_CHECK_VALUE(!spec.interleaved,
                    "sections: expected within_axes=False for interleaved pairs, which always are");
  const std::vector<int64_t>& axes = spec.sections->axis_of_pair;
  const std::set<int64_t> distinct(axes.begin(), axes.end());
  TORCH_CHECK_VALUE(runs_of(axes).size() == distinct.size() + 1,
                    "sections: expected the pairs of each axis side by side for within_axes");
}

void check_sections(const RotarySpec& spec) {
  if (!spec.sections.has_value()) return;
  const std::vector<int64_t>& axes = spec.sections->axis_of_pair;
  TORCH_CHECK_VALUE(static_cast<int64_t>(axes.size()) == spec.rotary_dim / 2,
                    "sections: expected an axis for each of rotary_dim / 2 = ", spec.rotary_dim / 2,
                    " pairs, got ", axes.size());
  for (const int64_t axis : axes) {
    TORCH_CHECK_VALUE(axis >= 0 && axis < rotary::max_axes, "sections: expected axes 0 to ",
                      rotary::max_axes - 1, ", got ", axis);
  }
  check_within_axes(spec);
  const int64_t used = spec.sections->used_axes(), declared = spec.sections->position_axes();
  TORCH_CHECK_VALUE(declared >= used && declared <= rotary::max_axes,
                    "sections: expected axes of positions, ", used, " to ", rotary::max_axes,
                    ", got ", declared);
}

void check_custom_frequencies(const RotarySpec& spec) {
  if (!spec.custom_frequencies.has_value()) return;
  const std::vector<double>& frequencies = *spec.custom_frequencies;
  TORCH_CHECK_VALUE(static_cast<int64_t>(frequencies.size()) == spec.rotary_dim / 2,
                    "custom_frequencies: expected rotary_dim / 2 = ", spec.rotary_dim / 2,
                    " numbers, got ", frequencies.size());
  for (const double frequency : frequencies) {
    TORCH_CHECK_VALUE(std::isfinite(frequency), "custom_frequencies: expected finite numbers, got ",
                      frequency);
  }
  TORCH_CHECK_VALUE(std::holds_alternative<std::monostate>(spec.scaling),
                    "scaling: expected none beside custom_frequencies");
}

void check_custom_attention_factor(const RotarySpec& spec) {
  if (!spec.custom_attention_factor.has_value()) return;
  const double factor = *spec.custom_attention_factor;
  TORCH_CHECK_VALUE(spec.custom_frequencies.has_value(),
                    "custom_attention_factor: expected None without custom_frequencies, got ",
                    factor);
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0.0,
                    "custom_attention_factor: expected a finite positive number, got ", factor);
}

void check_numerics(const RotarySpec& spec) {
  TORCH_CHECK_VALUE(
      spec.numerics == Numerics::exact || !std::holds_alternative<XPosScaling>(spec.scaling),
      "numerics: expected 'exact' for XPosScaling, which no common program computes ",
      "in one way, got '", name(spec.numerics), "'");
}

/// Checks the results, because they may overflow even if each number is valid.
void check_results(const rotary::Scaled& numbers) {
  for (const core::DoubleDouble& frequency : numbers.frequencies) {
    TORCH_CHECK_VALUE(std::isfinite(frequency.high), "scaling: expected finite frequencies, got ",
                      frequency.high);
  }
  TORCH_CHECK_VALUE(std::isfinite(numbers.attention_factor) && numbers.attention_factor > 0.0,
                    "attention_factor: expected a finite positive number, got ",
                    numbers.attention_factor);
}

}  // namespace

void RotarySpec::check() const {
  check_fields();
  check_results(rotary::scaled(*this));
}

void RotarySpec::check_fields() const {
  TORCH_CHECK_VALUE(head_dim > 0, "head_dim: expected a positive number, got ", head_dim);
  TORCH_CHECK_VALUE(rotary_dim >= 0 && rotary_dim % 2 == 0,
                    "rotary_dim: expected an even number, got ", rotary_dim);
  TORCH_CHECK_VALUE(rotary_start >= 0, "rotary_start: expected 0 or more, got ", rotary_start);
  TORCH_CHECK_VALUE(rotary_dim <= head_dim && rotary_start <= head_dim - rotary_dim,
                    "rotary_start + rotary_dim: expected at most head_dim, ", head_dim, ", got ",
                    rotary_start, " + ", rotary_dim);
  TORCH_CHECK_VALUE(rotary_dim <= 2 * rotary::max_pairs, "rotary_dim: expected at most ",
                    2 * rotary::max_pairs, ", got ", rotary_dim);
  TORCH_CHECK_VALUE(std::isfinite(base) && base >= 1.0,
                    "base: expected a finite number of at least 1, got ", base);
  rotary::check_scaling(*this);
  check_sections(*this);
  check_custom_frequencies(*this);
  check_custom_attention_factor(*this);
  check_numerics(*this);
  if (score_scale.has_value()) score_scale->check();
}

namespace rotary {
namespace {

auto& specifications = *new dispatcher::TextCache<Specification>;

constexpr std::string_view heads_mark = "heads ";

/// The text of a specification without the heads in front.
std::string without_heads(std::string_view text) {
  const bool marked = text.substr(0, heads_mark.size()) == heads_mark;
  return std::string(marked ? text.substr(std::min(text.find('{'), text.size())) : text);
}

}  // namespace

Specification::Specification(std::string_view text) : spec(parse(without_heads(text))) {
  spec.check_fields();
  if (text.substr(0, heads_mark.size()) == heads_mark) {
    std::istringstream(std::string(text.substr(heads_mark.size()))) >> heads >> key_heads;
  }
  Scaled numbers = scaled(spec);
  check_results(numbers);
  for (const core::DoubleDouble& frequency : numbers.frequencies) {
    wide_turns.push_back(core::turn_from_radians(frequency));
    turns.push_back(core::round_to_turn64(wide_turns.back()));
  }
  frequencies = std::move(numbers.frequencies);
  attention_factor = numbers.attention_factor;
  decay = std::move(numbers.decay);
  decay_center = numbers.decay_center;
  for_keys = spec.for_keys().to_json();
  if (spec.sections.has_value()) {
    for (const int64_t axis : spec.sections->axis_of_pair) {
      axis_of_pair.push_back(static_cast<uint8_t>(axis));
    }
    if (spec.sections->within_axes) windows = runs_of(spec.sections->axis_of_pair);
    axes = spec.sections->position_axes();
    used_axes = spec.sections->used_axes();
  }
}

SpecificationPointer specification(std::string_view text) { return specifications.find(text); }

}  // namespace rotary
}  // namespace posembed
