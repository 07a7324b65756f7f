// RotaryEmbedding and the functional interface. They choose the frequencies; operators rotate.
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <ostream>
#include <sstream>

#include "core/double_double.h"
#include "dispatcher/tensors.h"
#include "posembed/rotary.h"
#include "rotary/rotary_operator.h"

namespace posembed {

const char* name(Layout layout) { return dispatcher::name_of(layout); }

const char* name(PackedOrder order) { return dispatcher::name_of(order); }

torch::Tensor RotarySpec::frequencies(std::optional<int64_t> seq_len) const {
  const RotarySpec& spec = *this;
  return rotary::rotary_frequencies((seq_len ? resolve(*seq_len) : spec).to_json(), std::nullopt);
}

torch::Tensor RotarySpec::wavelengths(std::optional<int64_t> seq_len) const {
  return core::constants::two_pi.high / frequencies(seq_len).abs();
}

namespace rotary {
namespace {

/// The call with positions in place of an offset for each sample or document.
RotaryCall with_positions(RotaryCall call, const torch::Tensor& query) {
  TORCH_CHECK_VALUE(!call.seq_len().has_value(),
                    "seq_len: expected none, because only rotary() and forward() take it");
  const bool restarts = call.offset().of_samples().has_value();  // the operator takes a number
  call.positions(positions_of(call, query, restarts ? call.cu_seqlens() : std::nullopt));
  if (restarts) call.cu_seqlens(std::nullopt);
  return call.offset(call.offset().number());
}

/// The arguments of a call for a projection, which has its heads by token.
PackedRotation packed_call(const Tensor& qkv, const Packing& packing, Text spec, RotaryCall call) {
  const auto layout = call.layout();
  if (layout == Layout::bhsd) call.layout(Layout::bshd);
  call = with_positions(std::move(call), qkv);
  call.layout(layout);
  return {heads_of(packing), {spec, std::move(call)}};
}

Two choose(const Tensor& condition, const Two& a, const Two& b) {
  return {torch::where(condition, std::get<0>(a), std::get<0>(b)),
          torch::where(condition, std::get<1>(a), std::get<1>(b))};
}

Tensor choose(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return torch::where(condition, a, b);
}

/// Refuses lengths that memory of the CPU shows to be too small.
void check_lengths(const Tensor& lengths, const Tensor& query, const RotaryCall& call) {
  const Dimensions where = dimensions(call.layout());
  // Documents are shorter than all tokens, and tokens may skip positions.
  if (where.batch < 0 || call.positions().has_value() || call.cu_seqlens().has_value()) return;
  if (!lengths.device().is_cpu() || lengths.numel() == 0 || query.dim() <= where.seq) return;
  const int64_t least = query.size(where.seq) + call.offset().number().expect_int();
  const auto shortest = lengths.min().item<int64_t>();
  TORCH_CHECK_VALUE(shortest >= least, "seq_len: expected at least ", least, ", got ", shortest);
}

/// Rotates with LongRoPE's form for each sample's length. `rotate` takes a specification and a call
/// for one length.
template <typename Rotate>
auto by_length(const Tensor& query, const RotarySpec& spec, RotaryCall call, Rotate rotate) {
  using std::get_if;
  const int64_t batch = call.layout() == Layout::sbhd ? 1 : 0;
  const Tensor lengths = *call.seq_len();
  TORCH_CHECK_TYPE(lengths.scalar_type() == torch::kInt || lengths.scalar_type() == torch::kLong,
                   "seq_len: expected int32 or int64, got ", lengths.scalar_type());
  TORCH_CHECK_VALUE(
      query.dim() > batch && lengths.dim() == 1 && lengths.size(0) == query.size(batch),
      "seq_len: expected a length for each sample, got ", lengths.sizes());
  TORCH_CHECK_VALUE(
      spec.is_dynamic(),
      "seq_len: expected none, because the frequencies do not depend on the length of "
      "the sequence, got ",
      lengths.sizes());
  TORCH_CHECK_VALUE(
      get_if<DynamicNtkScaling>(&spec.scaling) == nullptr,
      "seq_len: expected RotarySpec::resolve for each length, because dynamic NTK has "
      "other frequencies for every one");
  check_lengths(lengths, query, call);
  call.seq_len(std::nullopt);
  const int64_t original = std::get<LongRopeScaling>(spec.scaling).original_max_positions;
  std::vector<int64_t> shape(static_cast<size_t>(query.dim()), 1);
  shape[static_cast<size_t>(batch)] = -1;
  return choose((lengths <= original).view(shape), rotate(spec.resolve(original), call),
                rotate(spec.resolve(original + 1), call));
}

}  // namespace
}  // namespace rotary

torch::Tensor functional::rotary(const torch::Tensor& query, const RotarySpec& spec,
                                 const RotaryCall& call) {
  if (call.seq_len().has_value()) {
    return rotary::by_length(query, spec, call, [&](const RotarySpec& one, const RotaryCall& rest) {
      return rotary(query, one, rest);
    });
  }
  return rotary::rotary(query, {spec.to_json(), rotary::with_positions(call, query)});
}

std::tuple<torch::Tensor, torch::Tensor> functional::rotary(const torch::Tensor& query,
                                                            const torch::Tensor& key,
                                                            const RotarySpec& spec,
                                                            const RotaryCall& call) {
  if (call.seq_len().has_value()) {
    return rotary::by_length(query, spec, call, [&](const RotarySpec& one, const RotaryCall& rest) {
      return rotary(query, key, one, rest);
    });
  }
  return rotary::rotary_pair(query, key, {spec.to_json(), rotary::with_positions(call, query)});
}

torch::Tensor functional::rotary_(const torch::Tensor& query, const RotarySpec& spec,
                                  const RotaryCall& call) {
  rotary::rotary_(query, {spec.to_json(), rotary::with_positions(call, query)});
  return query;
}

std::tuple<torch::Tensor, torch::Tensor> functional::rotary_(const torch::Tensor& query,
                                                             const torch::Tensor& key,
                                                             const RotarySpec& spec,
                                                             const RotaryCall& call) {
  rotary::rotary_pair_(query, key, {spec.to_json(), rotary::with_positions(call, query)});
  return {query, key};
}

torch::Tensor functional::rotary_out(const torch::Tensor& out, const torch::Tensor& query,
                                     const RotarySpec& spec, const RotaryCall& call) {
  rotary::rotary_out(out, query, {spec.to_json(), rotary::with_positions(call, query)});
  return out;
}

std::tuple<torch::Tensor, torch::Tensor> functional::rotary_out(
    const torch::Tensor& query_out, const torch::Tensor& key_out, const torch::Tensor& query,
    const torch::Tensor& key, const RotarySpec& spec, const RotaryCall& call) {
  rotary::rotary_pair_out(query_out, key_out, query, key,
                          {spec.to_json(), rotary::with_positions(call, query)});
  return {query_out, key_out};
}

std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> functional::rotary_packed(
    const torch::Tensor& qkv, const Packing& packing, const RotarySpec& spec,
    const RotaryCall& call) {
  return rotary::rotary_packed(qkv, rotary::packed_call(qkv, packing, spec.to_json(), call));
}

torch::Tensor functional::rotary_packed_(const torch::Tensor& qkv, const Packing& packing,
                                         const RotarySpec& spec, const RotaryCall& call) {
  rotary::rotary_packed_(qkv, rotary::packed_call(qkv, packing, spec.to_json(), call));
  return qkv;
}

torch::Tensor functional::rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                                    const torch::Tensor& new_positions, const RotarySpec& spec,
                                    const std::optional<RotarySpec>& new_spec,
                                    const RotaryCall& call) {
  TORCH_CHECK_VALUE(!call.positions() && !call.cu_seqlens() && !call.inverse() &&
                        !call.offset().of_samples() && call.offset().number() == 0,
                    "call: expected only a layout and frequencies for rerotate_");
  std::optional<std::string> new_text;
  if (new_spec.has_value()) new_text = new_spec->to_json();
  rotary::rotary_rerotate_(key, old_positions, new_positions, spec.to_json(), new_text,
                           name(call.layout()), call.frequencies());
  return key;
}

