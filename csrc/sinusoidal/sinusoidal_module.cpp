// SinusoidalPositionalEmbedding and the functional interface: thin wrappers around the operators.
#include <c10/util/StringUtil.h>

#include <ostream>

#include "posembed/sinusoidal.h"
#include "sinusoidal/sinusoidal_operator.h"

namespace posembed {

namespace sinusoidal {
namespace {

/// The positions of a call, [axes, batch or 1, seq] with several axes.
MaybeTensor positions_of(const Tensor& x, Text spec, const PositionCall& call, bool several) {
  TORCH_CHECK_VALUE(call.grid().empty() || (!call.positions().has_value() && several),
                    "grid: expected several axes and no positions, got ", call.grid());
  TORCH_CHECK_VALUE(!call.mask().has_value() || !call.grid().empty(),
                    "mask: expected none without a grid");
  if (!call.grid().empty()) {
    return sinusoidal_grid_positions(x, spec, c10::fromIntArrayRefSlow(call.grid()), call.mask());
  }
  if (!several) {
    return call.offset().positions(call.positions(), x, x.dim() - 3, x.dim() - 2,
                                   call.cu_seqlens());
  }
  TORCH_CHECK_VALUE(!call.cu_seqlens().has_value(), "cu_seqlens: expected none with several axes");
  const MaybeTensor& given = call.positions();
  return given.has_value() && given->dim() == 2 ? given->unsqueeze(1) : given;
}

/// x: [..., seq, embedding_dim]
Tensor add_to(const Tensor& x, Text spec, const PositionCall& call, const MaybeTensor& scale,
              AdditiveLayout layout = AdditiveLayout::bsd) {
  const bool several = !specification(spec)->parts.empty();
  const bool turned = layout == AdditiveLayout::sbd && x.dim() == 3;
  if (turned && !several && call.grid().empty() && !call.mask().has_value()) {
    return add_to(x, spec, call.sequence_first(x), scale);
  }
  MaybeTensor positions = positions_of(x, spec, call, several);
  if (turned && positions.has_value()) {  // [axes, batch or 1, seq] -> [axes, seq, batch]
    positions = positions->transpose(-1, -2).expand({positions->size(0), -1, x.size(1)});
  }
  const c10::SymInt offset = call.cu_seqlens().has_value() ? 0 : call.offset().number();
  return sinusoidal_add(x, {spec, positions, offset, scale});
}

/// positions: [...], or [axes, ...] with several axes
Tensor encode_axes(const Tensor& positions, Text text, const MaybeTensor& scale,
                   std::optional<torch::Dtype> dtype) {
  const SpecificationPointer spec = specification(text);
  if (spec->parts.empty()) return sinusoidal_encode({positions, text, scale}, dtype);
  const auto axes = static_cast<int64_t>(spec->parts.size());
  TORCH_CHECK_VALUE(positions.dim() >= 1 && positions.size(0) == axes,
                    "positions: expected [axes, ...] with ", axes, " axes, got ",
                    positions.sizes());
  std::vector<Tensor> blocks;
  for (const Part& part : spec->parts) {
    const std::string of_block = part.text();
    blocks.push_back(sinusoidal_encode({positions.select(0, part.axis), of_block, scale}, dtype));
  }
  return torch::cat(blocks, -1);
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
  return sinusoidal::encode_axes(positions, spec.to_json(), scale, dtype);
}

torch::Tensor functional::sinusoidal_grid_positions(const SinusoidalSpec& spec,
                                                    const std::vector<int64_t>& grid,
                                                    const std::optional<torch::Tensor>& mask,
                                                    torch::Device device) {
  const torch::Tensor like = mask.value_or(torch::empty({0}, device));
  return sinusoidal::sinusoidal_grid_positions(like, spec.to_json(), c10::fromIntArrayRefSlow(grid),
                                               mask);
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
  spec.position_scale = position_scale_;
  spec.padding_idx = padding_idx_;
  spec.axes = axes_;
  spec.widths = widths_;
  spec.start = start_;
  spec.length = length_;
  spec.interpolation_scale = interpolation_scale_;
  spec.max_size = max_size_;
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
  if (options.position_scale() != 1) stream << ", position_scale=" << options.position_scale();
  if (const auto padding = options.padding_idx()) stream << ", padding_idx=" << *padding;
  if (options.learned_scale()) stream << ", learned_scale=True";
  const auto print_all = [&](const char* name, const auto& numbers) {
    if (!numbers.has_value()) return;
    stream << ", " << name << "=(" << c10::Join(", ", *numbers);
    stream << (numbers->size() == 1 ? ",)" : ")");
  };
  print_all("axes", options.axes());
  print_all("widths", options.widths());
  if (const auto start = options.start()) stream << ", start=" << *start;
  if (const auto length = options.length()) stream << ", length=" << *length;
  print_all("interpolation_scale", options.interpolation_scale());
  if (const auto size = options.max_size()) stream << ", max_size=" << *size;
  if (options.layout() != AdditiveLayout::bsd) {
    stream << ", layout='" << posembed::name(options.layout()) << "'";
  }
  stream << ")";
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::forward(const torch::Tensor& x,
                                                         const PositionCall& call) {
  return sinusoidal::add_to(x, text_, call, learned_scale(), options.layout());
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::encode(const torch::Tensor& positions,
                                                        std::optional<torch::Dtype> dtype) {
  return sinusoidal::encode_axes(positions, text_, learned_scale(), dtype);
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::encode_grid(
    const std::vector<int64_t>& grid, const std::optional<torch::Tensor>& mask,
    std::optional<torch::Dtype> dtype, torch::Device device) {
  const torch::Tensor like = mask.value_or(torch::empty({0}, device));
  const torch::Tensor positions =
      sinusoidal::sinusoidal_grid_positions(like, text_, c10::fromIntArrayRefSlow(grid), mask);
  return sinusoidal::encode_axes(positions, text_, learned_scale(), dtype);
}

torch::Tensor SinusoidalPositionalEmbeddingImpl::shift_matrix(double distance) const {
  return sinusoidal::sinusoidal_shift_matrix(distance, text_);
}

}  // namespace posembed
