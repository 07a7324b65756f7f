/// The numbers that distinguish one model's rotary embedding from another's: RotarySpec, the
/// scalings that stretch its frequencies to longer contexts, and the position axes of its pairs.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "posembed/export.h"
#include "posembed/score_scale.h"

namespace posembed {

/// Position interpolation: every frequency divided by `factor`. Chen et al., arXiv:2306.15595.
struct LinearScaling {
  double factor = 1.0;
};

/// NTK-aware: the base grows to base * factor^(d / (d - 2)), d = rotary_dim, so that the longest
/// wavelength is stretched by `factor` and the shortest does not change.
struct NtkScaling {
  double factor = 1.0;
};

/// NTK-aware with a factor that grows with the sequence: RotarySpec::resolve makes it NtkScaling.
struct DynamicNtkScaling {
  double factor = 1.0;
  int64_t original_max_positions = 0;
};

/// YaRN: the frequencies of pairs with more than beta_fast turns in the original context do not
/// change, those with fewer than beta_slow turns are divided by `factor`, and those in between are
/// blended. Peng et al., arXiv:2309.00071. With an attention factor of 1 this is "NTK by parts",
/// the method before YaRN.
struct YarnScaling {
  double factor = 1.0;
  int64_t original_max_positions = 0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  std::optional<double> mscale = std::nullopt;          ///< DeepSeek's; needs mscale_all_dim
  std::optional<double> mscale_all_dim = std::nullopt;  ///< with both, attention_factor is a ratio
  bool truncate = true;  ///< round the ends of the blend outwards to whole pairs
  std::optional<double> attention_factor = std::nullopt;  ///< default: 0.1 log(factor) + 1
};

/// Llama 3.1: wavelengths over original_max_positions / low_freq_factor are stretched by `factor`,
/// those under original_max_positions / high_freq_factor do not change, and those in between are
/// blended.
struct Llama3Scaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_positions = 0;
};

/// Gemma: only the first `proportion` of the pairs rotate, with exponents over the whole
/// rotary_dim; the others do not turn. All frequencies are divided by `factor`.
struct ProportionalScaling {
  double proportion = 1.0;
  double factor = 1.0;
};

/// LongRoPE: each pair's frequency is divided by its own factor, from one list up to
/// original_max_positions and from another beyond: see RotarySpec::resolve. Ding et al.,
/// arXiv:2402.13753.
struct LongRopeScaling {
  std::vector<double> short_factor = {};
  std::vector<double> long_factor = {};
  int64_t original_max_positions = 0;
  /// How many times longer the context becomes.
  std::optional<double> factor = std::nullopt;
  /// Default: sqrt(1 + log(factor) / log(original_max_positions)).
  std::optional<double> attention_factor = std::nullopt;
  std::optional<double> long_attention_factor = std::nullopt;  ///< default: attention_factor
};

/// xPos: frequencies do not change; pair i of a query is multiplied by zeta^((position - center) /
/// scale_base), zeta = (2i / rotary_dim + 0.4) / 1.4, and pair i of a key by the inverse, so that
/// scores fade with distance. Sun et al., arXiv:2212.10554.
///
/// A tensor rotated without a key counts as a query; to rotate keys alone, see
/// RotarySpec::for_keys.
struct XPosScaling {
  double scale_base = 512.0;  ///< in positions; if negative, query and key swap roles
  double center = 0.0;        ///< the position where nothing is multiplied
};

/// std::monostate: no scaling.
using RotaryScaling =
    std::variant<std::monostate, LinearScaling, NtkScaling, DynamicNtkScaling, YarnScaling,
                 Llama3Scaling, ProportionalScaling, LongRopeScaling, XPosScaling>;