RotarySpec RotaryOptions::spec() const {
  RotarySpec spec = spec_;
  spec.rotary_dim = rotary_dim_.value_or(spec.head_dim);
  spec.check();
  return spec;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryOptions& options) : options(options) {
  RotaryEmbeddingImpl::reset();
}

void RotaryEmbeddingImpl::reset() {
  const RotarySpec spec = options.spec();
  std::vector<int64_t> sizes = options.frequency_sizes();
  TORCH_CHECK_VALUE(sizes.size() <= 2 && std::all_of(sizes.begin(), sizes.end(),
                                                     [](int64_t size) { return size > 0; }),
                    "frequency_sizes: expected none, {heads} or {axes, heads}, got ", sizes);
  TORCH_CHECK_VALUE(sizes.empty() || options.learned_frequencies(),
                    "frequency_sizes: expected none without learned_frequencies, got ", sizes);
  const std::optional<int64_t>& heads = options.heads();
  TORCH_CHECK_VALUE(heads.value_or(1) > 0, "heads: expected a positive number, got ", *heads);
  TORCH_CHECK_VALUE(options.key_heads().value_or(1) > 0,
                    "key_heads: expected a positive number, got ", *options.key_heads());
  TORCH_CHECK_VALUE(heads.has_value() || !options.key_heads().has_value(),
                    "key_heads: expected none without heads, got ", *options.key_heads());
  text_ = spec.to_json();
  if (heads.has_value()) {
    text_ = "heads " + std::to_string(*heads) + " " +
            std::to_string(options.key_heads().value_or(0)) + " " + text_;
  }
  if (!options.learned_frequencies()) return;
  TORCH_CHECK_VALUE(!spec.is_dynamic(),
                    "learned_frequencies: expected a specification whose frequencies do not depend "
                    "on the length of the sequence: pass spec.resolve(seq_len)");
  TORCH_CHECK_VALUE(spec.numerics == Numerics::exact,
                    "numerics: expected 'exact' for learned frequencies, got '",
                    posembed::name(spec.numerics), "'");
  sizes.push_back(spec.rotary_dim / 2);
  const torch::Tensor values = spec.frequencies().to(torch::kFloat).expand(sizes).contiguous();
  frequencies = register_parameter("frequencies", values);
}

