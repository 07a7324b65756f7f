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

/// The checks of rotary_, with rerotate_'s names of the arguments.
void check_moved(const Tensor& key, const char* positions, const Rotation& by) {
  check(key, nullptr, by, {"key", "key", positions});
  const Tensor& places = *by.positions;
  if (places.is_cpu() && !at::isTensorSubclassLike(places)) {
    check_position_values(places.contiguous(), positions);
  }
}

void rerotate(const Tensor& key, const Tensor& old_positions, const Tensor& new_positions,
              const MaybeTensor& frequencies, Text spec, std::optional<Text> new_spec,
              Text layout) {
  dispatcher::check_floating(key, "key");
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && key.requires_grad()),
                    "key: requires grad, and an in-place operator keeps no history");
  const MaybeTensor before = old_positions, after = new_positions, none;
  const MaybeTensor learned = frequencies ? MaybeTensor(frequencies->detach()) : none;
  const std::string& old_keys = specification(spec).for_keys;
  const std::string& new_keys = specification(new_spec.value_or(spec)).for_keys;
  const Rotation back{before, learned, none, old_keys, layout, 0, /*inverse=*/true};
  const Rotation forth{after, new_spec ? none : learned, none, new_keys, layout, 0};
  check_moved(key, "old_positions", back);
  check_moved(key, "new_positions", forth);
  // Use float64 between the two rotations, so that the only rounding is the one to the keys' dtype.
  const Tensor wide = key.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  call_rotary_in_place(wide, back);
  call_rotary_in_place(wide, forth);
  key.copy_(wide);
}

}  // namespace

// Composite, so that autograd, compilers and devices see the operators inside.
TORCH_LIBRARY_IMPL(posembed, CompositeImplicitAutograd, m) { m.impl("rotary_rerotate_", rerotate); }

}  // namespace rotary

torch::Tensor functional::rerotate_(const torch::Tensor& key, const torch::Tensor& old_positions,
                                    const torch::Tensor& new_positions, std::string_view spec,
                                    std::optional<std::string_view> new_spec, Layout layout,
                                    const std::optional<torch::Tensor>& frequencies) {
  rotary::rerotate(key, old_positions, new_positions, frequencies, spec, new_spec, name(layout));
  return key;
}

}  // namespace posembed