/// How angles and products are rounded. All but `exact` reproduce a PyTorch program bit for bit:
/// frequencies and angles are float32, products and sums are not fused.
enum class Numerics {
  exact,                  ///< exact angles at every position, one rounding of the result
  float32,                ///< cosine and sine in the data's dtype, each step rounded to it
  float32_product,        ///< cosine and sine in float32, the result rounded once
  float32_rounded_table,  ///< cosine and sine in the data's dtype, the result rounded once
  float32_polar,          ///< as float32_product, with torch.polar's cosine and sine
};

/// "exact", "float32", "float32_product", "float32_rounded_table" or "float32_polar".
POSEMBED_API const char* name(Numerics numerics);

/// For positions with several axes (time, height, width): the axis that rotates each pair.
struct POSEMBED_API Sections {
  std::vector<int64_t> axis_of_pair = {};  ///< [rotary_dim / 2]
  bool restart = false;                    ///< each axis has the whole series of frequencies
  /// The number of position axes, if more than used_axes(): the last ones rotate no pair.
  std::optional<int64_t> axes = std::nullopt;
  /// Half-split pairs lie within the components of their axis: pair i of an axis with n pairs,
  /// whose components begin at c, is (c + i, c + i + n). Otherwise the whole window is split in
  /// two.
  bool within_axes = false;

  /// The number of axes up to the last that rotates a pair.
  int64_t used_axes() const;
  /// `axes`, or used_axes() by default. Positions may have fewer, but at least those in use.
  int64_t position_axes() const { return axes.value_or(used_axes()); }

  /// Gives sizes[a] pairs to axis a, one axis after another; 0 for an axis of positions that
  /// rotates no pair. If `interleaved`, the axes alternate and the remaining pairs belong to axis
  /// 0.
  static Sections of(const std::vector<int64_t>& sizes, bool interleaved = false,
                     bool restart = false);
};

/// The error of an angle, and the position where it is.
struct AngleError {
  double radians = 0.0;
  int64_t position = 0;
};

/// The numbers that define a rotation. Plain data; equal specifications with equal scales of scores
/// have equal to_json() text, in C++ and in Python.
///
///     posembed::RotarySpec spec(128);
///     spec.base = 500000.0;
///     spec.scaling = posembed::Llama3Scaling{8.0, 1.0, 4.0, 8192};
///     spec.check();
struct POSEMBED_API RotarySpec {
  explicit RotarySpec(int64_t head_dim);

  int64_t head_dim;          ///< components of one head
  double base = 10000.0;     ///< pair i rotates by base^(-2i / rotary_dim) radians per position
  int64_t rotary_dim;        ///< components that are rotated; default: head_dim
  int64_t rotary_start = 0;  ///< the first of them
  bool interleaved = false;  ///< pairs (2i, 2i + 1), as GPT-J; otherwise (i, i + rotary_dim / 2)
  bool reverse = false;      ///< rotate by minus the angle
  RotaryScaling scaling;
  std::optional<Sections> sections = std::nullopt;
  /// Radians per position [rotary_dim / 2], instead of the series of `base`; excludes scaling.
  std::optional<std::vector<double>> custom_frequencies = std::nullopt;
  /// Multiplies rotated queries and keys; only with custom_frequencies. Scalings have their own.
  std::optional<double> custom_attention_factor = std::nullopt;

  Numerics numerics = Numerics::exact;

  /// What the model multiplies its scores by besides 1 / sqrt(head width). The rotation does not,
  /// so specifications that differ in it alone are equal.
  std::optional<ScoreScale> score_scale = std::nullopt;

  /// @throws c10::ValueError the numbers are inconsistent; the message names the field
  void check() const;
  /// check() without the frequencies, which may overflow even if each number is valid.
  void check_fields() const;

  std::string to_json() const;
  /// @throws c10::ValueError text that is not JSON, unknown keys, and whatever check() rejects
  static RotarySpec from_json(const std::string& text);