RotaryCall RotaryEmbeddingImpl::own_options(RotaryCall call) const {
  TORCH_CHECK_VALUE(!call.layout().contradicts(options.layout()), "layout: expected the module's, ",
                    posembed::name(options.layout()), ", got ", posembed::name(call.layout()));
  TORCH_CHECK_VALUE(!call.frequencies().has_value(),
                    "frequencies: expected none, because the module has its own; ",
                    "functional::rotary takes them");
  call.layout(options.layout());
  call.frequencies(frequencies.defined() ? std::optional(frequencies) : std::nullopt);
  return call;
}

RotaryCall RotaryEmbeddingImpl::own_call(const RotaryCall& call, const torch::Tensor& query) const {
  return rotary::with_positions(own_options(call), query);
}

torch::Dtype RotaryEmbeddingImpl::wide(torch::Dtype dtype) const {
  const bool narrow = dtype != torch::kFloat && dtype != torch::kDouble;
  return narrow && frequencies.defined() ? frequencies.scalar_type() : dtype;
}

void RotaryEmbeddingImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  Cloneable::to(device, wide(dtype), non_blocking);
}

void RotaryEmbeddingImpl::to(torch::Dtype dtype, bool non_blocking) {
  Cloneable::to(wide(dtype), non_blocking);
}

void RotaryEmbeddingImpl::to(torch::Device device, bool non_blocking) {
  Cloneable::to(device, non_blocking);
}

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "RotaryEmbedding(" << options.spec().describe();
  stream << ", layout='" << posembed::name(options.layout()) << "'";
  if (options.learned_frequencies()) stream << ", learned_frequencies=True";
  const std::vector<int64_t>& sizes = options.frequency_sizes();
  if (!sizes.empty()) {
    stream << ", frequency_sizes=(" << sizes[0] << ",";
    if (sizes.size() > 1) stream << " " << sizes[1];
    stream << ")";
  }
  if (options.heads()) stream << ", heads=" << *options.heads();
  if (options.key_heads()) stream << ", key_heads=" << *options.key_heads();
  stream << ")";
}

torch::Tensor RotaryEmbeddingImpl::forward(const torch::Tensor& query) {
  return forward(query, RotaryCall());
}

