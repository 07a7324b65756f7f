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

#include "posembed/export.h"

namespace posembed {

/// The numbers that fix an encoding. Plain data; equal numbers give equal text from to_json() in
/// C++ and in Python.
struct POSEMBED_API SinusoidalSpec {
  explicit SinusoidalSpec(int64_t embedding_dim);

  int64_t embedding_dim;           ///< components of an encoding
  double base = 10000.0;           ///< ratio of the longest to the shortest wavelength, about
  std::string preset = "vaswani";  ///< vaswani, marian, tensor2tensor or ddpm (the same)
  std::optional<bool> cos_first;   ///< cosines before sines; default: false
  std::optional<double>
      shift;           ///< exponent -i / (embedding_dim / 2 - shift); default: the preset's
  double scale = 1.0;  ///< multiplies the encoding

  /// Raises c10::ValueError, naming the field, where the numbers do not fit together.
  void check() const;

  std::string to_json() const;
  static SinusoidalSpec from_json(const std::string& text);

  /// int64 [embedding_dim]: an encoding of `other` is one of this with its columns in this order.
  /// Raises c10::ValueError where frequencies or scale differ: no order makes them equal.
  torch::Tensor permutation_to(const SinusoidalSpec& other) const;

  bool operator==(const SinusoidalSpec& other) const;
  bool operator!=(const SinusoidalSpec& other) const { return !(*this == other); }
};

namespace functional {

/// x + encodings; gradients flow to x, to floating positions and to `scale`.
/// @param x  floating [batch, seq, embedding_dim] or [seq, embedding_dim]
/// @param positions  int32, int64 or floating [seq] or [batch, seq]; none: offset, offset + 1, …
/// @param spec  SinusoidalSpec::to_json()
/// @param scale  floating, one number that multiplies the encodings
/// @throws c10::ValueError shapes and options; c10::TypeError dtypes
POSEMBED_API torch::Tensor sinusoidal(const torch::Tensor& x,
                                      const std::optional<torch::Tensor>& positions,
                                      const std::string& spec, int64_t offset = 0,
                                      const std::optional<torch::Tensor>& scale = std::nullopt);

/// Encodings [..., embedding_dim] of positions [...]; float32 unless `dtype` says otherwise.
POSEMBED_API torch::Tensor sinusoidal_encode(
    const torch::Tensor& positions, const std::string& spec,
    std::optional<torch::Dtype> dtype = std::nullopt,
    const std::optional<torch::Tensor>& scale = std::nullopt);

}  // namespace functional

/// Options of SinusoidalPositionalEmbedding: the fields of SinusoidalSpec.
struct POSEMBED_API SinusoidalOptions {
  /* implicit */ SinusoidalOptions(int64_t embedding_dim);

  /// Components of an encoding.
  TORCH_ARG(int64_t, embedding_dim);
  /// Ratio of the longest to the shortest wavelength, about.
  TORCH_ARG(double, base) = 10000.0;
  /// "vaswani": interleaved. "marian": the same in halves. "tensor2tensor", "ddpm": halves,
  /// exponent over embedding_dim / 2 - 1.
  TORCH_ARG(std::string, preset) = "vaswani";
  /// Cosines before sines.
  TORCH_ARG(std::optional<bool>, cos_first) = std::nullopt;
  /// Overrides what the preset takes off embedding_dim / 2 in the exponent's divisor.
  TORCH_ARG(std::optional<double>, shift) = std::nullopt;
  /// Multiplies the encoding.
  TORCH_ARG(double, scale) = 1.0;
  /// Learn the scale: a parameter [1] that starts at `scale`.
  TORCH_ARG(bool, learned_scale) = false;

 public:
  SinusoidalSpec spec() const;
};

/// Adds sinusoidal encodings. Holds no tensor but a learned scale: nothing to cast, move or save.
///
///     posembed::SinusoidalPositionalEmbedding position(512);
///     auto y = position->forward(x);  // x [batch, seq, 512]
class POSEMBED_API SinusoidalPositionalEmbeddingImpl
    : public torch::nn::Cloneable<SinusoidalPositionalEmbeddingImpl> {
 public:
  explicit SinusoidalPositionalEmbeddingImpl(int64_t embedding_dim)
      : SinusoidalPositionalEmbeddingImpl(SinusoidalOptions(embedding_dim)) {}
  explicit SinusoidalPositionalEmbeddingImpl(const SinusoidalOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// x + encodings; see functional::sinusoidal for shapes and errors.
  torch::Tensor forward(const torch::Tensor& x,
                        const std::optional<torch::Tensor>& positions = std::nullopt,
                        int64_t offset = 0);

  /// Encodings of positions; see functional::sinusoidal_encode.
  torch::Tensor encode(const torch::Tensor& positions,
                       std::optional<torch::Dtype> dtype = std::nullopt);

  /// M with encode(p + distance) = encode(p) M^T: float64 [embedding_dim, embedding_dim].
  torch::Tensor shift_matrix(double distance) const;

  /// Read at construction and by reset().
  SinusoidalOptions options;
  torch::Tensor scale;  ///< [1], undefined unless it is learned

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {2, torch::nn::AnyValue(int64_t{0})})

 private:
  std::optional<torch::Tensor> learned_scale() const;

  std::string text_;  // options.spec().to_json(), which the operators read
};

TORCH_MODULE(SinusoidalPositionalEmbedding);

}  // namespace posembed