  /// The specification of an image or video model, whose positions have several axes. The presets
  /// and what they expect as positions are in docs/families/rotary.md.
  ///
  ///     const auto spec = posembed::RotarySpec::from_preset("flux");
  /// @param head_dim  for models that come with heads of several sizes; default: that of most
  /// @throws c10::ValueError the name is unknown, the model has no specification, or its heads do
  ///     not have that size
  static RotarySpec from_preset(const std::string& name,
                                std::optional<int64_t> head_dim = std::nullopt);

  /// The specification of a head that has a part for each axis of positions, one after the other.
  /// Each part has a base and a scaling of its own.
  ///
  ///     const auto spec = posembed::RotarySpec::axial({time, height, width});
  /// @param axes  specifications of the parts as heads of their own
  /// @param within_axes  half-split pairs lie within each part of the head; otherwise the whole
  ///     head is split in two, so that a pair has a member in each half. Interleaved pairs always
  ///     lie within a part.
  /// @throws c10::ValueError a part does not rotate as a whole, has several axes, or differs from
  ///     the others in more than size, base, scaling and frequencies
  static RotarySpec axial(const std::vector<RotarySpec>& axes, bool within_axes = true);

  /// The specification of each layer, in the model's order, from what `python -m posembed describe`
  /// writes; std::nullopt for a layer that does not rotate. See ModelPositions.
  ///
  ///     const auto layers = posembed::RotarySpec::for_layers("llama/positions.json");
  ///     posembed::RotaryEmbedding rope{posembed::RotaryOptions(layers[0].value())};
  /// @param positions  the path of positions.json or of its folder, or JSON text
  /// @throws c10::ValueError no such document, or its layers are not known
  /// @throws std::filesystem::filesystem_error the file cannot be read
  static std::vector<std::optional<RotarySpec>> for_layers(const std::string& positions);

  /// Whether frequencies depend on the length of the sequence. resolve() fixes them.
  bool is_dynamic() const;

  /// The specification, with fixed frequencies, for sequences of one length. Use the same one for a
  /// whole cache, because keys rotated by different ones are not comparable.
  RotarySpec resolve(int64_t seq_len) const;

  /// The specification for rotating keys without a query, because a tensor on its own counts as a
  /// query. Only xPos makes a difference.
  RotarySpec for_keys() const;

  /// Radians per position: float64 [rotary_dim / 2].
  /// @param seq_len  as in resolve(); default: within the original context
  torch::Tensor frequencies(std::optional<int64_t> seq_len = std::nullopt) const;

  /// Positions per turn of each pair: float64 [rotary_dim / 2]; inf for pairs that do not turn.
  torch::Tensor wavelengths(std::optional<int64_t> seq_len = std::nullopt) const;

  /// The factor that rotated queries and keys are multiplied by.
  double attention_factor(std::optional<int64_t> seq_len = std::nullopt) const;

  /// One line with the fields that differ from the defaults: "128, base=500000,
  /// scaling=linear(factor=8)".
  std::string describe() const;

  /// The largest error of an angle that is a product of float32 numbers, with the float32
  /// frequencies of transformers, at any position below `length`. Errors grow with the position, so
  /// of more than 2^28 / pairs positions only that many are looked at, the last.
  /// @throws c10::ValueError a length below 1
  AngleError float32_error(int64_t length) const;

  /// A readable report of several lines: pairs, wavelengths, which pairs are stretched and by how
  /// much, and float32_error().
  /// @param seq_len  as in resolve()
  /// @param max_positions  the length for the error, unless seq_len says it; default: the length
  ///     that the scaling names, if any
  std::string explain(std::optional<int64_t> seq_len = std::nullopt,
                      std::optional<int64_t> max_positions = std::nullopt) const;

  /// Describes the differences, and the position from which angles differ by more than 1e-3 rad.
  std::string diff(const RotarySpec& other) const;

  bool operator==(const RotarySpec& other) const;
  bool operator!=(const RotarySpec& other) const { return !(*this == other); }
};

}  // namespace posembed