torch::Tensor RotaryEmbeddingImpl::forward(const torch::Tensor& query, const RotaryCall& call) {
  if (call.seq_len()) return functional::rotary(query, options.spec(), own_options(call));
  return rotary::rotary(query, {text_, own_call(call, query)});
}

std::tuple<torch::Tensor, torch::Tensor> RotaryEmbeddingImpl::forward(const torch::Tensor& query,
                                                                      const torch::Tensor& key,
                                                                      const RotaryCall& call) {
  if (call.seq_len()) return functional::rotary(query, key, options.spec(), own_options(call));
  return rotary::rotary_pair(query, key, {text_, own_call(call, query)});
}

torch::Tensor RotaryEmbeddingImpl::rotate_(const torch::Tensor& query, const RotaryCall& call) {
  rotary::rotary_(query, {text_, own_call(call, query)});
  return query;
}

std::tuple<torch::Tensor, torch::Tensor> RotaryEmbeddingImpl::rotate_(const torch::Tensor& query,
                                                                      const torch::Tensor& key,
                                                                      const RotaryCall& call) {
  rotary::rotary_pair_(query, key, {text_, own_call(call, query)});
  return {query, key};
}

std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> RotaryEmbeddingImpl::rotate_packed(
    const torch::Tensor& qkv, const Packing& packing, const RotaryCall& call) {
  return rotary::rotary_packed(qkv, rotary::packed_call(qkv, packing, text_, own_options(call)));
}

torch::Tensor RotaryEmbeddingImpl::rotate_packed_(const torch::Tensor& qkv, const Packing& packing,
                                                  const RotaryCall& call) {
  rotary::rotary_packed_(qkv, rotary::packed_call(qkv, packing, text_, own_options(call)));
  return qkv;
}

torch::Tensor RotaryEmbeddingImpl::rerotate_(const torch::Tensor& key,
                                             const torch::Tensor& old_positions,
                                             const torch::Tensor& new_positions,
                                             const std::optional<RotarySpec>& new_spec) {
  return functional::rerotate_(key, old_positions, new_positions, options.spec(), new_spec,
                               own_call({}, key));
}

RotaryEmbedding RotaryEmbeddingImpl::resolve(int64_t seq_len) const {
  RotaryEmbedding module(RotaryOptions(options.spec().resolve(seq_len))
                             .layout(options.layout())
                             .heads(options.heads())
                             .key_heads(options.key_heads()));
  if (frequencies.defined()) {  // learned frequencies do not depend on a length
    module->options.learned_frequencies(true).frequency_sizes(options.frequency_sizes());
    module->frequencies = module->register_parameter("frequencies", frequencies);
  }
  return module;
}

// ------------------------------------------------------------------------------------- score scale

torch::Tensor ScoreScale::at(const torch::Tensor& positions) const {
  TORCH_CHECK_TYPE(at::isIntegralType(positions.scalar_type(), /*includeBool=*/false),
                   "positions: expected integers, got ",
                   dispatcher::dtype_name(positions.scalar_type()));
  const torch::Tensor position = positions.to(torch::kDouble).clamp_min(0.0);  // -1 is padding
  if (logn) return ((position + 1.0).log() / std::log(length)).clamp_min(1.0) * factor;
  return (((position + offset) / length).floor().log1p() * growth + 1.0) * factor;
}

std::string ScoreScale::describe() const {
  std::ostringstream line;
  if (is_constant() || factor != 1.0) line << factor;
  if (!is_constant() && factor != 1.0) line << " times ";
  if (logn) {
    line << "max(1, log(position + 1) / log(" << length << "))";
  } else if (growth != 0.0) {
    const std::string shift = offset == 0 ? "" : " + " + std::to_string(offset);
    const std::string place = shift.empty() ? "position" : "(position" + shift + ")";
    line << "1 + " << growth << " log(1 + floor(" << place << " / " << length << "))";
  }
  if (!source.empty()) line << " (" << source << ")";
  return line.str();
}

