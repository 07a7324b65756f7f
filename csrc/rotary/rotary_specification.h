// Parts of a specification: its scaling, presets, JSON and accuracy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "posembed/rotary_specification.h"
#include "rotary/rotary_checks.h"
#include "rotary/rotary_frequencies.h"

namespace posembed::rotary {

struct Scaled {
  Series frequencies;              // [rotary_dim / 2], radians per position
  double attention_factor = 1.0;   // multiplies rotated pairs
  std::vector<double> decay = {};  // xPos: log2 of a query's amplitude per position; or empty
  double decay_center = 0.0;
};

/// Requires a specification that passes RotarySpec::check(). Dynamic scalings give the frequencies
/// for lengths within the original context.
Scaled scaled(const RotarySpec& spec);

YarnBlend blend_of(const YarnScaling& scaling);

/// Raises c10::ValueError, which names the field, if the scaling's numbers are invalid.
void check_scaling(const RotarySpec& spec);

// ----------------------------------------------------------------------------------------- presets
// Rotations of image and video models by name: see RotarySpec::from_preset. rotary_presets.json has
// their numbers, each with its source.

/// What a preset leaves open, and a model's configuration states.
struct PresetNumbers {
  std::optional<int64_t> head_dim = std::nullopt;
  std::optional<std::vector<int64_t>> axes = std::nullopt;  ///< components of each axis
  std::optional<double> base = std::nullopt;
  std::optional<std::vector<double>> ntk = std::nullopt;  ///< NtkScaling of each axis
};

/// The specification of a preset. Throws c10::ValueError as RotarySpec::from_preset.
RotarySpec preset(const std::string& name, const PresetNumbers& stated);

// -------------------------------------------------------------------------------------------- json
// Reads a specification from its canonical JSON text.

/// Reads the text of RotarySpec::to_json(); missing keys have their defaults. Throws
/// c10::ValueError for text that is not JSON and for unknown keys; does not check values.
RotarySpec parse(const std::string& text);

// ---------------------------------------------------------------------------------------- numerics
// Angles as PyTorch programs compute them: float32 frequencies times float32 positions, torch's
// sine and cosine. Models were trained with these; docs/guide/rotary_bits.md lists the programs.

/// Radians per position as in transformers' ROPE_INIT_FUNCTIONS: float32 [pairs].
at::Tensor float32_frequencies(const RotarySpec& spec);

/// Sines and cosines of tokens.
struct AngleTables {
  at::Tensor cosines, sines;  // float32 [seq, pairs] or [batch, seq, pairs]
};

/// Computes the tables for numerics other than exact, and points `call` to them.
AngleTables use_tables(const Specification& spec, const Tensor& query, const Inputs& inputs,
                       Arguments* call);

}  // namespace posembed::rotary
