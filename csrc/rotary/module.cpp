// RotaryEmbedding and the functions for C++: options kept, the operator called.
#include <ostream>

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

torch::Tensor RotarySpec::frequencies() const { return rotary::call_rotary_frequencies(to_json()); }

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

RotarySpec RotaryOptions::spec() const {
  RotarySpec spec(head_dim_);
  spec.base = base_;
  spec.rotary_dim = rotary_dim_.value_or(head_dim_);
  spec.rotary_start = rotary_start_;
  spec.interleaved = interleaved_;
  spec.reverse = reverse_;
  spec.check();
  return spec;
}

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryOptions& options) : options(options) {
  RotaryEmbeddingImpl::reset();
}

void RotaryEmbeddingImpl::reset() { text_ = options.spec().to_json(); }

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  const RotarySpec spec = options.spec();
  stream << "RotaryEmbedding(" << spec.head_dim << ", base=" << spec.base;
  if (spec.rotary_dim != spec.head_dim) stream << ", rotary_dim=" << spec.rotary_dim;
  if (spec.rotary_start != 0) stream << ", rotary_start=" << spec.rotary_start;
  if (spec.interleaved) stream << ", interleaved=True";
  if (spec.reverse) stream << ", reverse=True";
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

}  // namespace posembed
