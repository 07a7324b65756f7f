// Moves rotated keys to other positions, or to another specification.
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "dispatcher/checks.h"
#include "posembed/rotary.h"
#include "rotary/arguments.h"
#include "rotary/operator.h"
#include "rotary/specification.h"

namespace posembed {
namespace rotary {
namespace {

/// The checks of rotary_, with the argument names of rerotate_.
void check_moved(const Tensor& key, const char* argument, const Rotation& rotation) {
  check(key, nullptr, rotation, {"key", "key", argument});
  const Tensor& positions = *rotation.call.positions();
  if (positions.is_cpu() && !at::isTensorSubclassLike(positions)) {
    check_position_values(positions.resolve_neg().contiguous(), argument);
  }
}

void rerotate(const Tensor& key, const Tensor& old_positions, const Tensor& new_positions,
              Text spec, std::optional<Text> new_spec, Text layout,
              const MaybeTensor& frequencies) {
  dispatcher::check_floating(key, "key");
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && key.requires_grad()),
                    "key: requires grad, and an in-place operator keeps no history");
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
  check_moved(key, "old_positions", back);
  check_moved(key, "new_positions", forth);
  // Use float64 between the two rotations, so that only the conversion to the keys' dtype rounds.
  const Tensor wide = key.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  rotary_(wide, back);
  rotary_(wide, forth);
  key.copy_(wide);
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
