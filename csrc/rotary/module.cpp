// RotaryEmbedding and the functions for C++: options kept, the operator called.
#include <ostream>

#include "core/double_double.h"
#include "posembed/rotary.h"
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

torch::Tensor rotary(const torch::Tensor& query, std::nullopt_t,
                     const std::optional<torch::Tensor>& positions, const std::string& spec,
                     const RotaryCall& call) {
  return rotary::call_rotary(query, positions, spec, name(call.layout), call.offset, call.inverse,
                             false);
}

std::tuple<torch::Tensor, torch::Tensor> rotary(const torch::Tensor& query,
                                                const torch::Tensor& key,
                                                const std::optional<torch::Tensor>& positions,
                                                const std::string& spec, const RotaryCall& call) {
  return rotary::call_rotary_pair(query, key, positions, spec, name(call.layout), call.offset,
                                  call.inverse, false);
}

void rotary_(const torch::Tensor& query, std::nullopt_t,
             const std::optional<torch::Tensor>& positions, const std::string& spec,
             const RotaryCall& call) {
  rotary::call_rotary_in_place(query, positions, spec, name(call.layout), call.offset,
                               call.inverse);
}

void rotary_(const torch::Tensor& query, const torch::Tensor& key,
             const std::optional<torch::Tensor>& positions, const std::string& spec,
             const RotaryCall& call) {
  rotary::call_rotary_pair_in_place(query, key, positions, spec, name(call.layout), call.offset,
                                    call.inverse);
}

}  // namespace functional

RotaryOptions::RotaryOptions(int64_t head_dim) : head_dim_(head_dim) {}

RotaryOptions::RotaryOptions(const RotarySpec& spec) : head_dim_(spec.head_dim) {
  base(spec.base).rotary_dim(spec.rotary_dim).rotary_start(spec.rotary_start);
  interleaved(spec.interleaved).reverse(spec.reverse).scaling(spec.scaling);
  sections(spec.sections).custom_frequencies(spec.custom_frequencies);
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
  spec.check();
  return spec;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryOptions& options) : options(options) {
  RotaryEmbeddingImpl::reset();
}

void RotaryEmbeddingImpl::reset() { text_ = options.spec().to_json(); }

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "RotaryEmbedding(" << options.spec().describe();
  stream << ", layout='" << posembed::name(options.layout()) << "')";
}

torch::Tensor RotaryEmbeddingImpl::forward(const torch::Tensor& query, std::nullopt_t,
                                           const std::optional<torch::Tensor>& positions,
                                           int64_t offset, bool inverse) {
  return functional::rotary(query, std::nullopt, positions, text_,
                            {options.layout(), offset, inverse});
}

std::tuple<torch::Tensor, torch::Tensor> RotaryEmbeddingImpl::forward(
    const torch::Tensor& query, const torch::Tensor& key,
    const std::optional<torch::Tensor>& positions, int64_t offset, bool inverse) {
  return functional::rotary(query, key, positions, text_, {options.layout(), offset, inverse});
}

void RotaryEmbeddingImpl::rotate_(const torch::Tensor& query, std::nullopt_t,
                                  const std::optional<torch::Tensor>& positions, int64_t offset,
                                  bool inverse) {
  functional::rotary_(query, std::nullopt, positions, text_, {options.layout(), offset, inverse});
}

void RotaryEmbeddingImpl::rotate_(const torch::Tensor& query, const torch::Tensor& key,
                                  const std::optional<torch::Tensor>& positions, int64_t offset,
                                  bool inverse) {
  functional::rotary_(query, key, positions, text_, {options.layout(), offset, inverse});
}

void RotaryEmbeddingImpl::rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                                    const torch::Tensor& new_positions,
                                    const std::optional<RotarySpec>& new_spec) {
  functional::rerotate_(key, old_positions, new_positions, text_,
                        new_spec.has_value() ? new_spec->to_json() : text_, options.layout());
}

RotaryEmbedding RotaryEmbeddingImpl::resolve(int64_t seq_len) const {
  return RotaryEmbedding(RotaryOptions(options.spec().resolve(seq_len)).layout(options.layout()));
}

}  // namespace posembed
