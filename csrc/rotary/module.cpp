// RotaryEmbedding and the functional interface: thin wrappers around the operators.
#include <ostream>

#include "core/double_double.h"
#include "posembed/rotary.h"
#include "rotary/arguments.h"
#include "rotary/operator.h"

namespace posembed {

const char* name(Layout layout) {
  switch (layout) {
    case Layout::bhsd:
      return "bhsd";
    case Layout::sbhd:
      return "sbhd";
    case Layout::thd:
      return "thd";
    default:
      return "bshd";
  }
}

torch::Tensor RotarySpec::frequencies(std::optional<int64_t> seq_len) const {
  const RotarySpec& spec = *this;
  return rotary::call_rotary_frequencies((seq_len ? resolve(*seq_len) : spec).to_json());
}

torch::Tensor RotarySpec::wavelengths(std::optional<int64_t> seq_len) const {
  return core::constants::two_pi.high / frequencies(seq_len).abs();
}

namespace functional {
namespace {

rotary::Rotation rotation(const std::optional<torch::Tensor>& positions, std::string_view spec,
                          const RotaryCall& call) {
  return {positions,         call.frequencies, call.cu_seqlens, spec,
          name(call.layout), call.offset,      call.inverse};
}

}  // namespace

torch::Tensor rotary(const torch::Tensor& query, std::nullopt_t,
                     const std::optional<torch::Tensor>& positions, std::string_view spec,
                     const RotaryCall& call) {
  return rotary::call_rotary(query, rotation(positions, spec, call));
}

std::tuple<torch::Tensor, torch::Tensor> rotary(const torch::Tensor& query,
                                                const torch::Tensor& key,
                                                const std::optional<torch::Tensor>& positions,
                                                std::string_view spec, const RotaryCall& call) {
  return rotary::call_rotary_pair(query, key, rotation(positions, spec, call));
}

torch::Tensor rotary_(const torch::Tensor& query, std::nullopt_t,
                      const std::optional<torch::Tensor>& positions, std::string_view spec,
                      const RotaryCall& call) {
  rotary::call_rotary_in_place(query, rotation(positions, spec, call));
  return query;
}

std::tuple<torch::Tensor, torch::Tensor> rotary_(const torch::Tensor& query,
                                                 const torch::Tensor& key,
                                                 const std::optional<torch::Tensor>& positions,
                                                 std::string_view spec, const RotaryCall& call) {
  rotary::call_rotary_pair_in_place(query, key, rotation(positions, spec, call));
  return {query, key};
}

torch::Tensor rotary_out(const torch::Tensor& out, const torch::Tensor& query, std::nullopt_t,
                         const std::optional<torch::Tensor>& positions, std::string_view spec,
                         const RotaryCall& call) {
  rotary::call_rotary_out(out, query, rotation(positions, spec, call));
  return out;
}

std::tuple<torch::Tensor, torch::Tensor> rotary_out(const torch::Tensor& query_out,
                                                    const torch::Tensor& key_out,
                                                    const torch::Tensor& query,
                                                    const torch::Tensor& key,
                                                    const std::optional<torch::Tensor>& positions,
                                                    std::string_view spec, const RotaryCall& call) {
  rotary::call_rotary_pair_out(query_out, key_out, query, key, rotation(positions, spec, call));
  return {query_out, key_out};
}

}  // namespace functional

RotaryOptions::RotaryOptions(int64_t head_dim) : head_dim_(head_dim) {}

RotaryOptions::RotaryOptions(const RotarySpec& spec) : head_dim_(spec.head_dim) {
  base(spec.base).rotary_dim(spec.rotary_dim).rotary_start(spec.rotary_start);
  interleaved(spec.interleaved).reverse(spec.reverse).scaling(spec.scaling);
  sections(spec.sections).custom_frequencies(spec.custom_frequencies).numerics(spec.numerics);
}

RotarySpec RotaryOptions::spec() const {
  RotarySpec spec(head_dim_);
  spec.base = base_;
  spec.rotary_dim = rotary_dim_.value_or(head_dim_);
  spec.rotary_start = rotary_start_;
  spec.interleaved = interleaved_;
  spec.reverse = reverse_;
  spec.scaling = scaling_;
  spec.sections = sections_;
  spec.custom_frequencies = custom_frequencies_;
  spec.numerics = numerics_;
  spec.check();
  return spec;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryOptions& options) : options(options) {
  RotaryEmbeddingImpl::reset();
}

void RotaryEmbeddingImpl::reset() {
  const RotarySpec spec = options.spec();
  text_ = spec.to_json();
  if (!options.learned_frequencies()) return;
  TORCH_CHECK_VALUE(!spec.is_dynamic(),
                    "learned_frequencies: expected a specification whose frequencies do not depend "
                    "on the length of the sequence: pass spec.resolve(seq_len)");
  TORCH_CHECK_VALUE(spec.numerics == Numerics::exact,
                    "numerics: expected 'exact' for learned frequencies, got '",
                    posembed::name(spec.numerics), "'");
  frequencies = register_parameter("frequencies", spec.frequencies().to(torch::kFloat));
}

functional::RotaryCall RotaryEmbeddingImpl::call(
    int64_t offset, bool inverse, const std::optional<torch::Tensor>& cu_seqlens) const {
  const bool learned = frequencies.defined();
  return {options.layout(), offset, inverse, cu_seqlens,
          learned ? std::optional<torch::Tensor>(frequencies) : std::nullopt};
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
  stream << (options.learned_frequencies() ? ", learned_frequencies=True)" : ")");
}

std::optional<torch::Tensor> RotaryEmbeddingImpl::places_of(
    const torch::Tensor& query, const std::optional<torch::Tensor>& positions,
    const Offset& offset) const {
  const rotary::Dimensions where = rotary::dimensions(posembed::name(options.layout()));
  return offset.positions(positions, query, where.batch, where.seq);
}

torch::Tensor RotaryEmbeddingImpl::forward(const torch::Tensor& query, std::nullopt_t,
                                           const std::optional<torch::Tensor>& positions,
                                           const Offset& offset,
                                           const std::optional<torch::Tensor>& cu_seqlens,
                                           bool inverse) {
  return functional::rotary(query, std::nullopt, places_of(query, positions, offset), text_,
                            call(offset.number(), inverse, cu_seqlens));
}

std::tuple<torch::Tensor, torch::Tensor> RotaryEmbeddingImpl::forward(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& positions, const Offset& offset,
    const std::optional<torch::Tensor>& cu_seqlens, bool inverse) {
  return functional::rotary(query, key, places_of(query, positions, offset), text_,
                            call(offset.number(), inverse, cu_seqlens));
}

torch::Tensor RotaryEmbeddingImpl::rotate_(const torch::Tensor& query, std::nullopt_t,
                                           const std::optional<torch::Tensor>& positions,
                                           const Offset& offset,
                                           const std::optional<torch::Tensor>& cu_seqlens,
                                           bool inverse) {
  return functional::rotary_(query, std::nullopt, places_of(query, positions, offset), text_,
                             call(offset.number(), inverse, cu_seqlens));
}

std::tuple<torch::Tensor, torch::Tensor> RotaryEmbeddingImpl::rotate_(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& positions, const Offset& offset,
    const std::optional<torch::Tensor>& cu_seqlens, bool inverse) {
  return functional::rotary_(query, key, places_of(query, positions, offset), text_,
                             call(offset.number(), inverse, cu_seqlens));
}

torch::Tensor RotaryEmbeddingImpl::rerotate_(const torch::Tensor& key,
                                             const torch::Tensor& old_positions,
                                             const torch::Tensor& new_positions,
                                             const std::optional<RotarySpec>& new_spec) {
  std::optional<std::string> new_text;
  if (new_spec.has_value()) new_text = new_spec->to_json();
  return functional::rerotate_(key, old_positions, new_positions, text_, new_text, options.layout(),
                               call(/*offset=*/0, /*inverse=*/false, std::nullopt).frequencies);
}

RotaryEmbedding RotaryEmbeddingImpl::resolve(int64_t seq_len) const {
  RotaryEmbedding module(RotaryOptions(options.spec().resolve(seq_len)).layout(options.layout()));
  if (frequencies.defined()) {  // they do not depend on a length
    module->options.learned_frequencies(true);
    module->frequencies = module->register_parameter("frequencies", frequencies);
  }
  return module;
}

}  // namespace posembed
