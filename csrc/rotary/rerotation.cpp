// Moves rotated keys to other positions, or to another specification.
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "dispatcher/inference_only.h"
#include "posembed/rotary.h"
#include "rotary/arguments.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed {
namespace rotary {
namespace {

/// Also accepts float8, for caches: as rotations are linear, the scale of a cache stays the same.
void check_key_type(const Tensor& key) {
  if (key.scalar_type() == at::kFloat8_e4m3fn) return;
  TORCH_CHECK_TYPE(at::isFloatingType(key.scalar_type()) && key.element_size() > 1,
                   "key: expected ", "float32, float64, bfloat16, float16 or float8_e4m3fn, got ",
                   key.scalar_type());
}

/// Writes moved keys in the dtype of the cache; float8 saturates, as rotary_cache_ does.
void store(const Tensor& wide, const Tensor& key) {
  constexpr double largest = 448;
  key.copy_(key.scalar_type() == at::kFloat8_e4m3fn ? wide.clamp(-largest, largest) : wide);
}

/// The checks of rotary_, with the argument names of rerotate_.
void check_moved(const Tensor& key, const char* argument, const Rotation& rotation) {
  check(key, nullptr, rotation, {"key", "key", argument});
  const Tensor& positions = *rotation.call.positions();
  if (positions.is_cpu() && !at::isTensorSubclassLike(positions)) {
    check_position_values(positions.resolve_neg().contiguous(), argument, rotation.call.layout());
  }
}

void rerotate(const Tensor& key, const Tensor& old_positions, const Tensor& new_positions,
              Text spec, std::optional<Text> new_spec, Text layout,
              const MaybeTensor& frequencies) {
  check_key_type(key);
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && key.requires_grad()),
                    "key: requires grad, and an in-place operator keeps no history");
  dispatcher::check_versioned(key, "key");
  const SpecificationPointer before = specification(spec);
  const SpecificationPointer after = specification(new_spec.value_or(spec));
  const auto to = [&](const Tensor& positions, bool with_frequencies) {
    RotaryCall call(positions);
    call.layout(dispatcher::enum_from<Layout>(layout));
    if (with_frequencies && frequencies.has_value()) call.frequencies(frequencies->detach());
    return call;
  };
  const Rotation back{before->for_keys, to(old_positions, true).inverse(true)};
  const Rotation forth{after->for_keys, to(new_positions, !new_spec.has_value())};
  // Use float64 between the two rotations, so that only the conversion to the keys' dtype rounds.
  const Tensor wide = key.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  check_moved(wide, "old_positions", back);
  check_moved(wide, "new_positions", forth);
  rotary_(wide, back);
  rotary_(wide, forth);
  store(wide, key);
}

}  // namespace

// Composite, so that autograd, compilers and backends see the operators inside.
TORCH_LIBRARY_FRAGMENT(posembed, m) { rotary_rerotate_.compose<rerotate>(m); }

}  // namespace rotary

torch::Tensor functional::rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                                    const torch::Tensor& new_positions, const RotarySpec& spec,
                                    const std::optional<RotarySpec>& new_spec,
                                    const RotaryCall& call) {
  TORCH_CHECK_VALUE(!call.positions() && !call.cu_seqlens() && !call.inverse() &&
                        !call.offset().of_samples() && call.offset().number() == 0,
                    "call: expected only a layout and frequencies for rerotate_");
  std::optional<std::string> new_text;
  if (new_spec.has_value()) new_text = new_spec->to_json();
  rotary::rerotate(key, old_positions, new_positions, spec.to_json(), new_text, name(call.layout()),
                   call.frequencies());
  return key;
}

}  // namespace posembed
