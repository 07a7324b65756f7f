/// Fourier features of coordinates and time stamps: sines and cosines of exact angles, which are
/// coordinates times frequencies, summed over axes. Mildenhall et al., "NeRF", arXiv:2003.08934;
/// Tancik et al., arXiv:2006.10739; Kazemi et al., "Time2Vec", arXiv:1907.05321.
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "posembed/export.h"

namespace posembed {

/// Options of FourierFeatures; exactly one of frequencies, octaves, bands and random is given.
struct POSEMBED_API FourierOptions {
  using Bands = std::pair<int64_t, double>;
  struct Random {
    int64_t axes = 1, n = 1;
    double scale = 1.0;                          // the standard deviation
    std::optional<int64_t> seed = std::nullopt;  // default: torch's generator
  };

  FourierOptions() = default;
  /// [n]: each axis has all of them; [axes, n]: angles are summed over axes.
  /* implicit */ FourierOptions(torch::Tensor frequencies);
  /// "nerf", "perceiver", "sam", "gaussian" or "time2vec".
  static FourierOptions preset(const std::string& name);

  TORCH_ARG(std::optional<torch::Tensor>, frequencies) = std::nullopt;
  /// Frequencies 2^0, 2^1, …: their number. Default unit: half turns, as in the paper of NeRF.
  TORCH_ARG(std::optional<int64_t>, octaves) = std::nullopt;
  /// Their number and the sampling rate: linear from 1 to half of it, in half turns.
  TORCH_ARG(std::optional<Bands>, bands) = std::nullopt;
  /// Frequencies [axes, n] in turns, drawn from a normal distribution.
  TORCH_ARG(std::optional<Random>, random) = std::nullopt;
  /// [n], in radians.
  TORCH_ARG(std::optional<torch::Tensor>, phases) = std::nullopt;
  /// Train frequencies and phases; phases start at `phases` or 0.
  TORCH_ARG(bool, learned) = false;
  /// A first column: coordinates times learned weights, plus a bias.
  TORCH_ARG(bool, linear) = false;
  /// The coordinates themselves before the waves: "", "first", or after them: "last".
  TORCH_ARG(std::string, include_input) = "";
  /// What frequencies count: "radian", "half_turn" (multiples of pi) or "turn" (of 2 pi).
  TORCH_ARG(std::string, unit) = "";
  /// The columns of each frequency: "sin_cos", "cos_sin", "sin" or "cos".
  TORCH_ARG(std::string, waves) = "sin_cos";
  /// Columns from the slowest letter to the fastest: w(ave), f(requency) and, for frequencies of
  /// each axis, a(xis). Default: "wf" or "waf".
  TORCH_ARG(std::string, order) = "";
  /// Coordinates are in [0, 1], and 2 x - 1 is encoded.
  TORCH_ARG(bool, centred) = false;
};

namespace functional {

/// Fourier features [..., columns] of coordinates [..., axes], int32, int64, float32 or float64.
/// Gradients flow to floating coordinates, frequencies, phases and x.
/// @param frequencies  floating [n], or [axes, n]; |frequency| < 2^50, NaN otherwise
/// @param phases  floating [n], in radians
/// @param x  [..., columns]: features are added to it
/// @param options  unit, waves and order count
/// @throws c10::ValueError for shapes and options, c10::TypeError for dtypes
POSEMBED_API torch::Tensor fourier_features(
    const torch::Tensor& coordinates, const torch::Tensor& frequencies,
    const FourierOptions& options = {}, const std::optional<torch::Tensor>& phases = std::nullopt,
    const std::optional<torch::Tensor>& x = std::nullopt,
    std::optional<torch::Dtype> dtype = std::nullopt);

}  // namespace functional

/// Encodes coordinates. Octaves and bands follow from the options; other frequencies are a float64
/// buffer, which casts do not change, or a parameter.
///
///     posembed::FourierFeatures nerf(posembed::FourierOptions::preset("nerf"));
///     auto y = nerf->forward(points);  // [rays, 3] -> [rays, 63]
class POSEMBED_API FourierFeaturesImpl : public torch::nn::Cloneable<FourierFeaturesImpl> {
 public:
  explicit FourierFeaturesImpl(const FourierOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  using torch::nn::Module::to;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;

  /// [..., axes] -> [..., columns], or x plus that.
  torch::Tensor forward(const torch::Tensor& coordinates,
                        const std::optional<torch::Tensor>& x = std::nullopt,
                        std::optional<torch::Dtype> dtype = std::nullopt);

  FourierOptions options;                    ///< read at construction and by reset()
  torch::Tensor frequencies;                 ///< [1 or 2, n] of each axis, or [axes, n]
  torch::Tensor phases;                      ///< [n], or undefined
  torch::Tensor linear_weight, linear_bias;  ///< [axes, 1], [1], or undefined

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::optional<torch::Tensor>())},
                           {2, torch::nn::AnyValue(std::optional<torch::Dtype>())})
};

TORCH_MODULE(FourierFeatures);

}  // namespace posembed
