/// Sinusoidal position encodings: sines and cosines of wavelengths from 2 pi to base * 2 pi, added
/// to embeddings. No table, no largest position, nothing to learn. Vaswani et al., "Attention Is
/// All You Need", arXiv:1706.03762.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "posembed/export.h"
#include "posembed/offset.h"

namespace posembed {

/// The numbers that define an encoding. Plain data; equal numbers give equal text from to_json() in
/// C++ and in Python.
struct POSEMBED_API SinusoidalSpec {
  explicit SinusoidalSpec(int64_t embedding_dim);

  int64_t embedding_dim;  ///< components of an encoding
  double base = 10000.0;  ///< about longest / shortest wavelength
  /// One axis: vaswani, marian, tensor2tensor, ddpm or fairseq. Two or three axes: detr, sam2, mae,
  /// sd3, pixart or cogvideox.
  std::string preset = "vaswani";
  std::optional<bool> cos_first;  ///< cosines before sines; default: false
  /// Frequency i is base^(-i / (embedding_dim / 2 - shift)); default: the preset's shift.
  std::optional<double> shift;
  double scale = 1.0;          ///< multiplies the encoding
  int64_t position_scale = 1;  ///< multiplies positions, exactly: diffusers' scale of a timestep
  /// The row of padding in fairseq's table: position 0 has the sinusoid of padding_idx + 1, and
  /// position -1, padding, is zero. Default: 1 with fairseq; otherwise positions are not shifted.
  std::optional<int64_t> padding_idx;

  /// Several axes (rows, columns; or frames, rows, columns): the axis that each block of columns
  /// encodes, in the order of the blocks. Default: the preset's.
  std::optional<std::vector<int64_t>> axes;
  /// Columns of each block; default: the preset's, otherwise equal parts.
  std::optional<std::vector<int64_t>> widths;
  /// Cell i of an axis has position (i + start) / interpolation_scale of the axis; with a length
  /// above 0, multiplied by length / cells. Defaults: the preset's, otherwise 0, 0 and 1.
  std::optional<double> start, length;
  std::optional<std::vector<double>> interpolation_scale;
  /// Every grid is the middle of one of max_size cells an axis; 0: it is not.
  std::optional<int64_t> max_size;

  /// The number of axes.
  int64_t num_axes() const;

  /// Throws c10::ValueError, whose message names the field, if the numbers are inconsistent.
  void check() const;

  std::string to_json() const;
  static SinusoidalSpec from_json(const std::string& text);

  /// The column order p, int64 [embedding_dim], that turns this specification's encodings into
  /// those of `other`: encoding.index_select(-1, p). Throws c10::ValueError if there is none,
  /// because their frequencies, scales or paddings differ.
  torch::Tensor permutation_to(const SinusoidalSpec& other) const;

  bool operator==(const SinusoidalSpec& other) const;
  bool operator!=(const SinusoidalSpec& other) const { return !(*this == other); }
};

namespace functional {

/// Adds the encodings of the positions to x. Gradients flow to x, floating positions and scale.
/// @param x  floating [batch, seq, embedding_dim] or [seq, embedding_dim]; several axes: with a
///     batch
/// @param call  positions int32, int64 or floating; several axes: [axes, seq] or [axes, batch,
///     seq], or a grid
/// @param scale  floating, one element: multiplies the encodings
/// @throws c10::ValueError for shapes and options, c10::TypeError for dtypes
POSEMBED_API torch::Tensor sinusoidal(const torch::Tensor& x, const SinusoidalSpec& spec,
                                      const PositionCall& call = {},
                                      const std::optional<torch::Tensor>& scale = std::nullopt);

/// The encodings [..., embedding_dim] of positions [...], or [axes, ...] for several axes; float32
/// by default, float64 for positions of a grid.
POSEMBED_API torch::Tensor sinusoidal_encode(
    const torch::Tensor& positions, const SinusoidalSpec& spec,
    std::optional<torch::Dtype> dtype = std::nullopt,
    const std::optional<torch::Tensor>& scale = std::nullopt);

/// The positions of a grid's cells, row by row: float64 [axes, 1 or batch, cells].
/// @param grid  {rows, columns} or {frames, rows, columns}: as many as the specification has axes
/// @param mask  two axes: bool [batch, rows, columns], true for cells of the picture; padding
///     counts for neither positions nor lengths
POSEMBED_API torch::Tensor sinusoidal_grid_positions(
    const SinusoidalSpec& spec, const std::vector<int64_t>& grid,
    const std::optional<torch::Tensor>& mask = std::nullopt, torch::Device device = torch::kCPU);

}  // namespace functional

/// Options of SinusoidalPositionalEmbedding: the fields of SinusoidalSpec.
struct POSEMBED_API SinusoidalOptions {
  /* implicit */ SinusoidalOptions(int64_t embedding_dim);