void ScoreScale::check() const {
  TORCH_CHECK_VALUE(std::isfinite(factor) && factor > 0.0,
                    "score_scale: expected a positive factor, got ", factor);
  TORCH_CHECK_VALUE(std::isfinite(growth), "score_scale: expected a finite growth, got ", growth);
  TORCH_CHECK_VALUE(std::isfinite(length) && (logn ? length > 1.0 : length > 0.0),
                    "score_scale: expected a positive length, with logn above 1, got ", length);
  TORCH_CHECK_VALUE(offset >= 0, "score_scale: expected an offset of 0 or more, got ", offset);
  TORCH_CHECK_VALUE(!logn || growth == 0.0, "score_scale: expected no growth beside logn, got ",
                    growth);
}

TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) {
  m.impl("score_scale", [](const torch::Tensor& positions, double factor, double growth,
                           double length, int64_t offset, bool logn) {
    return ScoreScale{factor, growth, length, offset, logn, ""}.at(positions);
  });
}

namespace {

// ------------------------------------------------------------------------------------- permutation
// Converts projection weights to the other pairing.

/// The source of each component of a head.
torch::Tensor order_of(const torch::Tensor& weight, int64_t head_dim, Pairing to, int64_t start,
                       int64_t width) {
  const torch::Tensor order = at::arange(head_dim, weight.options().dtype(at::kLong));
  const torch::Tensor window = order.narrow(0, start, width);
  const bool interleaved = to == Pairing::interleaved;
  const torch::Tensor pairs =
      interleaved ? window.view({2, width / 2}) : window.view({width / 2, 2});
  window.copy_(pairs.t().flatten().clone());
  return order;
}

/// The heads to permute: those given, or all.
std::vector<int64_t> chosen(const PermuteOptions& options, int64_t num_heads) {
  std::vector<int64_t> heads(static_cast<size_t>(num_heads));
  std::iota(heads.begin(), heads.end(), 0);
  if (options.heads.has_value()) heads = *options.heads;
  std::sort(heads.begin(), heads.end());
  for (size_t i = 0; i < heads.size(); ++i) {
    TORCH_CHECK_VALUE(heads[i] >= 0 && heads[i] < num_heads, "heads: expected 0 to ", num_heads - 1,
                      ", got ", heads[i]);
    TORCH_CHECK_VALUE(i == 0 || heads[i] != heads[i - 1], "heads: expected each once, got ",
                      heads[i], " again");
  }
  return heads;
}

}  // namespace

torch::Tensor permute_rotary_weight(const torch::Tensor& weight, int64_t num_heads, Pairing to,
                                    const PermuteOptions& options) {
  TORCH_CHECK_VALUE(num_heads > 0 && weight.dim() > 0 && weight.size(0) % num_heads == 0,
                    "num_heads: expected a divisor of the weight's rows, ", weight.sizes(),
                    ", got ", num_heads);
  const int64_t head_dim = weight.size(0) / num_heads;
  const int64_t start = options.rotary_start;
  const int64_t width = options.rotary_dim.value_or(head_dim);
  TORCH_CHECK_VALUE(width >= 0 && width % 2 == 0 && start >= 0 && start <= head_dim - width,
                    "rotary_dim: expected an even number of components from ", start,
                    " on within head_dim, ", head_dim, ", got ", width);
  const torch::Tensor order = order_of(weight, head_dim, to, start, width);
  torch::Tensor result = weight.detach().clone(at::MemoryFormat::Contiguous);
  for (const int64_t head : chosen(options, num_heads)) {
    const torch::Tensor rows = result.narrow(0, head * head_dim, head_dim);
    rows.copy_(rows.index_select(0, order));
  }
  return result;
}

namespace rotary {
namespace {

torch::Tensor permute_weight(const torch::Tensor& weight, int64_t num_heads, bool interleaved,
                             std::optional<int64_t> rotary_dim, int64_t rotary_start,
                             at::OptionalIntArrayRef heads) {
  PermuteOptions options{rotary_dim, rotary_start};
  if (heads.has_value()) options.heads = heads->vec();
  const Pairing to = interleaved ? Pairing::interleaved : Pairing::half_split;
  return permute_rotary_weight(weight, num_heads, to, options);
}

}  // namespace

// Composite, so that autograd, compilers and backends see the operators inside.
TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) {
  m.impl("rotary_permute_weight", permute_weight);
}

}  // namespace rotary
}  // namespace posembed
