// SinusoidalPositionalEmbedding and the functional interface: thin wrappers around the operators.
#include <ostream>

#include "posembed/sinusoidal.h"
#include "sinusoidal/operator.h"

namespace posembed {

namespace sinusoidal {
namespace {

/// x: [..., seq, embedding_dim]
Tensor add_to(const Tensor& x, Text spec, const PositionCall& call, const MaybeTensor& scale) {
  return sinusoidal_add(
      x, {spec, call.offset().positions(call.positions(), x, x.dim() - 3, x.dim() - 2),
          call.offset().number(), scale});
}

}  // namespace
}  // namespace sinusoidal

torch::Tensor functional::sinusoidal(const torch::Tensor& x, const SinusoidalSpec& spec,
                                     const PositionCall& call,
                                     const std::optional<torch::Tensor>& scale) {
  return sinusoidal::add_to(x, spec.to_json(), call, scale);
}

torch::Tensor functional::sinusoidal_encode(const torch::Tensor& positions,
                                            const SinusoidalSpec& spec,
                                            std::optional<torch::Dtype> dtype,
                                            const std::optional<torch::Tensor>& scale) {
  return sinusoidal::sinusoidal_encode({positions, spec.to_json(), scale}, dtype);
}

torch::Tensor SinusoidalSpec::permutation_to(const SinusoidalSpec& other) const {
  return sinusoidal::sinusoidal_permutation(to_json(), other.to_json());
}

SinusoidalOptions::SinusoidalOptions(int64_t embedding_dim) : embedding_dim_(embedding_dim) {}

SinusoidalSpec SinusoidalOptions::spec() const {
  SinusoidalSpec spec(embedding_dim_);
  spec.base = base_;
  spec.preset = preset_;
  spec.cos_first = cos_first_;
  spec.shift = shift_;
  spec.scale = scale_;
  spec.padding_idx = padding_idx_;
  spec.check();
  return spec;
}

SinusoidalPositionalEmbeddingImpl::SinusoidalPositionalEmbeddingImpl(
    const SinusoidalOptions& options)
    : options(options) {
  SinusoidalPositionalEmbeddingImpl::reset();
}

void SinusoidalPositionalEmbeddingImpl::reset() {
  SinusoidalSpec spec = options.spec();
  if (options.learned_scale()) {
    scale = register_parameter("scale", torch::full({1}, spec.scale));
    spec.scale = 1.0;
  }
  text_ = spec.to_json();
}

std::optional<torch::Tensor> SinusoidalPositionalEmbeddingImpl::learned_scale() const {
  return scale.defined() ? std::optional<torch::Tensor>(scale) : std::nullopt;
}

void SinusoidalPositionalEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "SinusoidalPositionalEmbedding(" << options.embedding_dim()
         << ", base=" << options.base() << ", preset='" << options.preset() << "'";
  if (const auto cos_first = options.cos_first()) {
    stream << ", cos_first=" << (*cos_first ? "True" : "False");
  }
  if (const auto shift = options.shift()) stream << ", shift=" << *shift;
  if (options.scale() != 1.0) stream << ", scale=" << options.scale();
  if (const auto padding = options.padding_idx()) stream << ", padding_idx=" << *padding;
  if (options.learned_scale()) stream << ", learned_scale=True";
  stream << ")";
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::forward(const torch::Tensor& x,
                                                         const PositionCall& call) {
  return sinusoidal::add_to(x, text_, call, learned_scale());
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::encode(const torch::Tensor& positions,
                                                        std::optional<torch::Dtype> dtype) {
  return sinusoidal::sinusoidal_encode({positions, text_, learned_scale()}, dtype);
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::shift_matrix(double distance) const {
  return sinusoidal::sinusoidal_shift_matrix(distance, text_);
}

}  // namespace posembed