  /// Components of an encoding.
  TORCH_ARG(int64_t, embedding_dim);
  /// About the ratio of the longest to the shortest wavelength.
  TORCH_ARG(double, base) = 10000.0;
  /// "vaswani": sines and cosines alternate. "marian": all sines, then all cosines.
  /// "tensor2tensor" and its synonym "ddpm": as marian, with shift 1. "fairseq": the same with
  /// padding_idx 1.
  TORCH_ARG(std::string, preset) = "vaswani";
  /// Cosines before sines.
  TORCH_ARG(std::optional<bool>, cos_first) = std::nullopt;
  /// Frequency i is base^(-i / (embedding_dim / 2 - shift)); default: the preset's shift.
  TORCH_ARG(std::optional<double>, shift) = std::nullopt;
  /// Multiplies the encoding.
  TORCH_ARG(double, scale) = 1.0;
  /// Multiplies positions, exactly: diffusers' scale of a timestep.
  TORCH_ARG(int64_t, position_scale) = 1;
  /// Position 0 has the sinusoid of padding_idx + 1, and position -1, padding, is zero; default: 1
  /// with fairseq, otherwise none.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Learn the scale: a parameter [1] that starts at `scale`.
  TORCH_ARG(bool, learned_scale) = false;
  /// Several axes, and the positions of a grid's cells: see SinusoidalSpec.
  TORCH_ARG(std::optional<std::vector<int64_t>>, axes) = std::nullopt;
  TORCH_ARG(std::optional<std::vector<int64_t>>, widths) = std::nullopt;
  TORCH_ARG(std::optional<double>, start) = std::nullopt;
  TORCH_ARG(std::optional<double>, length) = std::nullopt;
  TORCH_ARG(std::optional<std::vector<double>>, interpolation_scale) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, max_size) = std::nullopt;
  /// The order of the dimensions of x.
  TORCH_ARG(AdditiveLayout, layout) = AdditiveLayout::bsd;

 public:
  SinusoidalSpec spec() const;
};

/// Adds sinusoidal encodings. Without a learned scale it has no tensor to cast, move or save.
///
///     posembed::SinusoidalPositionalEmbedding position(512);
///     auto y = position->forward(x);  // x [batch, seq, 512]
///
///     posembed::SinusoidalPositionalEmbedding mae(posembed::SinusoidalOptions(768).preset("mae"));
///     auto z = mae->forward(x, posembed::PositionCall().grid({14, 14}));  // x [batch, 196, 768]
class POSEMBED_API SinusoidalPositionalEmbeddingImpl
    : public torch::nn::Cloneable<SinusoidalPositionalEmbeddingImpl> {
 public:
  explicit SinusoidalPositionalEmbeddingImpl(int64_t embedding_dim)
      : SinusoidalPositionalEmbeddingImpl(SinusoidalOptions(embedding_dim)) {}
  explicit SinusoidalPositionalEmbeddingImpl(const SinusoidalOptions& options);
  /// More numbers do not compile.
  template <typename... More>
  SinusoidalPositionalEmbeddingImpl(int64_t embedding_dim, int64_t, More...)
      : SinusoidalPositionalEmbeddingImpl(embedding_dim) {
    static_assert(sizeof...(More) > 99,
                  "SinusoidalPositionalEmbedding takes embedding_dim alone or "
                  "SinusoidalOptions(embedding_dim); there is no largest position");
  }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Adds encodings to x; see functional::sinusoidal for shapes and errors.
  torch::Tensor forward(const torch::Tensor& x, const PositionCall& call = {});

  /// The encodings of a grid's cells, [1 or batch, cells, embedding_dim].
  torch::Tensor encode_grid(const std::vector<int64_t>& grid,
                            const std::optional<torch::Tensor>& mask = std::nullopt,
                            std::optional<torch::Dtype> dtype = torch::kFloat,
                            torch::Device device = torch::kCPU);

  /// The encodings of positions; see functional::sinusoidal_encode.
  torch::Tensor encode(const torch::Tensor& positions,
                       std::optional<torch::Dtype> dtype = std::nullopt);

  /// The matrix M, float64 [embedding_dim, embedding_dim], with encode(p + distance) = encode(p)
  /// M^T.
  torch::Tensor shift_matrix(double distance) const;

  /// Read at construction and by reset().
  SinusoidalOptions options;
  torch::Tensor scale;  ///< [1]; undefined without learned_scale

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(PositionCall())})

 private:
  std::optional<torch::Tensor> learned_scale() const;

  std::string text_;  // options.spec().to_json(), which the operators read
};

TORCH_MODULE(SinusoidalPositionalEmbedding);

}  // namespace posembed
